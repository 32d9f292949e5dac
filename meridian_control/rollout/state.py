"""Defines the state of a rollout as immutable values: the rollout, its events, guardrail readings and samples.

The module does not know how the state is served, stored or brought to engines.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from operator import add

from google.protobuf import json_format
from meridian.v1 import rollout_pb2
from pydantic import BaseModel, ConfigDict

from meridian_control.rollout.plan import Plan

AUTHOR = "meridian-control"


class State(StrEnum):
    """The states of a rollout, with their names in rollout.proto."""

    RUNNING = "ROLLOUT_STATE_RUNNING"
    PAUSED = "ROLLOUT_STATE_PAUSED"
    HALTED = "ROLLOUT_STATE_HALTED"
    COMPLETED = "ROLLOUT_STATE_COMPLETED"
    ROLLED_BACK = "ROLLOUT_STATE_ROLLED_BACK"
    ABORTED = "ROLLOUT_STATE_ABORTED"

    @property
    def word(self) -> str:
        return self.removeprefix("ROLLOUT_STATE_").lower()


ACTIVE = (State.RUNNING, State.PAUSED, State.HALTED)
TAKEN_BACK = (State.ROLLED_BACK, State.ABORTED)


class Value(BaseModel):
    """A value that is stored as JSON; fields that a newer version of the control plane added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


Counts = tuple[int, ...]


class Measured(Value):
    """Observations on a set of engines: histograms over TIME_BOUNDS_S, counts of answers, and counts of requests as
    `Engine.control_group` in fleet.proto has them."""

    output_itl: Counts = ()
    ttot: Counts = ()
    answers: int = 0
    empty: int = 0
    reentries: int = 0
    shortened: int = 0
    judged: int = 0
    judged_stops: int = 0
    harmful: int = 0
    unjudged: int = 0

    def __add__(self, other: "Measured") -> "Measured":
        sums = {name: (_added if isinstance(mine, tuple) else add)(mine, getattr(other, name)) for name, mine in self}
        return Measured(**sums)


NOTHING = Measured()


class GuardrailReading(Value):
    """The fields of rollout.proto's GuardrailReading."""

    guardrail: str
    value: float | None = None
    limit: float
    observations: int
    stable_observations: int = 0
    violated: bool = False
    waiting: bool = False


class RolloutEvent(Value):
    """The fields of rollout.proto's RolloutEvent."""

    time: datetime
    event: str
    step: int
    author: str
    reason: str
    request_id: str = ""


class Rollout(Value):
    """The fields of rollout.proto's Rollout, and the measurements that the rollout needs to proceed."""

    rollout_id: int
    plan: Plan
    # Limit of the guardrail on harm, which follows from the plan or from the candidate; None for none.
    harm_limit: float | None = None
    stable_revision: int
    candidate_revision: int
    rollback_revision: int = 0
    state: State = State.RUNNING
    step: int = 1
    baked_s: float = 0.0
    waiting_for: str = ""
    candidate_engines: int = 0
    other_engines: int = 0
    guardrails: tuple[GuardrailReading, ...] = ()
    violation: GuardrailReading | None = None
    events: tuple[RolloutEvent, ...] = ()
    author: str
    reason: str
    create_time: datetime
    # Number of events so far, including events that are no longer kept.
    changes: int = 0
    # Number of times that the rollout was stored.
    version: int = 0
    # Observations in this step on engines with the candidate and with the stable revision; observations in earlier
    # steps on engines with the stable revision.
    candidate: Measured = NOTHING
    stable: Measured = NOTHING
    reference: Measured = NOTHING

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def etag(self) -> str:
        return f"{self.rollout_id}-{self.changes}"

    def message(self) -> rollout_pb2.Rollout:
        hidden = {"changes", "version", "harm_limit", "candidate", "stable", "reference"}
        hidden |= set() if self.active else {"waiting_for"}
        fields = self.model_dump(mode="json", exclude_none=True, exclude=hidden)
        return json_format.ParseDict(fields | {"etag": self.etag}, rollout_pb2.Rollout())


@dataclass(frozen=True)
class Sample:
    """Observations on the fleet since the previous sample, and the current state of its engines."""

    # Observations on engines that have applied the candidate, and on engines with the stable revision.
    candidate: Measured = NOTHING
    stable: Measured = NOTHING
    # Numbers of connected engines that have applied the candidate, of all other connected engines, and of those
    # that can be compared with: they have the stable revision and an agent that is on.
    candidate_engines: int = 0
    other_engines: int = 0
    stable_engines: int = 0
    # Numbers of engines in the group that have not answered to the candidate yet (pending), whose stream broke off
    # less than the lease ago (missing), that have applied the candidate but are frozen (frozen), that refuse the
    # candidate (nacks), and that are DEGRADED or off (degraded).
    pending: int = 0
    missing: int = 0
    frozen: int = 0
    nacks: int = 0
    degraded: int = 0
    # Whether engines may not have come back yet since the leading replica began to watch.
    returning: bool = False


@dataclass(frozen=True)
class By:
    """The author, time, reason and request id of a change to a rollout."""

    now: datetime
    author: str = AUTHOR
    reason: str = ""
    request_id: str = ""


def _added(counts: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip_longest(counts, other, fillvalue=0))
