"""The words in which people read the state of an engine, and what is wrong with engines, on the status page and in
`meridianctl`. The functions are pure."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.enum_names import state_name
from meridian_control.common.look import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# Number of names in a text.
MAX_NAMED = 3
# What is wrong with engines whose state has this word.
TROUBLES = {
    "connected": "without a policy yet",
    "degraded": "degraded, as answers come late",
    "lacks facts": "without some facts",
    "no markers": "without known thinking markers",
    "off": "with the agent off",
    "ready": "under pressure",
    "refuses": "refusing the policy",
    "stale": "stale, as answers come late",
}


class Condition(NamedTuple):
    """An engine's state in a word, the state's cause in a sentence, and its severity: bad, warn or empty."""

    word: str
    cause: str = ""
    level: str = ""


def condition(
    engine: fleet_pb2.Engine, now: datetime, reasons: Mapping[int, str] = {}, causes: Iterable[str] = ()
) -> Condition:
    """Return the engine's most important state for an operator. reasons: those of freezes, by their ids. causes: what
    capabilities do to the engine, if it is connected and has no worse trouble."""
    if engine.state != fleet_pb2.CONNECTION_STATE_CONNECTED:
        return _gone(engine, now)
    if engine.fault:
        is_temporary = engine.HasField("recover_time")
        until = f"{engine.recover_time.ToDatetime():%H:%M:%S} UTC" if is_temporary else "it is started again"
        return Condition("off", f"the engine runs as stock vLLM until {until}: {engine.fault}", "bad")
    if engine.HasField("freeze"):
        return _frozen(engine.freeze, reasons, now)
    return _connected(engine, "; ".join(causes))


def _connected(engine: fleet_pb2.Engine, cause: str) -> Condition:
    if engine.nack_error:
        return Condition("refuses", f"revision {engine.revision}: {engine.nack_error}", "bad")
    if not engine.acked_revision:
        return Condition("connected", "the agent has not applied a policy yet", "warn")
    if engine.unknown_markers:
        return Condition("no markers", f"no token counts as thinking: {engine.unknown_markers}", "warn")
    if engine.missing_facts:
        return Condition("lacks facts", "; ".join(engine.missing_facts), "warn")
    if engine.agent_state in (agent_pb2.AGENT_STATE_STALE, agent_pb2.AGENT_STATE_DEGRADED):
        why = "answers reach the agent late: the control plane is overloaded, or too far away"
        return Condition(state_name(engine.agent_state), why, "warn")
    word = state_name(engine.agent_state) if engine.agent_state else "connected"
    faults = sum(engine.faults.values())
    past = f"after {counted(faults, 'fault')}, the last of which was {engine.last_fault}" if faults else ""
    return Condition(word, cause or past, "warn" if cause else "")


def _gone(engine: fleet_pb2.Engine, now: datetime) -> Condition:
    seen_at = engine.report_time if engine.HasField("report_time") else engine.connect_time
    ago = lasting((now - seen_at.ToDatetime(UTC)).total_seconds())
    if not engine.lost:
        return Condition("gone", f"last heard {ago} ago; it has shut down")
    if engine.agent_state == agent_pb2.AGENT_STATE_STALE:
        return Condition(
            "gone", f"last heard {ago} ago; if the engine still runs, its last decisions are in force (STALE)", "warn"
        )
    if engine.agent_state == agent_pb2.AGENT_STATE_DEGRADED:
        return Condition(
            "gone",
            f"last heard {ago} ago, longer than its lease; if the engine still runs, only caps are in force (DEGRADED)",
            "bad",
        )
    return Condition("gone", f"last heard {ago} ago, the agent was off: {engine.fault}", "bad")


def _frozen(freeze: fleet_pb2.EngineFreeze, reasons: Mapping[int, str], now: datetime) -> Condition:
    why = "; ".join(dict.fromkeys(reasons[i] for i in freeze.freeze_ids if i in reasons))
    if not freeze.confirmed:
        return Condition(
            "freezing" if freeze.freeze_ids else "thawing", why or "the agent has not confirmed yet", "warn"
        )
    if not freeze.HasField("end_time"):
        return Condition("frozen", "the engine runs as stock vLLM because its environment sets MERIDIAN_FREEZE", "warn")
    left = lasting((freeze.end_time.ToDatetime(UTC) - now).total_seconds())
    return Condition("frozen", f"runs as stock vLLM for {left} longer" + f": {why}" * bool(why), "warn")


def lasting(seconds: float) -> str:
    """Spell a duration for people: 42 s, 9 min, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def troubles(conditions: Iterable[tuple[str, Condition]]) -> Iterator[tuple[str, str]]:
    """Yield level and text of each trouble. conditions: the engines' ids and states."""
    named = defaultdict[tuple[str, str], list[str]](list)
    for name, found in conditions:
        if found.level:
            named[found.level, found.word].append(name)
    for (level, word), names in named.items():
        yield level, trouble_text(names, TROUBLES.get(word, word))


def trouble_text(names: Sequence[str], trouble: str) -> str:
    return f"{counted(len(names), 'engine')} {trouble}: {names_text(names)}"


def names_text(names: Iterable[str]) -> str:
    """Return the names, each once: several engines may share one."""
    different = list(dict.fromkeys(names))
    more = [f"and {len(different) - MAX_NAMED:,} more"] if len(different) > MAX_NAMED else []
    return ", ".join((*different[:MAX_NAMED], *more))
