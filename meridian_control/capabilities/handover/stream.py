"""Decides the handovers of one engine's requests, and passes on what its reports say about handovers.

The rule is in `rule`, and `results` finds what became of each request. The code does no I/O and reads no clock; each
object belongs to one session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover import rule
from meridian_control.capabilities.handover.measured_costs import AnswerLength, TransferCost
from meridian_control.capabilities.handover.results import Handover, Handovers
from meridian_control.common.errors import BadReport
from meridian_control.common.plain_data import same
from meridian_control.common.report_bounds import is_measured
from meridian_control.engine.part import Part
from meridian_control.engine.request_table import OUTPUT
from meridian_control.engine.step_cost import WARM_STEPS
from meridian_control.engine.think_ends import FINISHED
from meridian_control.policy.disagg_schema import DisaggPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from meridian_control.capabilities.handover.results import Key
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream, Turn
    from meridian_control.engine.step_cost import StepCost
    from meridian_control.journal.records import Decision

# Requests after which work about many requests pauses: about a millisecond of work.
ROWS_AT_ONCE = 512


class _Made(NamedTuple):
    """A handover that was decided, with its decision and whether it is in shadow."""

    decision: Decision
    move: rule.Move
    shadow: bool


class EngineHandovers(Part):
    """The handovers from one engine, and to it.

    `results` keeps what became of requests that were to be handed over, over all engines, or of this engine alone if
    none are given. `pool` has the engines to which requests may be handed over; whoever changes it does so between two
    reports. `shadowed` sums up the handovers in shadow that would have happened.
    """

    def __init__(self, stream: Stream, results: Handovers | None = None) -> None:
        self._stream, self._hello, self._table, self._ledger = stream, stream.hello, stream.table, stream.ledger
        self.results = results or Handovers()
        self.pool: tuple[fleet_pb2.AnsweringEngine, ...] = ()
        self.shadowed = fleet_pb2.ShadowHandovers()
        self.transfer, self.answers = TransferCost(), AnswerLength()
        # Slots of live requests that a relay can continue on another engine.
        self._candidates: set[int] = set()
        self._has_reported = False
        self._made: dict[int, _Made] = {}
        # Ids of requests that the engine has refused to hand over.
        self._refused: set[str] = set()
        self._policy = DisaggPolicy()
        # A pool and a policy, and the engines of the pool that fit under it, those with the most room first.
        self._fit_for: tuple[Any, Any, Mapping[str, fleet_pb2.AnsweringEngine]] = None, None, {}
        self._kv_used = 0.0

    # ---------------------------------------------------------------------------------------------------------- reports

    def reported(self, report: agent_pb2.StepReport, now: datetime) -> Sliced[None] | None:
        self._kv_used, self._has_reported = report.kv_used, True
        if not (report.opened or report.closed or report.HasField("continued")):
            return None
        return self._take(report, now)

    def _take(self, report: agent_pb2.StepReport, now: datetime) -> Sliced[None]:
        for count, opened in enumerate(report.opened, 1):
            if opened.hand_over_candidate:
                self._candidates.add(opened.slot)
            else:
                self._candidates.discard(opened.slot)
            if opened.handed_over_ref:
                self._open(opened.slot, now)
            if not count % ROWS_AT_ONCE:
                yield
        if report.HasField("continued"):
            self._take_continued(report.continued, now)
        for count, closed in enumerate(report.closed, 1):
            self._closed(closed, now)
            if not count % ROWS_AT_ONCE:
                yield

    def _open(self, slot: int, now: datetime) -> None:
        info = self._table.info[slot] if self._table.holds(slot) else None
        if info is not None and info.handed_over_ref:
            self.results.opened(info.handed_over_ref, self._key(info.request_id), now)

    def _take_continued(self, columns: agent_pb2.ContinuedColumns, now: datetime) -> None:
        if len({len(column) for column in (columns.slot, columns.transferred_tokens, columns.first_token_ms)}) != 1:
            raise BadReport("continued columns must have one length")
        for slot, tokens, first_token_ms in zip(
            columns.slot, columns.transferred_tokens, columns.first_token_ms, strict=True
        ):
            self._continued(slot, tokens, first_token_ms, now)

    def _continued(self, slot: int, transferred_tokens: int, first_token_ms: float, now: datetime) -> None:
        info = self._table.info[slot] if self._table.holds(slot) else None
        if info is None or not info.handed_over_ref or not is_measured("continued.first_token_ms", first_token_ms):
            return
        if transferred_tokens:
            self.transfer.add_transfer(transferred_tokens, first_token_ms)
        self._stream.add_ttot(first_token_ms)
        key = self._key(info.request_id)
        self.results.first_token(info.handed_over_ref, key, transferred_tokens, first_token_ms, now)

    def _closed(self, closed: agent_pb2.RequestClosed, now: datetime) -> None:
        self._candidates.discard(closed.slot)
        info = self._table.info[closed.slot] if self._table.holds(closed.slot) else None
        if info is None:
            return
        key, answer_tokens = self._key(info.request_id), int(self._table.output_tokens[closed.slot])
        if closed.reason in FINISHED and answer_tokens and not (closed.handed_over or info.remote_decode):
            self.answers.add_answer(answer_tokens)
        self.results.closed(key, closed, now)
        if info.handed_over_ref:
            self.results.continuation_closed(info.handed_over_ref, key, closed.reason, now)
        self._refused.discard(info.request_id)

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        self._candidates = {opened.slot for opened in snapshot.requests if opened.hand_over_candidate}

    def snapshot_ends(self, now: datetime) -> Sliced[None]:
        ids: set[str] = set()
        for count, (_, info) in enumerate(self._table.requests(), 1):
            ids.add(info.request_id)
            if not count % ROWS_AT_ONCE:
                yield
        self.results.relisted(self._stream.identity, ids, now)
        for count, (slot, _) in enumerate(self._table.requests(), 1):
            self._open(slot, now)
            if not count % ROWS_AT_ONCE:
                yield
        self._refused &= ids

    def stream_ended(self, now: datetime, followed: bool) -> None:
        if not followed:
            self.results.lost(self._stream.identity, now)

    # ------------------------------------------------------------------------------------------------------- recordings

    def records(self) -> Iterable[fleet_pb2.TraceRecord]:
        return [self.record()] if self.pool else []

    def record(self) -> fleet_pb2.TraceRecord:
        """Return a record of the engines to which requests may be handed over."""
        record = fleet_pb2.TraceRecord(answering_pool=fleet_pb2.TracedPool(engines=self.pool))
        record.answering_pool.SetInParent()
        return record

    def recorded(self, record: fleet_pb2.TraceRecord) -> None:
        if record.HasField("answering_pool"):
            self.pool = tuple(record.answering_pool.engines)

    # -------------------------------------------------------------------------------------------------------- decisions

    def decide(self, turn: Turn) -> None:
        """Decide handovers, and take handovers back. Nothing is decided for an engine outside the thinking pool."""
        policy, out, cost = turn.policy.disagg, turn.out, self._stream.step_cost
        if not (policy.enabled or self._made):
            self._policy = policy
            return
        in_force = self._in_force()
        changed = policy is not self._policy and policy != self._policy
        self._policy = policy
        decides = not (why := self.no_hand_over(policy))
        if in_force and (changed or not decides):
            # The next report decides again under the new policy.
            for slot in in_force:
                self._tell(rule.Move(slot, 0, rule.TAKEN_BACK, why=why or "the policy has changed"), out)
            return
        if not decides or not (self.pool or in_force):
            return
        if (holding := self._holding()) or in_force:
            for move in rule.decide(policy, self._engine_facts(cost), self._fit_engines(policy), holding, in_force):
                self._tell(move, out)

    def _fit_engines(self, policy: DisaggPolicy) -> Mapping[str, fleet_pb2.AnsweringEngine]:
        """Return the engines of the pool that fit, which change only with the pool and the policy."""
        if not (self._fit_for[0] is self.pool and self._fit_for[1] is policy):
            fit = [engine for engine in self.pool if not rule.unfit(policy, self._hello, engine)]
            self._fit_for = self.pool, policy, rule.by_room(policy, fit)
        return self._fit_for[2]

    def no_hand_over(self, policy: DisaggPolicy) -> str:
        """Return the reason why this engine hands no request over; empty if it can."""
        hello = self._hello
        if not policy.enabled:
            return "disagg.enabled is false"
        if not policy.thinks(hello.labels):
            return "it is not in disagg.thinking_pool"
        lacking = "" if hello.capabilities.hand_over else "the engine lacks hand_over"
        # With the capability, which a policy needs, the markers that the policy itself may change are in the way.
        return hello.no_hand_over or lacking or hello.unknown_markers or rule.no_fabric(policy, hello.kv_connector)

    def _tell(self, move: rule.Move, out: agent_pb2.Directives) -> None:
        before = self._made.pop(move.slot, None)
        shadow = before.shadow if move.engine is None and before is not None else self._policy.shadow
        decision = self._ledger.open[self._ledger.make("hand_over", move.reason, move.slot, shadow)]
        directive = out.hand_overs.add(decision_id=decision.decision_id, slot=move.slot, shadow=shadow)
        handover = Handover("", move)
        if move.engine is not None:
            # The session's id makes the reference unique in the fleet.
            handover.ref = directive.ref = f"{self._stream.session_id}-{decision.decision_id}"
            directive.url = move.engine.url
            self._made[move.slot] = _Made(decision, move, shadow)
            if not shadow:
                self.results.decided(self._key(decision.request_id), handover)
        decision.own_detail = handover

    def _in_force(self) -> dict[int, rule.Move]:
        """Return the handovers without an outcome by slot, and take in the outcomes of the others."""
        for slot, entry in list(self._made.items()):
            outcome = entry.decision.outcome
            if outcome == agent_pb2.OUTCOME_UNSPECIFIED and self._ledger.concerns(entry.decision):
                continue
            del self._made[slot]
            if outcome == agent_pb2.OUTCOME_REFUSED and self._ledger.concerns(entry.decision):
                self._refused.add(entry.decision.request_id)
            if outcome == agent_pb2.OUTCOME_SHADOWED:
                self.shadowed.requests += 1
                for name in ("transfer_ms", "recompute_ms", "gain_ms"):
                    setattr(self.shadowed, name, getattr(self.shadowed, name) + getattr(entry.move, name))
        return {slot: entry.move for slot, entry in self._made.items()}

    def _holding(self) -> list[rule.Holding]:
        """Return the thinking requests that a relay can continue and that hold their KV blocks."""
        table, size = self._table, max(1, self._hello.block_size_tokens)
        if not self._candidates:
            return []
        chosen = table.thinking & table.mask(np.array(list(self._candidates))) & ~table.preempted & ~table.ended
        holding = []
        for slot in np.flatnonzero(chosen).tolist():
            info, tokens = table.info[slot], int(table.prompt_tokens[slot] + table.think_tokens[slot])
            # The answering engine may lack the adapter that a request asks for.
            if info is not None and info.model in ("", self._hello.model) and info.request_id not in self._refused:
                holding.append(rule.Holding(slot, tokens, -(-tokens // size)))
        return holding

    # ------------------------------------------------------------------------------------------------------------ facts

    def _engine_facts(self, cost: StepCost) -> rule.ThinkingEngine:
        table, size = self._table, max(1, self._hello.block_size_tokens)
        waiting = table.live & table.preempted & (table.phase == OUTPUT)
        tokens = table.prompt_tokens + table.think_tokens + table.output_tokens
        base_ms, sequence_ms, _ = _step_cost(cost)
        return rule.ThinkingEngine(
            hello=self._hello,
            kv_used=self._kv_used,
            waiting_blocks=int((-(-tokens[waiting] // size)).sum()),
            running=self._running,
            step_ms=base_ms,
            sequence_ms=sequence_ms,
            answer_tokens=self.answers.tokens,
        )

    @property
    def _unfit(self) -> str:
        """The reason why no request can be handed over to this engine at the moment; empty if there is none."""
        if self._hello.fault:
            return "its agent is off"
        if self._stream.freezing.frozen:
            return "it is frozen"
        if self._stream.policies.policy is None:
            return "no policy is in force on it yet"
        # An engine without requests sends no report; its KV cache is empty.
        return "it has not reported yet" if not self._has_reported and self._table.live.any() else ""

    def answering_engine(self) -> fleet_pb2.AnsweringEngine:
        """Return the facts on which handovers to this engine depend."""
        hello, unfit = self._hello, self._unfit
        base_ms, sequence_ms, prefill_token_ms = _step_cost(self._stream.step_cost)
        transfer_ms, transfer_token_ms = self.transfer.coefficients
        if not hello.capabilities.answer_handed_over:
            unfit = hello.no_answer_handed_over or "the engine lacks answer_handed_over"
        return fleet_pb2.AnsweringEngine(
            **same(hello, "engine_id", "model", "vllm_version", "kv_connector"),
            **same(hello, "block_size_tokens", "num_blocks", "labels", "url"),
            unfit=unfit or ("" if hello.url else "it has no URL: set MERIDIAN_URL in the engine's environment"),
            kv_used=self._kv_used,
            running=self._running,
            step_ms=base_ms,
            sequence_ms=sequence_ms,
            prefill_token_ms=prefill_token_ms,
            transfer_ms=transfer_ms,
            transfer_token_ms=transfer_token_ms,
            answer_tokens=self.answers.tokens,
        )

    def promised(self) -> dict[str, fleet_pb2.PromisedRequests]:
        """Return the requests that are to be handed over, by the id of the answering engine."""
        by_engine: dict[str, fleet_pb2.PromisedRequests] = {}
        for entry in self._made.values():
            if not entry.shadow and entry.move.engine is not None and not entry.decision.outcome:
                promised = by_engine.setdefault(entry.move.engine.engine_id, fleet_pb2.PromisedRequests())
                promised.requests += 1
                promised.blocks += entry.move.blocks
        return by_engine

    @property
    def _running(self) -> int:
        return int(np.count_nonzero(self._table.live & ~self._table.preempted))

    def _key(self, request_id: str) -> Key:
        return (*self._stream.identity, request_id)


def _step_cost(cost: StepCost) -> tuple[float, float, float]:
    """Return the milliseconds of a step, its usual prompt tokens included, then for each sequence and for each prompt
    token; 0 before enough steps are measured."""
    if cost.steps < WARM_STEPS:
        return 0.0, 0.0, 0.0
    base_ms, sequence_ms, prefill_token_ms = cost.coefficients
    return base_ms + prefill_token_ms * cost.prefill_tokens, sequence_ms, prefill_token_ms
