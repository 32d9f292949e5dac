"""Decides which engine gets which revision during a rollout, and how the rollout proceeds.

All functions are pure and depend on state, measurements and time. The module does not know how the state is served,
stored or brought to engines.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from meridian_control.common.decision_words import short, with_limit
from meridian_control.common.errors import RolloutEnded
from meridian_control.common.look import counted
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

# Number of newest events of a rollout that are kept.
MAX_EVENTS = 200
# Event that each command leads to.
EVENTS = {"pause": "paused", "resume": "resumed", "abort": "aborted"}


def revision_of(rollout: Rollout, engine_id: str, labels: Mapping[str, str], has: int) -> int:
    """Return the revision that an engine should have.

    has: newest revision that the engine was sent or reported, 0 for none. An engine that has the candidate keeps it,
    even if its labels change. An engine may report a newer revision of a store that was lost.
    """
    if rollout.state in TAKEN_BACK:
        return rollout.rollback_revision
    if rollout.state is State.COMPLETED or has == rollout.candidate_revision:
        return rollout.candidate_revision
    begun = rollout.plan.step[: rollout.step]
    matches = any(step.matches(rollout.rollout_id, engine_id, labels) for step in begun)
    return rollout.candidate_revision if matches else rollout.stable_revision


def begin(rollout_id: int, plan: Plan, revisions: tuple[int, int], by: By, harm_limit: float | None = None) -> Rollout:
    """Begin a rollout. revisions: the revision in force and the candidate's revision. harm_limit: the limit of the
    guardrail on harm, None for none."""
    stable, candidate = revisions
    new = Rollout(
        rollout_id=rollout_id,
        plan=plan,
        harm_limit=harm_limit,
        stable_revision=stable,
        candidate_revision=candidate,
        author=by.author,
        reason=by.reason,
        create_time=by.now,
    )
    return _with(new, by, "started", by.reason)


def tick(rollout: Rollout, sample: Sample, elapsed_s: float, now: datetime) -> Rollout:
    """Return the rollout after another `elapsed_s` seconds in which the sample was observed."""
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
        waiting_for=_waiting_for(rollout, sample, readings),
        baked_s=rollout.baked_s + (elapsed_s if running and not sample.frozen else 0.0),
    )
    if violated := [reading for reading in readings if reading.violated]:
        first, state = violated[0], State.HALTED if rollout.plan.on_violation == "halt" else State.ROLLED_BACK
        reason = "; ".join(map(_violated, violated))
        return _with(_updated(rollout, state=state, violation=first, waiting_for=""), By(now), state.word, reason)
    if not running or rollout.waiting_for or rollout.baked_s < rollout.plan.step[rollout.step - 1].bake_s:
        return rollout
    reason = f"step {rollout.step} has baked for {short(rollout.baked_s, 4)} s"
    reason += ", and no guardrail is violated" * bool(readings)
    if rollout.step == len(rollout.plan.step):
        return _with(_updated(rollout, state=State.COMPLETED), By(now), "completed", reason)
    reference = rollout.reference + rollout.stable
    return _with(_updated(_anew(rollout), step=rollout.step + 1, reference=reference), By(now), "advanced", reason)


def pause(rollout: Rollout, by: By) -> Rollout:
    """Pause a rollout. Raises RolloutEnded if the rollout is not active."""
    return _steered(rollout, by, "pause", State.PAUSED, (State.RUNNING,))


def resume(rollout: Rollout, by: By) -> Rollout:
    """Resume a rollout. Raises RolloutEnded if the rollout is not active."""
    return _steered(rollout, by, "resume", State.RUNNING, (State.PAUSED, State.HALTED))


def abort(rollout: Rollout, by: By) -> Rollout:
    """Take back the candidate of a rollout. Raises RolloutEnded if the rollout is not active."""
    return _steered(rollout, by, "abort", State.ABORTED, ACTIVE)


def knows(rollout: Rollout, by: By) -> bool:
    """Whether a call with the same request id has already changed the rollout."""
    return bool(by.request_id) and any(event.request_id == by.request_id for event in rollout.events)


def _steered(rollout: Rollout, by: By, what: str, to: State, possible: tuple[State, ...]) -> Rollout:
    """Return the rollout in state `to`, or the unchanged rollout if a repeated or needless call changes nothing."""
    if knows(rollout, by) or rollout.state is to:
        return rollout
    if not rollout.active:
        raise RolloutEnded(rollout.rollout_id, rollout.state.word, what)
    if rollout.state not in possible:
        return rollout
    if (rollout.state, to) == (State.HALTED, State.RUNNING):
        begun = _updated(_anew(rollout), violation=None)
    else:
        begun = rollout
    return _with(_updated(begun, state=to), by, EVENTS[what], by.reason)


def _with(rollout: Rollout, by: By, event: str, reason: str = "") -> Rollout:
    noted = RolloutEvent(
        time=by.now, event=event, step=rollout.step, author=by.author, reason=reason, request_id=by.request_id
    )
    return _updated(rollout, events=(*rollout.events, noted)[-MAX_EVENTS:], changes=rollout.changes + 1)


def _anew(rollout: Rollout) -> Rollout:
    """Begin the step of a rollout, or begin it again."""
    return _updated(rollout, baked_s=0.0, waiting_for="", guardrails=(), candidate=NOTHING, stable=NOTHING)


def _updated(rollout: Rollout, **fields: Any) -> Rollout:
    return rollout.model_copy(update=fields)


def warnings(rollout: Rollout, engines: Collection[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a line for each step that would wait for engines. engines: id and labels of each connected engine."""
    if not engines:
        return ["no engine is connected: the rollout waits until one connects"]
    texts = []
    for number, step in enumerate(rollout.plan.step, 1):
        steps = rollout.plan.step[:number]
        chosen = any(target.matches(rollout.rollout_id, *engine) for target in steps for engine in engines)
        if not chosen and not _selects_nobody(rollout, number):
            texts.append(
                f"step {number} selects none of the {len(engines)} connected engines ({step}): it waits until an "
                "engine that it selects connects"
            )
    return texts


