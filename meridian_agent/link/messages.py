"""Turns step records into protobuf messages, and merges several steps into one report. Pure; runs on the link's
threads."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian.v1 import agent_pb2

from meridian_agent.core.hand_overs import MAX_URL
from meridian_agent.core.preempts import MAX_VICTIMS
from meridian_agent.core.request_info import shown_id
from meridian_agent.core.step_record import COUNTERS, Gauges, MeasuredProbe, StepRecord, text_flags
from meridian_agent.core.step_signals import StepSignals, signal_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from meridian_agent.core.step_record import Record


# The bits of the columns of StepSignals in a row that was not measured.
NOT_MEASURED = np.array([[math.nan], [0.0], [math.nan], [math.nan]], np.float32).view(np.uint32)
# The lists of a Directives message, in the order in which the engine takes them in.
DECISION_KINDS = ("forces", "caps", "tiers", "probes", "hand_overs", "preempts")


def opened_message(row: tuple[Any, ...]) -> agent_pb2.RequestOpened:
    slot, info, phase, think_tokens, output_tokens, untold_think_tokens, cap_extended, ending, *flags = row
    forced, preempted, queued, unmeasured = flags
    return agent_pb2.RequestOpened(
        slot=slot,
        request_id=shown_id(info.request_id),
        model=info.model,
        tenant=info.tenant,
        slo_class=info.slo_class,
        refused_slo_class=info.refused_slo_class,
        effort=info.effort,
        prompt_tokens=info.prompt_tokens,
        max_tokens=info.max_tokens,
        phase=phase,
        think_tokens=think_tokens,
        output_tokens=output_tokens,
        min_think_tokens=info.min_think_tokens,
        traceparent=info.traceparent,
        remote_decode=info.remote_decode,
        hand_over_candidate=info.hand_over_candidate,
        handed_over_ref=info.handed_over_ref,
        max_think_tokens=info.max_think_tokens,
        forced=forced,
        preempted=preempted,
        queued=queued,
        unmeasured=unmeasured,
        chat=info.chat,
        sleeping_stops=info.sleeping_stops,
        unreported_think_tokens=untold_think_tokens,
        cap_extended=cap_extended,
        ending=ending,
    )


def mergeable(records: Sequence[Record], following: Record, merge_loops: bool = False) -> bool:
    """Return whether a record may share a report with the records before it. A record may not if it opens a slot that
    an earlier record closed, or preempts a slot that an earlier record resumed: a report does not say which came
    first. Unless `merge_loops` is set, a report ends with the first record that has a cycle, because the control plane
    asks the rule on loops once per report, at the report's end."""
    if not merge_loops and records[-1].loops:
        return False
    if following.is_text:
        return True
    if following.opened:
        closed = {slot for record in records for slot, _ in record.closed}
        if any(row[0] in closed for row in following.opened):
            return False
    return not any(slot in record.resumed for record in records for slot in following.preempted)


def parts_of(message: agent_pb2.Directives, most: int) -> Iterator[agent_pb2.Directives]:
    """Split a message with more than `most` decisions into messages with at most as many, in the order in which the
    engine takes them in. A plan, whose ranks belong together, stays whole."""
    if decisions_in(message) <= most:
        yield message
        return
    for kind in DECISION_KINDS:
        decisions = getattr(message, kind)
        for begin in range(0, len(decisions), most):
            yield agent_pb2.Directives(step=message.step, **{kind: decisions[begin : begin + most]})
    if message.HasField("plan"):
        yield agent_pb2.Directives(step=message.step, plan=message.plan)


