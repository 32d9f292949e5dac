"""A rollout under way: which engine gets which revision, and what happens next.

Owns every decision about it, as pure functions of state, measurements and time. Knows nothing of gRPC, of storage, or
of how engines are reached.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from meridian_control.common.errors import RolloutEnded
from meridian_control.rollout.guardrails import judge
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import (
    ACTIVE,
    NOTHING,
    TAKEN_BACK,
    By,
    GuardrailReading,
    Rollout,
    RolloutEvent,
    Sample,
    State,
)

# The newest events of a rollout are kept.
MAX_EVENTS = 200
# The states that commands lead to.
EVENTS = {"pause": "paused", "resume": "resumed", "abort": "aborted"}


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
