"""A rollout's state as values: the rollout, its events and guardrail readings, the samples that it is judged by.

Knows nothing of gRPC, of storage, or of how engines are reached. Pure values.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest

from google.protobuf import json_format
from meridian.v1 import rollout_pb2
from pydantic import BaseModel, ConfigDict

from meridian_control.rollout.plan import Plan

AUTHOR = "meridian-control"


class State(StrEnum):
    """As rollout.proto spells and explains them."""

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
    """Stored as JSON; what a newer version added is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


Counts = tuple[int, ...]


class Measured(Value):
    """Observations of some engines: histograms over TIME_BOUNDS_S, and counts of answers."""

    output_itl: Counts = ()
    ttot: Counts = ()
    answers: int = 0
    empty: int = 0
    reentries: int = 0

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(
            output_itl=_added(self.output_itl, other.output_itl),
            ttot=_added(self.ttot, other.ttot),
            answers=self.answers + other.answers,
            empty=self.empty + other.empty,
            reentries=self.reentries + other.reentries,
        )


NOTHING = Measured()


class GuardrailReading(Value):
    """A GuardrailReading."""

    guardrail: str
    value: float | None = None
    limit: float
    observations: int
    stable_observations: int = 0
    violated: bool = False
    waiting: bool = False


class RolloutEvent(Value):
    """A RolloutEvent."""

    time: datetime
    event: str
    step: int
    author: str
    reason: str
    request_id: str = ""


class Rollout(Value):
    """The fields of rollout.proto's Rollout, and what it takes to go on."""

    rollout_id: int
    plan: Plan
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
    # Events so far, those that are not kept any more included.
    changes: int = 0
    # How often it was stored.
    version: int = 0
    # Observed in this step on either side; on engines with the policy from before in earlier steps.
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
        hidden = {"changes", "version", "candidate", "stable", "reference"}
        fields = self.model_dump(mode="json", exclude_none=True, exclude=hidden)
        return json_format.ParseDict(fields | {"etag": self.etag}, rollout_pb2.Rollout())


@dataclass(frozen=True)
class Sample:
    """Observations of the fleet since the sample before, and how it stands."""

    # Observed on engines that have applied the candidate, and on those that have the policy from before.
    candidate: Measured = NOTHING
    stable: Measured = NOTHING
    # Connected engines that have applied the candidate, and all others.
    candidate_engines: int = 0
    other_engines: int = 0
    # In the group: engines that were given the candidate and have not answered, that lost their stream less than the
    # lease ago, that refuse the candidate, that are DEGRADED.
    pending: int = 0
    missing: int = 0
    nacks: int = 0
    degraded: int = 0


@dataclass(frozen=True)
class By:
    """A change of a rollout: its author, time and reason."""

    now: datetime
    author: str = AUTHOR
    reason: str = ""
    request_id: str = ""


def _added(one: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
