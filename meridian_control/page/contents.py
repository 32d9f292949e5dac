"""Collects the status page's contents as plain data, from the same sources as the gRPC services.

The module decides which data the page shows, and how many rows. The module knows nothing of HTTP. Only `Collector` and
`newest_ends` query the fleet and the stores; the other functions are pure. The module runs on the control plane's event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control import __version__
from meridian_control.common.complaints import Complaints
from meridian_control.common.decision_words import apart, last_text, spelled, with_limit
from meridian_control.common.engine_words import Condition, condition, lasting, troubles
from meridian_control.common.enum_names import phase_name
from meridian_control.common.errors import StoreUnavailable
from meridian_control.common.plain_data import plain, same
from meridian_control.engine.decision_ledger import CARRIED_OUT
from meridian_control.fleet import decision_queries
from meridian_control.fleet.part import Attention, Shown, answer_of, each
from meridian_control.fleet.peers import CALL_TIMEOUT_S
from meridian_control.fleet.turns import in_turns
from meridian_control.page.tables import place_of
from meridian_control.page.words import counts_text, end_row, end_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
    from datetime import datetime

    from meridian_control.engine.freeze_state import Freeze
    from meridian_control.fleet.part import FleetPart
    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.policy.store import PolicyStore, RevisionHeader
    from meridian_control.rollout.state import GuardrailReading, Rollout
    from meridian_control.rollout.store import RolloutStore

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Largest number of ends of thinking that are asked of each replica, of revisions, and of rollouts.
ASKED_DECISIONS, MAX_REVISIONS, MAX_ROLLOUTS = 200, 50, 20
# Seconds for which viewers who do not look at the table get what was collected before.
KEPT_S = 5.0
# Seconds for which the page waits for the database and for each capability before it shows the rest: longer than a
# capability waits for another replica.
PATIENCE_S = CALL_TIMEOUT_S + 0.5
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
PHASES = {"prompt": agent_pb2.PHASE_PROMPT, "think": agent_pb2.PHASE_THINK, "output": agent_pb2.PHASE_OUTPUT}
STORED = {"revisions", "rollouts"}
LEVELS = {"halted": "bad", "rolled_back": "bad", "paused": "warn", "aborted": "warn"}
OWN_TABLES = {"engines", "freezes", "requests", "ends"} | STORED


class Contents(NamedTuple):
    """What the page shows: `facts` for every viewer, and the rows of tables by name, for those who ask for them."""

    facts: dict[str, Any]
    tables: dict[str, list[dict[str, Any]]]


class Collector:
    """Collects the page's contents. Live requests and ends of thinking are asked for only if a viewer shows them; what
    the capabilities show and what the database has is asked for again after KEPT_S, or at once for their own tables."""

    def __init__(self, whole: WholeFleet, policies: PolicyStore, rollouts: RolloutStore) -> None:
        self._whole, self._policies, self._rollouts = whole, policies, rollouts
        # Each part has its own patience, because one may wait for the database.
        self._parts = [Kept(partial(_ask_part, part), Shown({})) for part in whole.fleet.parts.values()]
        unknown = "Revisions and rollouts are not known: the policy store has not answered yet."
        nothing: tuple[list[RevisionHeader], list[Rollout], str] = [], [], unknown
        self._stored = Kept(self._ask_stored, nothing)
        self._complaints = Complaints(logger, "the rows of %s cannot be shown: %s")

    async def stop(self) -> None:
        """End the questions that have no answer yet."""
        await asyncio.gather(self._stored.stop(), *(part.stop() for part in self._parts))

    async def collect(self, asked: Set[str], now: datetime) -> Contents:
        """Return the contents with the asked tables. Raises MeridianError."""
        whole, parts = self._whole, self._whole.fleet.parts.values()
        part_age_s = 0 if asked - OWN_TABLES else KEPT_S
        fleet, ends, stored, *blocks = await asyncio.gather(
            self._fleet("requests" in asked),
            newest_ends(whole) if "ends" in asked else _nothing(),
            self._stored.get(0 if asked & STORED else KEPT_S),
            *(part.get(part_age_s) for part in self._parts),
        )
        engines, requests, silent = fleet
        requests.sort(key=lambda request: -request.think_tokens)
        freezes = {freeze.freeze_id: freeze for freeze in whole.fleet.freezes.in_force}
        rows = [engine_row(engine, freezes, now, parts) async for engine in in_turns(engines)]
        rows.sort(key=lambda row: (["bad", "warn", ""].index(row["level"]), place_of(row["id"])))
        frozen = [freeze_row(freeze, engines, now) for freeze in freezes.values()]
        revisions, rollouts, trouble = stored
        troubles = sum(bool(row["level"]) for row in rows) + sum(block.troubles for block in blocks)
        facts = {
            "version": __version__,
            "replica": whole.replica_id,
            "revision": whole.fleet.revision,
            "unreachable": silent,
            "totals": totals(engines) | {"troubled": troubles},
            "phases": phases(requests) if "requests" in asked else None,
            "attention": [*attention(rows, frozen, rollouts), *(line for block in blocks for line in block.attention)],
            "capabilities": await self._capability_rows(),
            "store_trouble": trouble,
            "rollout": next((active_view(rollout) for rollout in rollouts if rollout.active), None),
            **{name: entry for block in blocks for name, entry in block.entries.items()},
        }
        tables = {
            "engines": rows,
            "freezes": frozen,
            "ends": [end_row(decision) for decision in ends],
            "requests": [request_row(request) async for request in in_turns(requests)],
            **({} if trouble else {"revisions": [revision_row(header, engines) for header in revisions]}),
            **({} if trouble else {"rollouts": [rollout_row(rollout) for rollout in rollouts]}),
            **{name: entries for block in blocks for name, entries in block.tables.items()},
        }
        return Contents(facts, {name: tables[name] for name in asked if name in tables})

    async def _fleet(
        self, with_requests: bool
    ) -> tuple[list[fleet_pb2.Engine], list[fleet_pb2.LiveRequest], list[str]]:
        """Return the engines, the live requests if they are wanted, and the replicas that did not answer."""
        if with_requests:
            state = await self._whole.watched()
            return list(state.engines), list(state.requests), list(state.unreachable_replicas)
        engines, silent = await self._whole.engines()
        return engines, [], silent

    async def _ask_stored(self) -> tuple[list[RevisionHeader], list[Rollout], str]:
        """Return revisions and rollouts, newest first, or a note that the database cannot be read."""
        try:
            return await self._policies.history(MAX_REVISIONS), await self._rollouts.history(MAX_ROLLOUTS), ""
        except StoreUnavailable as error:
            return [], [], f"Revisions and rollouts are not up to date: {error}."

    async def _capability_rows(self) -> list[tuple[str, str, str]]:
        """Return name, row and text of what the capabilities of this replica show. An error of one is logged, and only
        its rows are missing."""
        fleet, rows = self._whole.fleet, list[tuple[str, str, str]]()
        counters = await fleet.totals()
        for capability in fleet.capabilities:
            try:
                rows += [(capability.name, *row) for row in capability.shown(counters)] if capability.shown else []
            except Exception as error:
                self._complaints.log(error, capability.name)
        return rows


class Kept(Generic[T]):
    """An answer that is asked for again once it is too old. A new answer is waited for PATIENCE_S long; then the one
    before holds until the new one has come. first: what holds before the first answer."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], first: T) -> None:
        self._ask, self._answer = ask, first
        self._asking: asyncio.Task[T] | None = None
        self._asked_at = -math.inf

    async def get(self, age_s: float) -> T:
        """Return an answer that is at most this old, in seconds, unless a newer one is still to come."""
        now, patience_s = asyncio.get_running_loop().time(), 0.0 if self._asking else PATIENCE_S
        if self._asking is None and now - self._asked_at >= age_s:
            self._asking, self._asked_at = asyncio.create_task(self._ask()), now
        if self._asking is not None:
            done, _ = await asyncio.wait([self._asking], timeout=patience_s)
            if done:
                self._asking = None
                self._answer = done.pop().result()
        return self._answer

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


