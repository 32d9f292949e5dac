"""Takes an agent's reports and snapshots into the engine's request table and its counters.

The intake owns the order in which the parts of a report take effect: the session calls `take_report`, makes its
decisions, and then calls `finish_report`. The code does no I/O and reads no clock; each object belongs to one session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import phase_name
from meridian_control.common.errors import BadReport
from meridian_control.common.masks import any_in
from meridian_control.common.opened_request import MAX_SLOTS, is_new, is_under_way
from meridian_control.common.report_bounds import is_measured
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.common.table_columns import THINK_END
from meridian_control.engine import moments
from meridian_control.engine.history import Unsampled
from meridian_control.engine.merged_steps import ages_ms, step_of, step_of_rows
from meridian_control.engine.part import UNREAD_PROBE, ProbeResult
from meridian_control.engine.request_table import THINK
from meridian_control.engine.signals import add_eat_samples
from meridian_control.engine.think_ends import FINISHED, ThinkEnds, is_continued

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized
    from datetime import datetime

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream
    from meridian_control.engine.shadow_comparison import Comparison
    from meridian_control.engine.totals import Totals

T = TypeVar("T")


class Intake:
    """Takes the messages of a stream into the session's table, and lets the parts of the stream learn from them."""

    def __init__(self, stream: Stream, totals: Totals, shadow: Comparison) -> None:
        self._stream, self._parts, self._table = stream, stream.parts, stream.table
        self._policies, self._ledger, self._journal = stream.policies, stream.ledger, stream.journal
        self._totals, self._shadow = totals, shadow
        self._endings = ThinkEnds(stream.table, totals, stream.ledger)
        # Step of each entry of the newest report, by the fields whose entries belong to single steps.
        self._steps: dict[str, list[int]] = {}

    def begin_anew(self, snapshot: agent_pb2.Snapshot, now: datetime) -> Sliced[bool]:
        """Replace the table's requests by those of a snapshot; return whether the agent waits for an answer,
        because the snapshot has thinking tokens that no report has contained. Raises BadReport if a request is out of
        range.

        At each pause the requests that are already listed are complete, and the others are not there yet.
        """
        _check_length("requests", snapshot.requests)
        _check_length("ended", snapshot.ended)
        table, journal, awaited = self._table, self._journal, bool(snapshot.ended)
        yield from self._parts.snapshot_begins(snapshot)
        # A request that the table has already has waited since it was opened.
        now_ms, since_ms = self._stream.clock_ms(now), table.waits_since_ms()
        table.clear()
        table.reserve(len(snapshot.requests))
        self._shadow.new_stream()
        if journal is not None:
            journal.begin_snapshot()
        for requests in _slices(snapshot.requests):
            listed = [table.open(request, now_ms) for request in requests]
            for opened in listed:
                if not is_under_way(opened) and opened.identity in since_ms:
                    table.put(opened.slot, token_ms=since_ms[opened.identity])
            if journal is not None:
                for opened in listed:
                    journal.listed(opened, self._sample_ratio)
            awaited = awaited or any(opened.unreported_think_tokens > 0 for opened in listed)
            self._assign(listed)
            if len(requests) == SLICE_ROWS:
                yield
        # The agent may hold ranks that were decided before the snapshot.
        table.forget_ranks()
        if journal is not None:
            yield from journal.end_snapshot()
        yield from self._parts.snapshot_ends(now)
        return awaited

    def _assign(self, opened: Sequence[OpenedRequest]) -> None:
        """Give requests that the table has just opened to the parts, and find their policies."""
        # A faulty agent may open two requests in one slot, of which the table has the second one.
        by_slot = {request.slot: request for request in opened}
        self._parts.opened(list(by_slot))
        for slot, request in by_slot.items():
            self._policies.assign(slot, request)

    def take_report(self, report: agent_pb2.StepReport, now: datetime) -> Sliced[None]:
        """Take in a report, but keep the requests that it closes in the table, because decisions follow.

        Raises BadReport if the report breaks the contract.
        """
        preempted, resumed, closed = report.preempted, report.resumed, report.closed
        _check(report)
        table, now_ms = self._table, self._stream.clock_ms(now)
        self._totals.reports += 1
        for requests in _slices(report.opened) if report.opened else ():
            self._assign([self._open(opened, now_ms) for opened in requests])
            if len(requests) == SLICE_ROWS:
                yield
        if self._journal is not None:
            self._journal.report_begins()
        self._add_tokens(report, now_ms)
        if report.HasField("joined"):
            table.take_joined(report.joined)
            self._totals.queueing.add(table.joined.queueing_ms / 1e3)
        numbers = {"preempted": len(preempted), "resumed": len(resumed), "outcomes": len(report.outcomes)}
        self._steps = {name: step_of(report, name, number) for name, number in numbers.items() if number}
        if report.HasField("probes"):
            self._add_probes(report.probes, step_of(report, "probes", len(report.probes.slot)))
        if self._steps or report.HasField("probes"):
            table.history.tell_steps(step_of_rows(report))
        if report.HasField("loops"):
            self._take_loops(report.loops)
        else:
            table.forget_loops()
        for slot in filter(table.holds, preempted):
            table.put(slot, preempted=True)
        for slot in filter(table.holds, resumed):
            table.put(slot, preempted=False)
        if came_in := self._steps.get("outcomes"):
            probed = yield from self._ledger.settle(report.outcomes, report.step)
            table.history.note_probe_outcomes(probed, came_in)
        for slot in filter(table.holds, (request.slot for request in closed)):
            table.put(slot, closing=True)
        yield from self._parts.reported(report, now)

    def finish_report(self, report: agent_pb2.StepReport, governed: bool) -> Sliced[None]:
        """Count the report's events in the order in which they happened, then drop the requests that it closes.

        governed: whether the session makes decisions.
        """
        table = self._table
        if len(table.history.rows.slot) < table.history.rows.sent:
            self._endings.count_unknown(report.tokens)
        ended = yield from self._count_changes(report)
        for begin in range(0, len(ended), SLICE_ROWS):
            self._compare(ended[begin : begin + SLICE_ROWS])
            if begin:
                yield
        for requests in _slices(self._known(report.closed)) if report.closed else ():
            for closed in requests:
                if self._is_cut(closed):
                    self._compare([(closed.slot, int(table.think_tokens[closed.slot]))])
                if self._journal is not None:
                    self._journal.closed(closed, table)
                self._endings.count_answer(closed)
            self._parts.closed(requests, governed)
            for closed in requests:
                table.close(closed.slot)
                self._ledger.forget(closed.slot)
            if len(requests) == SLICE_ROWS:
                yield

    def _known(self, closed: Sequence[agent_pb2.RequestClosed]) -> list[agent_pb2.RequestClosed]:
        """Return the requests that the table has, each once: a faulty agent may close a request twice."""
        known: dict[int, agent_pb2.RequestClosed] = {}
        for request in closed:
            if self._table.holds(request.slot):
                known.setdefault(request.slot, request)
        return list(known.values())

    def _count_changes(self, report: agent_pb2.StepReport) -> Sliced[list[tuple[int, int]]]:
        """Count changes of phase, ends of thinking and preemptions; return slot and thinking tokens of each end."""
        table = self._table
        changes = moments.changes(table)
        for kind in ("preempted", "resumed"):
            if slots := getattr(report, kind):
                changes += moments.changes_at_steps(table, kind, slots, self._steps[kind])
                changes.sort(key=lambda change: change.step)
        ended: list[tuple[int, int]] = []
        reasons: list[tuple[int, str]] = []
        for count, change in enumerate(changes, 1):
            if not count % (2 * SLICE_ROWS):
                yield
            slot, kind, reason = change.slot, change.kind, ""
            if kind == "preempted":
                self._totals.preempted[phase_name(change.phase)] += 1
            if kind == "think_end":
                reason = self._endings.count(slot, change.flags, change.think_tokens)
                reasons.append((slot, reason))
                ended.append((slot, change.think_tokens))
            if self._journal is not None:
                self._journal.happened(change, reason)
        if reasons:
            self._parts.thinking_ended(reasons)
        return ended

    def _open(self, request: agent_pb2.RequestOpened, now_ms: float) -> OpenedRequest:
        opened = self._table.open(request, now_ms)
        new = is_new(opened)
        self._totals.requests += new
        self._totals.unknown_efforts += new and not self._policies.knows_effort(opened)
        # An engine that knows its markers knows the phase of every prompt of tokens.
        knows_markers = not self._stream.hello.unknown_markers
        self._totals.unread_prompts += new and knows_markers and request.phase == agent_pb2.PHASE_UNSPECIFIED
        self._shadow.opened(opened.slot)
        if self._journal is not None:
            self._journal.opened(opened, self._sample_ratio)
        return opened

    def _add_tokens(self, report: agent_pb2.StepReport, now_ms: float) -> None:
        self._totals.token_events += self._table.add_tokens(report.tokens, now_ms - ages_ms(report))
        totals, intervals = self._totals, self._table.intervals
        # A marker of several tokens takes back tokens that were counted as text, perhaps some from before the stream.
        thinking, answer, *_ = self._table.history.counts[-1].tolist()
        totals.thinking_tokens = max(0, totals.thinking_tokens + thinking)
        totals.answer_tokens = max(0, totals.answer_tokens + answer)
        if len(intervals.row):
            self._totals.output_itl.add(intervals.output_itl_ms / 1e3)
            if any_in(intervals.previous == THINK_END):
                self._totals.ttot.add(intervals.ttot_ms / 1e3)

    def _add_probes(self, probes: agent_pb2.ProbeColumns, steps: list[int]) -> None:
        # Agents of the first version do not report whether the answer would be empty, nor whether it changes; those of
        # 0.3 not whether it is another one than that of other requests.
        ids, slots = probes.decision_id[:], probes.slot[:]
        empty_answers = probes.empty_answer[:] or [False] * len(slots)
        same_answers = probes.same_answer[:] or [0] * len(slots)
        costs = probes.cost_tokens[:] or [0] * len(slots)
        others: list[bool | None] = [*probes.other_answer] or [None] * len(slots)
        columns = ids, slots, probes.think_tokens[:], probes.eat_nats[:], empty_answers, same_answers, costs, others
        if len({len(column) for column in columns}) != 1:
            raise BadReport("probe columns must have one length")
        if self._policies.policy is None:
            return
        table, ledger = self._table, self._ledger
        # Results that belong to decisions that wait for them.
        known = [
            (decision, row)
            for row in zip(*columns, steps, strict=True)
            if (decision := ledger.open.get(row[0])) is not None
            and decision.slot == row[1]
            and ledger.concerns(decision)
        ]
        if not known:
            return
        # Older agents send NaN for logits that cannot be measured, whose likeliest token is no trial answer either.
        measured = [(decision, row) for decision, row in known if is_measured("probes.eat_nats", row[3])]
        self._parts.probed([ProbeResult(decision.reason, *row[1:-1]) for decision, row in measured])
        sampled: dict[int, int] = {}
        for decision, (_, slot, _, eat_nats, *_, step) in known:
            decision.measured_eat_nats = eat_nats
            if decision.reason != UNREAD_PROBE:
                sampled.setdefault(slot, step)
        if sampled:
            table.history.unsampled = Unsampled(table.packed(table.slot), sampled)
        rest = [row for decision, row in measured if decision.reason != UNREAD_PROBE]
        while rest:
            # A merged report may have several results of a request, which are taken in one after another.
            first = {row[1]: row for row in reversed(rest)}
            self._take_samples(list(first.values()))
            rest = [row for row in rest if first[row[1]] is not row]

    def _take_samples(self, rows: list[tuple[Any, ...]]) -> None:
        """Take in results of probes of different requests: rows of ProbeColumns, and the step."""
        table = self._table
        _, *columns = zip(*rows, strict=True)
        slots, tokens, eat_nats, empty = map(np.array, columns[:4])
        add_eat_samples(table, slots, eat_nats, self._policies.ema_alpha(slots), tokens)
        table.put(slots, empty_answer=empty)

    def _take_loops(self, loops: agent_pb2.LoopColumns) -> None:
        """Take in the cycles that the agent has found.

        Raises BadReport if the columns differ in length, or if a cycle is empty or shorter than a round.
        """
        columns = loops.slot, loops.period_tokens, loops.loop_tokens
        if len({len(column) for column in columns}) != 1:
            raise BadReport("loop columns must have one length")
        slots, periods, tokens = (np.array(column, np.int64) for column in columns)
        if (bad := (periods < 1) | (tokens < periods)).any():
            row = int(bad.argmax())
            raise BadReport(f"loops must have a round of at least 1 token; got {periods[row]} of {tokens[row]} tokens")
        live = np.array([self._table.holds(slot) for slot in slots.tolist()], bool)
        self._table.set_loops(slots[live], periods[live], tokens[live])

    def _compare(self, ended: list[tuple[int, int]]) -> None:
        """Compare the rules in shadow with thinking that ended. ended: slot and thinking tokens of each end."""
        for slot, think_tokens in ended if self._policies.policy is not None else ():
            cap = self._table.shadow_cap(slot)
            policy, measured = self._policies.compared(slot), not self._table.unmeasured[slot]
            for (section, reason), saved in self._shadow.ended(
                slot, think_tokens, policy, cap, measured=measured
            ).items():
                self._totals.shadow_saved[section, reason or "any"] += saved
                self._totals.shadow_think_tokens[section] += 0 if reason else think_tokens

    def _is_cut(self, closed: agent_pb2.RequestClosed) -> bool:
        """Whether a request finished before its thinking ended, and no other engine continues it."""
        table, slot = self._table, closed.slot
        is_thinking = closed.reason in FINISHED and table.holds(slot) and bool(table.phase[slot] == THINK)
        return is_thinking and not is_continued(table, slot)

    @property
    def _sample_ratio(self) -> float:
        policy = self._policies.policy
        return policy.telemetry.decision_log_sample_ratio if policy is not None else 1.0