def decisions_in(message: agent_pb2.Directives, most: float = math.inf) -> int:
    """Return the number of decisions in a message; each rank of a plan counts as one, and so do MAX_VICTIMS requests
    that may be preempted, and MAX_URL characters of handovers. The sizes of more than `most` decisions are not looked
    at, which would take seconds."""
    size = sum([len(getattr(message, kind)) for kind in DECISION_KINDS]) + len(message.plan.slot)
    if size > most:
        return size
    size += sum([len(each.victims) // MAX_VICTIMS for each in message.preempts])
    return size + sum([(len(each.url) + len(each.ref)) // MAX_URL for each in message.hand_overs])


def step_report(records: Sequence[Record], sparse: bool = False) -> agent_pb2.StepReport:
    """Return one report of consecutive steps: it has the token rows of all steps, and the gauges of the last step.

    sparse: whether the control plane reads TokenColumns.sparse.
    """
    last = records[-1]
    gauges = last.gauges or Gauges()
    for record in records:
        if isinstance(record, StepRecord):
            record.spread()
    report = agent_pb2.StepReport(
        step=last.step,
        steps=len(records),
        step_time_ms=last.step_time_ms,
        kv_used=gauges.kv_used,
        running=gauges.running,
        waiting=gauges.waiting,
        prefill_tokens=last.prefill_tokens,
        state=last.state,  # type: ignore[arg-type]
    )
    if last.counters:
        counters: dict[str, Any] = dict(zip(COUNTERS, last.counters, strict=True))
        report.counters.CopyFrom(agent_pb2.AgentCounters(**counters))
    if len(records) > 1:
        _add_steps(report.merged, records)
    for record in records:
        if isinstance(record, StepRecord) and not record.is_text:
            _add(report, record)
        if record.slots and not sparse:
            _add_tokens(report.tokens, record)
    if sparse and (columns := _sparse_columns(records)) is not None:
        report.tokens.sparse.CopyFrom(columns)
    return report


def _add_steps(columns: agent_pb2.StepColumns, records: Sequence[Record]) -> None:
    last_s = records[-1].ended_s
    columns.rows.extend([len(record.slots) for record in records])
    columns.step_time_ms.extend([record.step_time_ms for record in records])
    columns.prefill_tokens.extend([record.prefill_tokens for record in records])
    columns.age_ms.extend([(last_s - record.ended_s) * 1e3 for record in records])
    columns.probes.extend([len(record.probes) for record in records])
    columns.preempted.extend([len(record.preempted) for record in records])
    columns.resumed.extend([len(record.resumed) for record in records])
    columns.outcomes.extend([len(record.outcomes) for record in records])


def _add(report: agent_pb2.StepReport, record: StepRecord) -> None:
    report.opened.extend(opened_message(row) for row in record.opened)
    for name, column in zip(MeasuredProbe._fields, zip(*record.probes, strict=True), strict=False):
        getattr(report.probes, name).extend(column)
    for slot, period, tokens in record.loops:
        report.loops.slot.append(slot)
        report.loops.period_tokens.append(period)
        report.loops.loop_tokens.append(tokens)
    report.preempted.extend(record.preempted)
    report.resumed.extend(record.resumed)
    for slot, reason in record.closed:
        report.closed.add(
            slot=slot,
            reason=reason,
            handed_over=slot in record.handed_over,
            client_gone=slot in record.clients_gone,
        )
    for slot, transferred, first_token_ms in record.continued:
        report.continued.slot.append(slot)
        report.continued.transferred_tokens.append(transferred)
        report.continued.first_token_ms.append(first_token_ms)
    for slot, queueing_ms in record.joined:
        report.joined.slot.append(slot)
        report.joined.queueing_ms.append(queueing_ms)
    for decision_id, slot, tokens in record.preemptions:
        report.preemptions.decision_id.append(decision_id)
        report.preemptions.slot.append(slot)
        report.preemptions.recompute_tokens.append(tokens)
    for decision_id, outcome, think_tokens, detail, reason in record.outcomes:
        report.outcomes.add(
            decision_id=decision_id, outcome=outcome, think_tokens=think_tokens, detail=detail, reason=reason
        )


def _sparse_columns(records: Sequence[Record]) -> agent_pb2.SparseColumns | None:
    """Return the token rows of the records; None if they have none."""
    with_rows = [record for record in records if record.slots]
    if not with_rows:
        return None
    runs = [[*run] for _, run in groupby(with_rows, key=_same_rows)]
    phases = [np.array(run[0].phases, np.uint8) for run in runs]
    sparse = agent_pb2.SparseColumns(
        slot=b"".join([np.array(run[0].slots, "<u2").tobytes() * len(run) for run in runs]),
        phase=b"".join([phase.tobytes() * len(run) for phase, run in zip(phases, runs, strict=True)]),
    )
    flags = np.concatenate([*map(_flags, runs, phases)])
    if len(flagged := flags.nonzero()[0]):
        sparse.flagged_row, sparse.flags = _encoded(flagged), _encoded(flags[flagged])
    if any(record.told is not None for record in with_rows):
        parts = [_signal_columns([*part]) for _, part in groupby(with_rows, key=_same_signals)]
        signals = np.concatenate(parts, axis=1)
        measured = signals[1].nonzero()[0]
        entropies, end_ranks, *log_probabilities = signals.take(measured, axis=1)
        columns = end_ranks, entropies, *log_probabilities
        sparse.measured_row, sparse.signals = _encoded(measured), b"".join([*map(_encoded, columns)])
    return sparse


def _encoded(column: NDArray[Any]) -> bytes:
    """Return the four bytes of each number."""
    return column.astype("<u4", copy=False).tobytes()


def _same_rows(record: Record) -> tuple[int, ...]:
    """Return what is equal for records with the same slots and phases and the same members of the run. Nearly all steps
    share these lists with the step before; nobody changes them."""
    return (id(record),) if record.flags or not record.text else (id(record.slots), id(record.phases))


def _same_signals(record: Record) -> tuple[int, ...]:
    """Return what is equal for records whose rows have the same places in as many rows of the runner."""
    told = record.told
    return (id(record),) if isinstance(told, tuple) else (id(record.rows), -1 if told is None else len(told))


def _flags(run: Sequence[Record], phases: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the flags of the rows of records with the same `_same_rows`. phases: those of each record, [rows]."""
    of_members, others = text_flags(run, phases), run[0].flags
    return np.concatenate((of_members, np.array(others, np.uint32))) if others else of_members


def _signal_columns(records: Sequence[Record]) -> NDArray[np.uint32]:
    """Return the bits of the signals of the rows of records with the same `_same_signals`, [4, rows], in the order of
    StepSignals."""
    first = records[0]
    if first.told is None:
        return np.repeat(NOT_MEASURED, sum([len(record.slots) for record in records]), axis=1)
    bits = signal_bits([record.told for record in records if record.told is not None])
    return bits.take(np.array(first.rows, np.intp), axis=2).swapaxes(0, 1).reshape(4, -1)


def _add_tokens(columns: agent_pb2.TokenColumns, record: Record) -> None:
    columns.slot.extend(record.slots)
    columns.phase.extend(record.phases)  # type: ignore[arg-type]
    columns.flags.extend(record.row_flags())
    rows = len(record.slots)
    if record.told is None:
        columns.entropy_nats.extend([float("nan")] * rows)
        columns.end_rank.extend([0] * rows)
        columns.end_logprob_nats.extend([float("nan")] * rows)
        columns.top_logprob_nats.extend([float("nan")] * rows)
        return
    at, signals = np.asarray(record.rows, dtype=np.intp), StepSignals.decode(record.told)
    columns.entropy_nats.extend(signals.entropy_nats[at].tolist())
    columns.end_rank.extend(signals.end_rank[at].tolist())
    columns.end_logprob_nats.extend(signals.end_logprob_nats[at].tolist())
    columns.top_logprob_nats.extend(signals.top_logprob_nats[at].tolist())