async def _ask_part(part: FleetPart) -> Shown:
    return await answer_of(part, part.show(), Shown({}))


async def _nothing() -> list[Any]:
    return []


def attention(
    engines: Iterable[dict[str, Any]], freezes: Iterable[dict[str, Any]], rollouts: Iterable[Rollout]
) -> list[Attention]:
    """Return what an operator should look at: engines by what is wrong with them, freezes, and the active rollout. The
    arguments are rows of the page, and rollouts."""
    listed = list(freezes)
    conditions = (
        (row["id"], Condition(row["word"], level=row["level"]))
        for row in engines
        # The freezes themselves say which engines are frozen.
        if not (listed and row["word"] in ("frozen", "freezing"))
    )
    lines = [Attention(level, f"{text}.", "engines") for level, text in troubles(conditions)]
    for freeze in listed:
        reason = f": {freeze['reason']}" if freeze["reason"] else ""
        text = f"Freeze {freeze['freeze_id']} of {freeze['match']}, for {freeze['left']} longer{reason}."
        lines.append(Attention("warn", text, "engines"))
    for rollout in rollouts:
        if rollout.active:
            step = f"step {rollout.step} of {len(rollout.plan.step)}"
            change = f"revision {rollout.stable_revision} → {rollout.candidate_revision}"
            why = f" ({text})" if (text := violation_text(rollout.violation)) else ""
            text = f"Rollout {rollout.rollout_id} is {rollout.state.word}, {step}: {change}{why}."
            lines.append(Attention(LEVELS.get(rollout.state.word, ""), text, "policy"))
    return lines


async def newest_ends(whole: WholeFleet) -> list[fleet_pb2.LoggedDecision]:
    """Return the decisions that ended thinking, newest ends first. Every request has a cap, so only reached caps
    count."""
    forces, caps = await asyncio.gather(
        *(
            decision_queries.decisions(
                whole, fleet_pb2.ListDecisionsRequest(kind=kind, outcomes=outcomes, page_size=ASKED_DECISIONS)
            )
            for kind, outcomes in (("force", ()), ("cap", CARRIED_OUT))
        )
    )
    return sorted((*forces.decisions, *caps.decisions), key=lambda d: -end_time(d).ToNanoseconds())[:ASKED_DECISIONS]