def gauges_of(report: agent_pb2.StepReport, before: agent_pb2.StepReport | None) -> agent_pb2.StepReport:
    """Return the numbers of a report that describe the engine at its end: the whole report, whose size the number of
    tokens decides, need not be kept until the next one.

    before: what was returned for the report before, whose counters hold on. Of the reports of one large step only the
    last one has counters.
    """
    kept = agent_pb2.StepReport(
        step=report.step,
        step_time_ms=report.step_time_ms,
        kv_used=report.kv_used,
        running=report.running,
        waiting=report.waiting,
    )
    kept.counters.CopyFrom(before.counters if before and not report.HasField("counters") else report.counters)
    return kept


def _check(report: agent_pb2.StepReport) -> None:
    """Raise BadReport if a field of a report has too many entries."""
    for name in ("opened", "preempted", "resumed", "closed", "outcomes"):
        if len(getattr(report, name)) > MAX_SLOTS:
            _check_length(name, getattr(report, name))


def _check_length(name: str, entries: Sized) -> None:
    """Raise BadReport if a field has more entries than there can be requests; a message lists a request once."""
    if len(entries) > MAX_SLOTS:
        raise BadReport(f"{name} must have at most {MAX_SLOTS} entries; got {len(entries)}")


def _slices(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(rows), SLICE_ROWS):
        yield rows[begin : begin + SLICE_ROWS]