def _selects_nobody(rollout: Rollout, number: int) -> bool:
    """Whether a step is meant to have no engine: its share is 0, and a later step has one. Such a step only watches the
    engines with the previous policy."""
    return rollout.plan.step[number - 1].percent == 0 and number < len(rollout.plan.step)


def _violated(reading: GuardrailReading) -> str:
    return f"{reading.guardrail} is {with_limit(reading.value or 0.0, reading.limit)}"


def _waiting_for(rollout: Rollout, sample: Sample, readings: tuple[GuardrailReading, ...]) -> str:
    if not sample.candidate_engines + sample.other_engines:
        return "an engine to connect"
    for engines, what in (
        (sample.pending, "apply the candidate"),
        # Nobody knows how many engines may still come back to a replica that has just begun to watch.
        (sample.missing or (None if sample.returning else 0), "connect again"),
        (sample.frozen, "thaw"),
    ):
        if engines != 0:
            who = "any engines" if engines is None else counted(engines, "engine")
            return f"{who} to {what}"
    if not sample.candidate_engines and not _selects_nobody(rollout, rollout.step):
        # Nothing is measured on a candidate, so no guardrail can be violated.
        if sample.nacks or sample.degraded:
            off = (sample.nacks, "refused it"), (sample.degraded, "lost the stream or went off")
            why = " and ".join(f"{counted(number, 'engine')} {what}" for number, what in off if number)
            return f"an engine with the candidate: {why}"
        step = rollout.plan.step[rollout.step - 1]
        return (
            f"an engine with the candidate: step {rollout.step} selects none of the {sample.other_engines} connected "
            f"engines ({step}); connect one, or abort and start again with another plan"
        )
    short = [reading.guardrail for reading in readings if reading.waiting]
    return f"observations for {', '.join(short)}" if short else ""
