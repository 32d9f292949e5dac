"""Tells an engine which waiting requests may preempt which thinking ones, and notes the preemptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian.v1 import agent_pb2

from meridian_control.capabilities.preemption import rule
from meridian_control.common.errors import BadReport
from meridian_control.common.look import counted
from meridian_control.common.metric_entry import counter
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.part import Part
from meridian_control.journal.records import Detail, RequestChange
from meridian_control.policy import effects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream, Turn
    from meridian_control.journal.records import Compared, Decision
    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import PreemptionPolicy

PREEMPTED_FOR_TOTAL = "meridian_preempted_for_waiting_total"
ENTRIES = (
    counter(
        PREEMPTED_FOR_TOTAL,
        (),
        "Thinking requests that were preempted for waiting ones.",
        "Rises steadily: too few places or KV blocks; add engines, or let fewer requests preempt others.",
    ),
)
# Outcomes after which the same request gets no other decision.
FINAL = (agent_pb2.OUTCOME_SHADOWED, agent_pb2.OUTCOME_REFUSED)
# Largest number of requests that may be preempted for one that waits; many more than it ever needs.
MOST_VICTIMS = 64


@dataclass(frozen=True, slots=True)
class ClaimDetail(Detail):
    """What the decision log shows of a decision: why the request waited, the running requests and how many may run, the
    fraction of the KV cache in use, and how many requests might be preempted."""

    reason: str
    running: int
    max_running: int
    kv_used: float
    victims: int

    def compared(self, policy: Policy) -> Iterator[Compared]:
        if self.reason == rule.NO_PLACE:
            yield "running", self.running, ">=", "places", self.max_running
        else:
            yield "kv_used", self.kv_used, "of", "the KV cache", 1.0
        yield "preemptible requests", self.victims, ">", "none", 0


class _Claim(NamedTuple):
    """A decision about a waiting request, and the ids of the requests that may be preempted for it."""

    decision: Decision
    victims: frozenset[str]


class Preemption(Part):
    """The waiting requests of one engine that may preempt others."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._table, self._ledger = stream, stream.table, stream.ledger
        # Whether the policy lets any request preempt others; and slots of the requests that wait for their first step,
        # or again because vLLM has preempted them while they thought, oldest first, known only while it does.
        self._is_on = False
        self._waiting: dict[int, None] = {}
        # The newest decision by the slot of its request.
        self._claims: dict[int, _Claim] = {}
        # The decisions that the agent may still carry out or has just carried out, by id.
        self._sent: dict[int, Decision] = {}
        self._running, self._kv_used = 0, 0.0
        self._revises = False

    @classmethod
    def of(cls, stream: Stream) -> Preemption | None:
        return cls(stream) if stream.hello.capabilities.preempt else None

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        was_on, self._is_on = self._is_on, effects.may_preempt(policy)
        if not self._is_on:
            self._waiting = {}
        elif not was_on:
            table = self._table
            waits = table.live & (table.queued | _waits_again(table.preempted, table.phase))
            self._waiting = dict.fromkeys(waits.nonzero()[0].tolist())

    def revise(self) -> None:
        self._revises = True

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        listed = snapshot.requests if self._is_on else ()
        waiting = (each.slot for each in listed if each.queued or _waits_again(each.preempted, each.phase))
        self._waiting = dict.fromkeys(waiting)

    def reported(self, report: agent_pb2.StepReport, now: datetime) -> None:
        if report.HasField("preemptions"):
            self._note(report.preemptions, report.step)
        self._running, self._kv_used = report.running, report.kv_used
        if not self._is_on:
            return
        self._waiting |= dict.fromkeys(request.slot for request in report.opened if request.queued)
        if self._waiting:
            for slot in (*report.joined.slot, *report.resumed, *(request.slot for request in report.closed)):
                self._waiting.pop(slot, None)
        table = self._table
        for slot in report.preempted:
            # A request that was preempted for another one waits for its turn.
            own = slot not in report.preemptions.slot and table.holds(slot)
            if own and _waits_again(table.preempted[slot], table.phase[slot]):
                self._waiting[slot] = None

    def _note(self, columns: agent_pb2.PreemptionColumns, step: int) -> None:
        """Note requests that were preempted for others. Raises BadReport if the columns differ in length."""
        if len({len(column) for column in (columns.decision_id, columns.slot, columns.recompute_tokens)}) != 1:
            raise BadReport("preemption columns must have one length")
        table, journal = self._table, self._stream.journal
        for decision_id, slot, tokens in zip(columns.decision_id, columns.slot, columns.recompute_tokens, strict=True):
            if (decision := self._sent.get(decision_id)) is None or not table.holds(slot):
                continue
            self._stream.count(PREEMPTED_FOR_TOTAL)
            if journal is not None and decision.slot is not None and self._ledger.concerns(decision):
                info = table.info[decision.slot]
                assert info is not None
                counts = int(table.think_tokens[slot]), int(table.output_tokens[slot])
                change = RequestChange("preempted_for", 0, step, slot, int(table.phase[slot]), *counts)
                journal.happened(change, preempted_for(info, tokens))

    def decide(self, turn: Turn) -> Sliced[None] | None:
        revises, self._revises = self._revises, False
        if self._sent:
            under_way = agent_pb2.OUTCOME_UNSPECIFIED
            self._sent = {number: sent for number, sent in self._sent.items() if sent.outcome == under_way}
        if self._claims:
            concerns = self._ledger.concerns
            self._claims = {slot: claim for slot, claim in self._claims.items() if concerns(claim.decision)}
            if revises:
                self._take_back(turn)
        return self._decide(turn) if self._waiting else None

    def _decide(self, turn: Turn) -> Sliced[None]:
        victims: dict[str, int] | None = None
        for count, slot in enumerate(list(self._waiting), 1):
            if not count % SLICE_ROWS:
                yield
            own, claim = self._stream.policies.of(slot).preemption, self._claims.get(slot)
            if not own.may_preempt or self._table.closing[slot]:
                continue
            if claim is not None and claim.decision.outcome in FINAL:
                continue
            if victims is None:
                forces = self._ledger.forces.items()
                ending = [each for each, force in forces if force.outcome == agent_pb2.OUTCOME_UNSPECIFIED]
                ending += self._table.listed_ends()
                chosen = rule.victims(turn.groups, self._table, ending).tolist()
                victims = self._named([each for each in chosen if each not in self._waiting][:MOST_VICTIMS])
            is_open = claim is not None and claim.decision.outcome == agent_pb2.OUTCOME_UNSPECIFIED
            if victims and not (is_open and claim is not None and claim.victims.intersection(victims)):
                self._send(slot, own, victims, turn)

    def _named(self, slots: list[int]) -> dict[str, int]:
        """Return the slots of live requests by the requests' ids, because another request may have had a slot."""
        return {info.request_id: slot for slot in slots if (info := self._table.info[slot]) is not None}

    def _take_back(self, turn: Turn) -> None:
        """Take back the decisions in force, because another policy may hold; the next ones follow it."""
        for slot, claim in self._claims.items():
            if claim.decision.outcome == agent_pb2.OUTCOME_UNSPECIFIED:
                turn.out.preempts.add(decision_id=self._ledger.make("preempt", "taken_back", slot), slot=slot)
        self._claims = {}

    def _send(self, slot: int, own: PreemptionPolicy, victims: dict[str, int], turn: Turn) -> None:
        limit = turn.policy.engine_limits(self._stream.hello.labels).get("max_num_active_seqs", 0)
        max_running = min(filter(None, (limit, self._stream.hello.max_num_seqs)), default=0)
        reason = rule.waits_for(self._running, max_running)
        decision_id = self._ledger.make("preempt", reason, slot, own.shadow)
        self._sent[decision_id] = decision = self._ledger.open[decision_id]
        decision.own_detail = ClaimDetail(reason, self._running, max_running, self._kv_used, len(victims))
        self._claims[slot] = _Claim(decision, frozenset(victims))
        turn.out.preempts.add(
            decision_id=decision_id,
            slot=slot,
            shadow=own.shadow,
            victims=victims.values(),
            max_prompt_tokens=own.max_prompt_tokens,
            max_preemptions=own.max_preemptions,
            recomputed_tokens_per_s=own.recomputed_tokens_per_s,
            max_wait_ms=own.max_wait_ms,
        )


def _waits_again(preempted: Any, phase: Any) -> Any:
    """Return whether a request, or each of several in arrays, waits again: it was preempted before its answer."""
    return preempted & (phase != agent_pb2.PHASE_OUTPUT)


def preempted_for(info: OpenedRequest, tokens: int) -> str:
    """Return for whom a request was preempted, and what that costs. info: the request that waited."""
    named = (("tenant", info.tenant), ("SLO class", info.slo_class))
    of = " and ".join(f"{name} {value}" for name, value in named if value)
    return f"request {info.request_id}{f' of {of}' if of else ''}: {counted(tokens, 'token')} to compute again"
