"""Records become reports, and merging steps loses nothing that the control plane's table would show."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_PARAGRAPH, FLAG_SENTENCE
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.sentences import ROW_FLAGS, States, StepStates
from meridian_agent.core.step_record import COUNTERS, Gauges, MeasuredProbe, StepRecord
from meridian_agent.core.step_signals import StepSignals
from meridian_agent.link.messages import decisions_in, mergeable, opened_message, parts_of, step_report
from meridian_control.common.table_columns import COLUMNS, NO_TOKEN
from meridian_control.engine.merged_steps import ages_ms
from meridian_control.engine.request_table import RequestTable
from meridian_control.engine.token_rows import columns_of, spell_out
from tests.fakes.engine import END, START, TEXT, FakeEngine
from tests.fakes.sentences import ends_by_id, flags_of


@pytest.mark.parametrize("has_plan", [False, True])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0, 0, 0), (3, 1, 0, 0, 0, 0), (5, 9, 1, 4, 2, 6), (0, 0, 0, 13, 0, 0)])
def test_large_messages_come_in_parts(counts: tuple[int, ...], has_plan: bool) -> None:
    kinds, most = ("forces", "caps", "tiers", "probes", "hand_overs", "preempts"), 4
    whole = agent_pb2.Directives(
        step=7, plan=agent_pb2.DispatchPlan(slot=range(9), rank=range(9)) if has_plan else None
    )
    for kind, count in zip(kinds, counts, strict=True):
        for number in range(count):
            getattr(whole, kind).add(decision_id=number)
    parts, together = [*parts_of(whole, most)], agent_pb2.Directives()
    for part in parts:
        together.MergeFrom(part)
    assert together == whole
    assert {part.step for part in parts} == {7}
    assert all(decisions_in(part) <= most or part.HasField("plan") for part in parts)
    assert len(parts) == sum(-(-count // most) for count in counts) + has_plan or parts == [whole]


def test_a_large_decision_counts_as_many() -> None:
    """What waits for the engine is bounded in decisions, and each may be as large as a message."""
    preempts = [agent_pb2.Preempt(victims=range(count)) for count in (64, 127, 128, 128_000)]
    assert decisions_in(agent_pb2.Directives(preempts=preempts)) == 4 + 1 + 1000
    hand_overs = [agent_pb2.HandOver(url="u" * count, ref="r") for count in (100, 2047, 2_048_000)]
    assert decisions_in(agent_pb2.Directives(hand_overs=hand_overs)) == 3 + 1 + 1000
    # The link's thread looks at none of more decisions than the engine takes in.
    assert decisions_in(agent_pb2.Directives(preempts=preempts), 3) == 4


def apply(table: RequestTable, report: agent_pb2.StepReport, now_ms: float = 0.0) -> list[float]:
    """Apply a report to the table in the order in which a session does, and return the intervals between the report's
    tokens."""
    for opened in report.opened:
        table.open(opened, now_ms)
    table.add_tokens(report.tokens, now_ms - ages_ms(report))
    table.take_joined(report.joined)
    for slot in report.preempted:
        table.preempted[slot] = True
    for slot in report.resumed:
        table.preempted[slot] = False
    for closed in report.closed:
        table.close(closed.slot)
    return [*table.intervals.output_itl_ms, *table.intervals.ttot_ms]


def same(a: RequestTable, b: RequestTable) -> None:
    for name in COLUMNS.keys() - {"token_ms"}:
        np.testing.assert_array_equal(getattr(a, name)[a.slots()], getattr(b, name)[b.slots()], err_msg=name)
    # The time of a request's opening is that of its report, so only requests with a token are compared.
    told = np.flatnonzero(a.live & (a.newest_token != NO_TOKEN))
    np.testing.assert_allclose(a.token_ms[told], b.token_ms[told], atol=0.01)
    # Other entries of a window belong to the slot's previous request, or are empty if the table has grown since.
    own = np.arange(a.window.shape[1]) < a.entropy_count[a.slots(), None]
    np.testing.assert_array_equal(a.window[a.slots()][own], b.window[b.slots()][own])
    assert [i for _, i in a.requests()] == [i for _, i in b.requests()]


def test_opened() -> None:
    info = RequestInfo("id", "model", "tenant", "gold", 11, 22, 0)
    assert opened_message((3, info, 2, 4, 5, 1, True, 3, True, False, True, True)) == agent_pb2.RequestOpened(
        slot=3,
        request_id="id",
        model="model",
        tenant="tenant",
        slo_class="gold",
        prompt_tokens=11,
        max_tokens=22,
        phase=agent_pb2.PHASE_THINK,
        think_tokens=4,
        output_tokens=5,
        max_think_tokens=0,
        forced=True,
        queued=True,
        unreported_think_tokens=1,
        unmeasured=True,
        cap_extended=True,
        ending=agent_pb2.FORCE_REASON_RPDI,
    )
    without = opened_message((3, RequestInfo("id", "", "", "", 1, 2, None), 1, 0, 0, 0, False, 0, *[False] * 4))
    assert not without.HasField("max_think_tokens")


def test_a_full_record() -> None:
    first = StepRecord(
        step=4,
        step_time_ms=9.0,
        gauges=Gauges(0.5, 3, 1),
        slots=[0, 0, 2],
        phases=[2, 2, 3],
        flags=[0, 3, 0],
        rows=[1, 2, 0],
        told=StepSignals(
            None,
            np.array([0.1, 0.2, 0.3], np.float32),
            np.array([7, 8, 9], np.int32),
            np.array([-1, -2, -3], np.float32),
            np.array([-0.5, -0.25, -3], np.float32),
        ).encode(),
        probes=[MeasuredProbe(5, 0, 64, 0.25, 12, 3, True, False)],
        preempted=[1],
        resumed=[2],
        closed=[(0, 1)],
        joined=[(3, 1500.0), (0, 0.0)],
        outcomes=[(5, 1, 64, "7 blocks", 14)],
        counters=tuple({"output_critical": 2, "agent_seconds": 0.5}.get(name, 0) for name in COUNTERS),
    )
    last = StepRecord(step=6, step_time_ms=2.0, gauges=Gauges(0.25, 2), slots=[2], phases=[3], flags=[0], rows=[0])
    report = step_report([first, last])
    assert (report.step, report.steps, report.step_time_ms, report.kv_used) == (6, 2, 2.0, 0.25)
    assert (report.running, report.waiting) == (2, 0)
    assert list(report.tokens.slot) == [0, 0, 2, 2]
    assert list(report.tokens.flags) == [0, 3, 0, 0]
    assert list(report.tokens.end_rank) == [8, 9, 7, 0]
    np.testing.assert_array_equal(report.tokens.entropy_nats, np.array([0.2, 0.3, 0.1, math.nan], np.float32))
    np.testing.assert_array_equal(report.tokens.end_logprob_nats, np.array([-2, -3, -1, math.nan], np.float32))
    np.testing.assert_array_equal(report.tokens.top_logprob_nats, np.array([-0.25, -3, -0.5, math.nan], np.float32))
    assert report.probes == agent_pb2.ProbeColumns(
        decision_id=[5],
        slot=[0],
        think_tokens=[64],
        eat_nats=[0.25],
        cost_tokens=[12],
        same_answer=[3],
        empty_answer=[True],
        other_answer=[False],
    )
    assert (list(report.preempted), list(report.resumed)) == ([1], [2])
    assert report.joined == agent_pb2.JoinedColumns(slot=[3, 0], queueing_ms=[1500.0, 0.0])
    assert list(report.closed) == [agent_pb2.RequestClosed(slot=0, reason=agent_pb2.FINISH_REASON_STOP)]
    assert list(report.outcomes) == [
        agent_pb2.DecisionOutcome(
            decision_id=5,
            outcome=agent_pb2.OUTCOME_APPLIED,
            think_tokens=64,
            detail="7 blocks",
            reason=agent_pb2.FORCE_REASON_PREMATURE_STOP,
        )
    ]
    assert not report.HasField("counters"), "the last record has no counters"
    assert step_report([first]).counters == agent_pb2.AgentCounters(output_critical=2, agent_seconds=0.5)


def test_an_empty_step_has_no_columns() -> None:
    for sparse in (False, True):
        assert step_report([StepRecord(step=1)], sparse) == agent_pb2.StepReport(step=1, steps=1)


SLOTS, COUNTS, RANKS = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(1, 2**31 - 1)
NATS = st.floats(width=32) | st.just(math.nan)
MEASURED, UNMEASURED = st.tuples(RANKS, NATS, NATS, NATS), st.just((0, math.nan, math.nan, math.nan))
TOKENS = st.builds(operator.add, st.tuples(SLOTS, st.integers(0, 3), COUNTS), MEASURED | UNMEASURED)


@given(st.lists(st.lists(TOKENS), max_size=4), st.data())
def test_sparse_columns_say_what_the_other_columns_say(steps: list[list[tuple[Any, ...]]], data: st.DataObject) -> None:
    records = []
    for tokens in steps:
        record = StepRecord()
        columns = list(zip(*tokens, strict=True)) or [()] * 7
        record.slots, record.phases, record.flags = (list(column) for column in columns[:3])
        record.rows = list(range(len(tokens)))
        if data.draw(st.booleans()):
            entropy, end, top = (np.array(column, np.float32) for column in columns[4:])
            record.told = StepSignals(None, entropy, np.array(columns[3], np.int32), end, top).encode()
        if data.draw(st.booleans()):
            # The outbox takes out of a record what a snapshot says already.
            record.slots = []
        records.append(record)
    if records:
        there, here = (step_report(records, sparse).tokens for sparse in (False, True))
        assert not here.slot
        for known, found in zip(columns_of(there), columns_of(here), strict=True):
            np.testing.assert_array_equal(found, known)
        spell_out(here)
        assert here.SerializeToString() == there.SerializeToString()


# The table of a vocabulary of four tokens; one ends a sentence, and one a paragraph, too.
TABLE = ends_by_id(bytes([0, FLAG_SENTENCE, 0, FLAG_SENTENCE | FLAG_PARAGRAPH]))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_so_do_those_of_steps_that_share_their_columns(phases: list[int], data: st.DataObject) -> None:
    """A run of steps whose members stay, some of which other rows follow, or which nobody measures."""
    members, records = len(phases), list[StepRecord]()
    slots, rows = [7 * row for row in range(members)], [*range(members)]
    states: States = States(np.zeros(members, np.uint32))
    for step in range(data.draw(st.integers(1, 8))):
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=members, max_size=members))
        states, told = StepStates(states, TABLE, tokens), None
        if data.draw(st.booleans()):
            # With rank 0 the first row is not measured in some steps.
            columns = np.arange(4 * (members + 1), dtype=np.float32).reshape(4, -1) + step
            columns[1, 0] *= columns[1, 0] % 2
            columns[:, 0] = columns[:, 0] if columns[1, 0] else (math.nan, 0, math.nan, math.nan)
            told = StepSignals(None, columns[0], columns[1].astype(np.int32), columns[2], columns[3]).encode()
        record = StepRecord(step, 0.0, 1.0, 0, 0, slots, phases, rows, tokens, TABLE, states, told)
        if data.draw(st.booleans()):
            record = replace(record, slots=[*slots, 99], phases=[*phases, 3], rows=[*rows, members], flags=[5])
        records.append(record)
    there, here = (step_report(records, sparse).tokens for sparse in (False, True))
    for row, (slot, phase) in enumerate(zip(slots, phases, strict=True)):
        found = [flags for flags, of in zip(there.flags, there.slot, strict=True) if of == slot]
        expected = flags_of(TABLE, [record.text[row] for record in records])
        assert found == [flags & ROW_FLAGS if phase == agent_pb2.PHASE_THINK else 0 for flags in expected]
    spell_out(here)
    assert here.SerializeToString() == there.SerializeToString()


def test_counters_are_those_of_the_contract() -> None:
    assert [field.name for field in agent_pb2.AgentCounters.DESCRIPTOR.fields] == list(COUNTERS)
    counted = step_report([StepRecord(counters=tuple(range(len(COUNTERS))))]).counters
    assert [getattr(counted, name) for name in COUNTERS] == list(range(len(COUNTERS)))


def test_a_step_that_a_request_joins_is_no_step_of_text() -> None:
    record = StepRecord(joined=[(5, 20.0)])
    assert not record.is_text
    assert not record.is_empty
    assert not record.presses, "no decision about the next steps follows from it"
    assert mergeable([StepRecord(opened=[(5, None)])], record)


NOTHING, CLOSING, OPENING = StepRecord(), StepRecord(closed=[(4, 1)]), StepRecord(opened=[(4, None)])
RESUMED, PREEMPTED, LOOP = StepRecord(resumed=[4]), StepRecord(preempted=[4]), StepRecord(loops=[(5, 10, 400)])


@pytest.mark.parametrize(
    ("before", "record", "merges"),
    [
        # A slot that is used again.
        ([NOTHING, CLOSING, NOTHING], OPENING, False),
        ([OPENING], CLOSING, True),
        ([CLOSING], StepRecord(opened=[(5, None)]), True),
        # A preemption after a resumption.
        ([RESUMED], PREEMPTED, False),
        ([PREEMPTED], RESUMED, True),
        ([RESUMED], StepRecord(preempted=[5]), True),
        # A report ends with the step that found a loop, unless no end follows from one.
        ([NOTHING], LOOP, True),
        ([NOTHING, LOOP], NOTHING, False),
    ],
)
def test_which_steps_share_a_report(before: list[StepRecord], record: StepRecord, merges: bool) -> None:
    assert mergeable(before, record) is merges
    assert mergeable(before, record, merge_loops=True) is (merges or LOOP in before)


steps_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "open": st.lists(st.sampled_from([(), (START,), (START, END)]), max_size=2),
            "close": st.lists(st.integers(0, 9), max_size=2),
            "toggle": st.lists(st.integers(0, 9), max_size=2),
            "tokens": st.lists(
                st.lists(st.sampled_from([TEXT, TEXT, START, END]), min_size=0, max_size=3), min_size=8, max_size=8
            ),
            "took_ms": st.integers(1, 2000),
            "entropy": st.lists(st.sampled_from([0.0, 0.5, 3.25, math.nan]), min_size=24, max_size=24),
        }
    ),
    min_size=1,
    max_size=12,
)


def records_of(steps: list[dict[str, Any]]) -> list[StepRecord]:
    """Return the records that a real tracker makes of these steps."""
    engine, number, now_s = FakeEngine(), 0, 0.0
    for step in steps:
        for prompt in step["open"]:
            engine.open(str(number), prompt, queued_s=now_s)
            number += 1
        engine.schedule()
        live = list(engine.live.values())
        for which in step["toggle"]:
            if live and not (tr := live[which % len(live)]).preempted:
                tr.preempted = True
                engine.tracker.record.preempted.append(tr.slot)
        for tr, tokens in zip(live, step["tokens"], strict=False):
            if not tokens:
                continue
            engine.join(tr, now_s)
            if tr.preempted:
                tr.preempted = False
                engine.tracker.record.resumed.append(tr.slot)
            engine.tracker.feed(tr, tokens, len(engine.tracker.record.slots))
        for which in step["close"]:
            if engine.live:
                engine.finish(list(engine.live)[which % len(engine.live)])
        n = len(engine.tracker.record.slots)
        entropy = np.array(step["entropy"][:n], np.float32)
        engine.tracker.record.told = StepSignals(
            None, entropy, np.arange(n, dtype=np.int32), -entropy, -entropy
        ).encode()
        engine.take()
        engine.records[-1].ended_s = now_s = now_s + step["took_ms"] / 1e3
    return engine.records


@given(steps_strategy, st.integers(1, 5))
def test_merging_changes_nothing(steps: list[dict[str, Any]], interval: int) -> None:
    records = records_of(steps)
    one_by_one, merged = RequestTable(3, capacity=2), RequestTable(3, capacity=2)
    batch: list[StepRecord] = []
    batches = []
    for record in records:
        if batch and (len(batch) == interval or not mergeable(batch, record)):
            batches.append(batch)
            batch = []
        batch.append(record)
    for group in [*batches, batch]:
        one_after_the_other: list[float] = []
        for record in group:
            one_after_the_other += apply(one_by_one, step_report([record]), record.ended_s * 1e3)
        report = step_report(group)
        assert report.steps == len(group)
        received = agent_pb2.StepReport.FromString(report.SerializeToString())
        at_once = apply(merged, received, group[-1].ended_s * 1e3)
        np.testing.assert_allclose(sorted(at_once), sorted(one_after_the_other), atol=0.01)
        same(one_by_one, merged)
