"""Collects the status page's contents as plain data, from the same sources as the gRPC services.

The module decides which data the page shows, how many rows, and with which words it describes an engine's state. The
module knows nothing of HTTP. Only `contents`, `stored` and `newest_ends` query the fleet and the stores; the other
functions are pure. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control import __version__
from meridian_control.common.enum_names import outcome_name, phase_name, state_name
from meridian_control.common.errors import StoreUnavailable
from meridian_control.common.plain_data import plain
from meridian_control.engine.decision_ledger import CARRIED_OUT
from meridian_control.fleet import decision_queries
from meridian_control.fleet.part import Shown, answer_of, each

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meridian_control.engine.freeze_state import Freeze, Match
    from meridian_control.fleet.part import FleetPart
    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.policy.store import PolicyStore, RevisionHeader
    from meridian_control.rollout.store import RolloutStore

# Largest number of rows in each table; the totals above the tables count everything.
MAX_ENGINES, MAX_REQUESTS, MAX_DECISIONS, MAX_REVISIONS, MAX_ROLLOUTS, MAX_FREEZES = 200, 100, 50, 10, 5, 50
ASKED_DECISIONS = 200
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
PHASES = {"prompt": agent_pb2.PHASE_PROMPT, "think": agent_pb2.PHASE_THINK, "output": agent_pb2.PHASE_OUTPUT}


async def contents(whole: WholeFleet, policies: PolicyStore, rollouts: RolloutStore, now: datetime) -> dict[str, Any]:
    """Return everything on the page except the life of a request. Raises MeridianError."""
    parts = whole.fleet.parts.values()
    shows = (answer_of(part, part.show(), Shown({})) for part in parts)
    state, ends, *shown = await asyncio.gather(whole.watched(), newest_ends(whole), *shows)
    engines, requests = list(state.engines), sorted(state.requests, key=lambda r: -r.think_tokens)
    freezes = {freeze.freeze_id: freeze for freeze in whole.fleet.freezes.in_force}
    rows = [engine_row(engine, freezes, now, parts) for engine in engines]
    rows.sort(key=lambda row: (["bad", "warn", ""].index(row["level"]), row["id"]))
    troubles = sum(bool(row["level"]) for row in rows) + sum(block.troubles for block in shown)
    return {
        "version": __version__,
        "replica": whole.replica_id,
        "revision": whole.fleet.revision,
        "unreachable": list(state.unreachable_replicas),
        "totals": totals(engines, requests) | {"troubled": troubles},
        "engines": rows[:MAX_ENGINES],
        "engines_left_out": max(0, len(rows) - MAX_ENGINES),
        "freezes": [freeze_row(freeze, engines, now) for freeze in list(freezes.values())[:MAX_FREEZES]],
        "requests": [request_row(request) for request in requests[:MAX_REQUESTS]],
        "requests_left_out": max(0, len(requests) - MAX_REQUESTS),
        "ends": [plain(decision) for decision in ends],
        "capabilities": capability_rows(whole),
        **{name: entry for block in shown for name, entry in block.entries.items()},
        **await stored(policies, rollouts, engines),
    }


def capability_rows(whole: WholeFleet) -> list[tuple[str, str, str]]:
    """Return name, row and text of what the capabilities of this replica show."""
    counters, capabilities = whole.fleet.totals(), whole.fleet.capabilities
    return [
        (capability.name, *row)
        for capability in capabilities
        if capability.shown is not None
        for row in capability.shown(counters)
    ]


async def stored(policies: PolicyStore, rollouts: RolloutStore, engines: list[fleet_pb2.Engine]) -> dict[str, Any]:
    """Return revisions and rollouts from the database, or a note that the database cannot be read."""
    try:
        revisions, newest = await policies.history(MAX_REVISIONS), await rollouts.history(MAX_ROLLOUTS)
    except StoreUnavailable as error:
        return {"store_trouble": f"Revisions and rollouts are not up to date: {error}."}
    return {
        "revisions": [revision_row(header, engines) for header in revisions],
        "rollouts": [plain(rollout.message()) for rollout in newest],
    }


async def newest_ends(whole: WholeFleet) -> list[fleet_pb2.LoggedDecision]:
    """Return the decisions that ended thinking, newest first. Every request has a cap, so only reached caps count."""
    forces, caps = await asyncio.gather(
        *(
            decision_queries.decisions(whole, fleet_pb2.ListDecisionsRequest(kind=kind, page_size=ASKED_DECISIONS))
            for kind in ("force", "cap")
        )
    )
    reached = (d for d in caps.decisions if d.outcome in CARRIED_OUT)
    return sorted((*forces.decisions, *reached), key=lambda d: -d.time.ToNanoseconds())[:MAX_DECISIONS]


def totals(engines: Iterable[fleet_pb2.Engine], requests: Iterable[fleet_pb2.LiveRequest]) -> dict[str, Any]:
    """Return numbers over the whole fleet; counters are summed over the given engines."""
    up = [engine for engine in engines if engine.state == CONNECTED]
    return {
        "engines": len(up),
        "gone": sum(engine.state != CONNECTED for engine in engines),
        "phases": phases(requests),
        "waiting": sum(engine.waiting for engine in up),
        "ended": dict(ended(engines)),
        "output_critical": sum(engine.counters.output_critical for engine in up),
    }


def ended(engines: Iterable[fleet_pb2.Engine]) -> Counter[str]:
    """Count the real ends of thinking over all engines, by reason."""
    counts: Counter[str] = Counter()
    for engine in engines:
        counts.update({reason: count for reason, count in engine.ends.items() if not reason.endswith("_shadowed")})
    return counts


def phases(requests: Iterable[fleet_pb2.LiveRequest]) -> dict[str, dict[str, int]]:
    """Count live requests by phase and state (new, generating or preempted), as meridian_engine_requests does."""
    counts = {phase: {"new": 0, "generating": 0, "preempted": 0} for phase in PHASES}
    names = {number: phase for phase, number in PHASES.items()}
    for request in requests:
        begun = request.think_tokens + request.output_tokens
        if (phase := names.get(request.phase)) is not None:
            counts[phase]["preempted" if request.preempted else "generating" if begun else "new"] += 1
    return counts


class Condition(NamedTuple):
    """An engine's state in a word, the state's cause in a sentence, and its severity: bad, warn or empty."""

    word: str
    cause: str = ""
    level: str = ""


def condition(
    engine: fleet_pb2.Engine, freezes: Mapping[int, Freeze], now: datetime, causes: Iterable[str] = ()
) -> Condition:
    """Return the engine's most important state for an operator. causes: what capabilities do to the engine, if it is
    connected and has no worse trouble."""
    if engine.state != CONNECTED:
        return _gone(engine, now)
    if engine.fault:
        return Condition("off", f"the agent is off, so the engine runs as stock vLLM: {engine.fault}", "bad")
    if engine.HasField("freeze"):
        return _frozen(engine.freeze, freezes, now)
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
    return Condition(word, cause, "warn" if cause else "")


def _gone(engine: fleet_pb2.Engine, now: datetime) -> Condition:
    seen_at = engine.report_time if engine.HasField("report_time") else engine.connect_time
    ago = lasting((now - seen_at.ToDatetime(UTC)).total_seconds())
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


def _frozen(freeze: fleet_pb2.EngineFreeze, freezes: Mapping[int, Freeze], now: datetime) -> Condition:
    reasons = "; ".join(dict.fromkeys(freezes[i].reason for i in freeze.freeze_ids if i in freezes))
    if not freeze.confirmed:
        return Condition(
            "freezing" if freeze.freeze_ids else "thawing", reasons or "the agent has not confirmed yet", "warn"
        )
    if not freeze.HasField("end_time"):
        return Condition("frozen", "the engine runs as stock vLLM because its environment sets MERIDIAN_FREEZE", "warn")
    left = lasting((freeze.end_time.ToDatetime(UTC) - now).total_seconds())
    return Condition("frozen", f"runs as stock vLLM for {left} longer" + f": {reasons}" * bool(reasons), "warn")


def lasting(seconds: float) -> str:
    """Spell a duration for people: 42 s, 9 min, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def engine_row(
    engine: fleet_pb2.Engine, freezes: Mapping[int, Freeze], now: datetime, parts: Iterable[FleetPart]
) -> dict[str, Any]:
    causes = filter(None, each(parts, lambda part: part.cause(engine)))
    row = {
        "id": engine.engine_id,
        "incarnation": engine.incarnation,
        "replica": engine.replica,
        "model": engine.model,
        **condition(engine, freezes, now, causes)._asdict(),
        "revision": engine.revision,
        "acked_revision": engine.acked_revision,
        "thinking": engine.thinking,
        "answering": engine.answering,
        "waiting": engine.waiting,
        "kv_used": round(engine.kv_used, 3),
        "step_time_ms": round(engine.step_time_ms, 1),
        "ends": dict(engine.ends),
    }
    for entries in each(parts, lambda part: part.show_row(engine)):
        row |= entries
    return row


