"""A rollout under way: which engine gets which revision, what its guardrails say, and what happens next.

Owns the state and every decision about it, as pure functions of state, measurements and time. Knows nothing of gRPC, of
storage, or of how engines are reached.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from google.protobuf import json_format
from meridian.v1 import rollout_pb2
from pydantic import BaseModel, ConfigDict

from meridian_control.common.errors import RolloutEnded
from meridian_control.common.histogram import TIME_BOUNDS_S
from meridian_control.rollout.plan import Guardrails, Plan

# The newest events of a rollout are kept.
MAX_EVENTS = 200
AUTHOR = "meridian-control"
P99 = 0.99
# The states that commands lead to.
EVENTS = {"pause": "paused", "resume": "resumed", "abort": "aborted"}


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


# --------------------------------------------------------------------------------------------------------- who gets it


def revision_of(rollout: Rollout, engine_id: str, labels: Mapping[str, str], has: int) -> int:
    """The revision an engine is to have, given the newest that it was given or said it has (0 for none).

    Never older than what the engine has of these, whatever became of its labels.
    """
    if rollout.state in TAKEN_BACK:
        return rollout.rollback_revision
    if rollout.state is State.COMPLETED or has >= rollout.candidate_revision:
        return rollout.candidate_revision
    begun = rollout.plan.step[: rollout.step]
    matches = any(step.matches(rollout.rollout_id, engine_id, labels) for step in begun)
    return rollout.candidate_revision if matches else rollout.stable_revision


# ------------------------------------------------------------------------------------------------------ what happens


def begin(rollout_id: int, plan: Plan, revisions: tuple[int, int], by: By) -> Rollout:
    """A new rollout, given the revisions in force and of the candidate."""
    stable, candidate = revisions
    new = Rollout(
        rollout_id=rollout_id,
        plan=plan,
        stable_revision=stable,
        candidate_revision=candidate,
        author=by.author,
        reason=by.reason,
        create_time=by.now,
    )
    return _with(new, by, "started", by.reason)


def tick(rollout: Rollout, sample: Sample, elapsed_s: float, now: datetime) -> Rollout:
    """The state of a rollout that was watched for `elapsed_s` more."""
    if rollout.state not in (State.RUNNING, State.PAUSED):
        return rollout
    rollout = _updated(
        rollout,
        candidate=rollout.candidate + sample.candidate,
        stable=rollout.stable + sample.stable,
        candidate_engines=sample.candidate_engines,
        other_engines=sample.other_engines,
    )
    readings = tuple(judge(rollout, sample))
    running = rollout.state is State.RUNNING
    rollout = _updated(
        rollout,
        guardrails=readings,
        waiting_for=_waiting_for(sample, readings),
        baked_s=rollout.baked_s + (elapsed_s if running else 0.0),
    )
    if violated := [reading for reading in readings if reading.violated]:
        return _violated(rollout, violated[0], now)
    if not running or rollout.waiting_for or rollout.baked_s < rollout.plan.step[rollout.step - 1].bake_s:
        return rollout
    if rollout.step == len(rollout.plan.step):
        return _with(_updated(rollout, state=State.COMPLETED), By(now), "completed")
    reference = rollout.reference + rollout.stable
    return _with(_updated(_anew(rollout), step=rollout.step + 1, reference=reference), By(now), "advanced")


def pause(rollout: Rollout, by: By) -> Rollout:
    """Raises RolloutEnded where it is not active."""
    return _steered(rollout, by, "pause", State.PAUSED, (State.RUNNING,))


def resume(rollout: Rollout, by: By) -> Rollout:
    """Raises RolloutEnded where it is not active."""
    return _steered(rollout, by, "resume", State.RUNNING, (State.PAUSED, State.HALTED))


def abort(rollout: Rollout, by: By) -> Rollout:
    """Take back the policy that the rollout has brought. Raises RolloutEnded where it is not active."""
    return _steered(rollout, by, "abort", State.ABORTED, ACTIVE)


def knows(rollout: Rollout, by: By) -> bool:
    """Whether a call was carried out already, under its request id."""
    return bool(by.request_id) and any(event.request_id == by.request_id for event in rollout.events)


def _steered(rollout: Rollout, by: By, what: str, to: State, possible: tuple[State, ...]) -> Rollout:
    """The rollout itself where the call changes nothing: a halted one need not be paused, a paused one neither."""
    if knows(rollout, by) or rollout.state is to:
        return rollout
    if not rollout.active:
        raise RolloutEnded(rollout.rollout_id, rollout.state.word, what)
    if rollout.state not in possible:
        return rollout
    begun = _anew(rollout) if (rollout.state, to) == (State.HALTED, State.RUNNING) else rollout
    return _with(_updated(begun, state=to), by, EVENTS[what], by.reason)


def _violated(rollout: Rollout, reading: GuardrailReading, now: datetime) -> Rollout:
    halt = rollout.plan.on_violation == "halt"
    state = State.HALTED if halt else State.ROLLED_BACK
    reason = f"{reading.guardrail} is {reading.value or 0.0:.4g}, limit {reading.limit:.4g}"
    return _with(_updated(rollout, state=state, violation=reading, waiting_for=""), By(now), state.word, reason)


def _with(rollout: Rollout, by: By, event: str, reason: str = "") -> Rollout:
    noted = RolloutEvent(
        time=by.now, event=event, step=rollout.step, author=by.author, reason=reason, request_id=by.request_id
    )
    return _updated(rollout, events=(*rollout.events, noted)[-MAX_EVENTS:], changes=rollout.changes + 1)


def _anew(rollout: Rollout) -> Rollout:
    """The step begins, or begins again."""
    return _updated(rollout, baked_s=0.0, waiting_for="", guardrails=(), candidate=NOTHING, stable=NOTHING)


def _updated(rollout: Rollout, **fields: Any) -> Rollout:
    return rollout.model_copy(update=fields)


def _waiting_for(sample: Sample, readings: tuple[GuardrailReading, ...]) -> str:
    if not sample.candidate_engines + sample.other_engines:
        return "an engine to connect"
    if sample.pending:
        return f"{sample.pending} engines to apply the candidate"
    if sample.missing:
        return f"{sample.missing} engines to connect again"
    short = [reading.guardrail for reading in readings if reading.waiting]
    return f"observations for {', '.join(short)}" if short else ""


# --------------------------------------------------------------------------------------------------------- guardrails


def judge(rollout: Rollout, sample: Sample) -> Iterator[GuardrailReading]:
    """Every guardrail that has a limit.

    One that compares takes the other engines' observations of earlier steps in, where those of this step are too few.
    A step without an engine of its own, and a comparison without others, wait for nothing.
    """
    limits, mine, theirs = rollout.plan.guardrails, rollout.candidate, rollout.stable
    earlier = rollout.reference + theirs
    present = sample.candidate_engines > 0, sample.other_engines > 0
    for name, observed in _OBSERVED.items():
        latency = name.endswith("_p99")
        value, count = observed(mine)
        other, others = observed(theirs)
        if others < max(1, limits.min_observations):
            other, others = observed(earlier)
        yield from _absolute(f"{name}_ms" if latency else name, limits, value, count, present[0])
        compared = None
        if value is not None and other is not None:
            compared = value / other if latency else value - other
        suffix = "ratio" if latency else "increase"
        yield from _compared(f"{name}_{suffix}", limits, compared, (count, others), present)
    for name, engines in (("nacks", sample.nacks), ("degraded_engines", sample.degraded)):
        if (limit := getattr(limits, name)) is not None:
            yield GuardrailReading(
                guardrail=name, value=engines, limit=limit, observations=engines, violated=engines > limit
            )


def p99(counts: Counts) -> float | None:
    """Seconds, interpolated within a bucket of TIME_BOUNDS_S; None for no observations."""
    rank, below = P99 * sum(counts), 0
    if not rank:
        return None
    bounds = (0.0, *TIME_BOUNDS_S)
    for index, count in enumerate(counts[:-1]):
        if below + count >= rank:
            return bounds[index] + (bounds[index + 1] - bounds[index]) * (rank - below) / count
        below += count
    return bounds[-1]


def _absolute(
    name: str, limits: Guardrails, value: float | None, count: int, watched: bool
) -> Iterator[GuardrailReading]:
    if (limit := getattr(limits, name)) is not None:
        known = value is not None and count >= limits.min_observations
        yield GuardrailReading(
            guardrail=name,
            value=value,
            limit=limit,
            observations=count,
            violated=known and value is not None and value > limit,
            waiting=watched and count < limits.min_observations,
        )


def _compared(
    name: str, limits: Guardrails, value: float | None, counts: tuple[int, int], present: tuple[bool, bool]
) -> Iterator[GuardrailReading]:
    (count, other), (watched, comparable) = counts, present
    for reading in _absolute(name, limits, value, count, watched):
        short = other < limits.min_observations
        yield reading.model_copy(
            update={
                "stable_observations": other,
                "violated": reading.violated and not short,
                "waiting": (reading.waiting or (short and watched)) and (comparable or not short),
            }
        )


def _latency(counts: Counts) -> tuple[float | None, int]:
    value = p99(counts)
    return None if value is None else value * 1e3, sum(counts)


def _rate(part: int, whole: int) -> tuple[float | None, int]:
    return part / whole if whole else None, whole


# The value under a guardrail's name, and the number of its observations; latencies in milliseconds.
_OBSERVED: dict[str, Callable[[Measured], tuple[float | None, int]]] = {
    "output_itl_p99": lambda m: _latency(m.output_itl),
    "ttot_p99": lambda m: _latency(m.ttot),
    "reentry_rate": lambda m: _rate(m.reentries, m.answers),
    "empty_answer_rate": lambda m: _rate(m.empty, m.answers),
}


def _added(one: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