def totals(engines: Iterable[fleet_pb2.Engine]) -> dict[str, Any]:
    """Return numbers over the whole fleet; counters are summed over the given engines."""
    up = [engine for engine in engines if engine.state == CONNECTED]
    return {
        "engines": len(up),
        "gone": sum(engine.state != CONNECTED for engine in engines),
        "frozen": sum(engine.freeze.confirmed for engine in up),
        **{name: sum(getattr(engine, name) for engine in up) for name in ("thinking", "answering", "waiting")},
        "ended": counts_text(ended(engine.ends for engine in engines).items()),
        "output_critical": sum(engine.counters.output_critical for engine in up),
    }


def ended(ends: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Add up the real ends of thinking by reason. ends: those of each engine."""
    counts: Counter[str] = Counter()
    for of_engine in ends:
        counts.update({reason: count for reason, count in of_engine.items() if not reason.endswith("_shadowed")})
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


def engine_row(
    engine: fleet_pb2.Engine, freezes: Mapping[int, Freeze], now: datetime, parts: Iterable[FleetPart]
) -> dict[str, Any]:
    reasons = {number: freeze.reason for number, freeze in freezes.items()}
    causes = filter(None, each(parts, lambda part: part.cause(engine)))
    row = {
        "id": engine.engine_id,
        **same(engine, "incarnation", "replica", "model"),
        **condition(engine, now, reasons, causes)._asdict(),
        **same(engine, "revision", "acked_revision"),
        "step_time_ms": round(engine.step_time_ms, 1),
        "kv_used": round(engine.kv_used, 3),
        **same(engine, "running", "waiting", "thinking", "answering"),
        "ends": counts_text(engine.ends.items()),
    }
    for entries in each(parts, lambda part: part.show_row(engine)):
        row |= entries
    return row


def freeze_row(freeze: Freeze, engines: Iterable[fleet_pb2.Engine], now: datetime) -> dict[str, Any]:
    """Return a freeze's row: `engines` counts its engines, `confirmed` the engines that confirmed the freeze."""
    reached = [engine for engine in engines if freeze.freeze_id in engine.freeze.freeze_ids]
    return {
        "freeze_id": freeze.freeze_id,
        "match": str(freeze.match),
        "author": freeze.author,
        "reason": freeze.reason,
        "left": lasting(freeze.remaining(now).total_seconds()),
        "end_time": freeze.end_time.isoformat(),
        "engines": len(reached),
        "confirmed": sum(engine.freeze.confirmed for engine in reached),
    }


def request_row(request: fleet_pb2.LiveRequest) -> dict[str, Any]:
    eat = request.eat_ema_nats
    return {
        "engine": request.engine_id,
        "request": request.request_id,
        "tenant": request.tenant,
        "phase": phase_name(request.phase),
        "preempted": request.preempted,
        "think_tokens": request.think_tokens,
        "output_tokens": request.output_tokens,
        "eat_ema_nats": round(eat, 4) if math.isfinite(eat) else None,
        "last_decision": last_text(request.last_decision),
    }


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout's row; the reason is the guardrail that was violated, if one was."""
    last = rollout.events[-1] if rollout.events else None
    back = f" → {rollout.rollback_revision}" if rollout.rollback_revision else ""
    return {
        "rollout_id": rollout.rollout_id,
        "state": spelled(rollout.state.word),
        "level": LEVELS.get(rollout.state.word, ""),
        "step": f"{rollout.step} of {len(rollout.plan.step)}",
        "revisions": f"{rollout.stable_revision} → {rollout.candidate_revision}{back}",
        "event": spelled(last.event) if last is not None else "",
        "time": last.time.isoformat() if last is not None else "",
        "author": rollout.author,
        "reason": violation_text(rollout.violation) or rollout.reason,
    }


def active_view(rollout: Rollout) -> dict[str, Any]:
    """Return the active rollout with its violation, and with the values and limits of its guardrails, as texts."""
    view = {**plain(rollout.message()), "violation": violation_text(rollout.violation)}
    for shown, reading in zip(view["guardrails"], rollout.guardrails, strict=True):
        value = math.nan if reading.value is None else reading.value
        shown["value"], shown["limit"] = apart(value, reading.limit, 4)
    return view


def violation_text(violation: GuardrailReading | None) -> str:
    if violation is None or violation.value is None:
        return ""
    return f"{violation.guardrail} was {with_limit(violation.value, violation.limit)}"


def revision_row(header: RevisionHeader, engines: Iterable[fleet_pb2.Engine]) -> dict[str, Any]:
    """Return a revision's row: `engines` counts the connected engines that have applied the revision."""
    return {
        "revision": header.revision,
        "author": header.author,
        "reason": header.reason,
        "create_time": header.created_at.isoformat(),
        "engines": sum(e.acked_revision == header.revision for e in engines if e.state == CONNECTED),
    }