def freeze_row(freeze: Freeze, engines: Iterable[fleet_pb2.Engine], now: datetime) -> dict[str, Any]:
    """Return a freeze's row: `engines` counts its engines, `confirmed` the engines that confirmed the freeze."""
    reached = [engine for engine in engines if freeze.freeze_id in engine.freeze.freeze_ids]
    return {
        "freeze_id": freeze.freeze_id,
        "match": match_text(freeze.match),
        "author": freeze.author,
        "reason": freeze.reason,
        "left": lasting(freeze.remaining(now).total_seconds()),
        "end_time": freeze.end_time.isoformat(),
        "engines": len(reached),
        "confirmed": sum(engine.freeze.confirmed for engine in reached),
    }


def match_text(match: Match) -> str:
    parts = [*match.engine_ids, *([f"model {match.model}"] if match.model else [])]
    return ", ".join((*parts, *(f"{name}={value}" for name, value in match.engine_labels))) or "every engine"


def request_row(request: fleet_pb2.LiveRequest) -> dict[str, Any]:
    last = request.last_decision
    eat = request.eat_ema_nats
    return {
        "id": request.request_id,
        "engine": request.engine_id,
        "tenant": request.tenant,
        "phase": phase_name(request.phase),
        "preempted": request.preempted,
        "think_tokens": request.think_tokens,
        "output_tokens": request.output_tokens,
        "eat_ema_nats": round(eat, 4) if math.isfinite(eat) else None,
        "last_decision": decision_text(last) if last.decision_id else "",
    }


def decision_text(last: fleet_pb2.LastDecision) -> str:
    known = f", {outcome_name(last.outcome)}" if last.outcome else ""
    return f"{last.kind}: {last.reason}{known}"


def revision_row(header: RevisionHeader, engines: Iterable[fleet_pb2.Engine]) -> dict[str, Any]:
    """Return a revision's row: `engines` counts the connected engines that have applied the revision."""
    return {
        "revision": header.revision,
        "author": header.author,
        "reason": header.reason,
        "create_time": header.created_at.isoformat(),
        "engines": sum(e.acked_revision == header.revision for e in engines if e.state == CONNECTED),
    }
