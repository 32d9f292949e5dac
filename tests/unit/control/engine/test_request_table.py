"""The request table: rows that come and go, token rows that are accounted in order, and messages of hostile agents."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core import phases
from meridian_control.common import opened_request
from meridian_control.common.errors import BadReport
from meridian_control.common.opened_request import MAX_SHARED, MAX_SLOTS, MAX_TEXT, MAX_TEXT_BYTES
from meridian_control.common.table_columns import COLUMNS, HISTORIES, UNTOLD
from meridian_control.engine import token_rows as rows
from meridian_control.engine.request_table import OUTPUT, PROMPT, THINK, RequestTable
from meridian_control.engine.token_rows import FLAG_BOUNDARY
from tests.fakes.tables import table, thinking, tokens


def opened(slot: int, **fields: object) -> agent_pb2.RequestOpened:
    return agent_pb2.RequestOpened(slot=slot, **fields)  # type: ignore[arg-type]


def test_both_sides_name_the_flags_alike() -> None:
    for name in ("FLAG_MARKER", "FLAG_END", "FLAG_FROM_OUTPUT", "TAKE_BACK_SHIFT"):
        assert getattr(rows, name) == getattr(phases, name)


def test_opening_takes_over_what_a_snapshot_says() -> None:
    made = RequestTable(4)
    made.open(opened(5, request_id="a", phase=THINK, prompt_tokens=3, think_tokens=7, output_tokens=2, preempted=True))
    made.open(opened(0, phase=PROMPT, forced=True))
    assert made.slots().tolist() == [0, 5]
    assert (made.phase[5], made.prompt_tokens[5], made.think_tokens[5], made.output_tokens[5]) == (THINK, 3, 7, 2)
    assert (made.preempted[5], made.end_decided[5], made.end_decided[0]) == (True, False, True)
    assert [(slot, info.request_id) for slot, info in made.requests()] == [(0, ""), (5, "a")]


@pytest.mark.parametrize(("text", "kept"), [("a" * MAX_TEXT, MAX_TEXT), ("\U0001f600" * MAX_TEXT, MAX_TEXT_BYTES // 4)])
def test_a_text_is_kept_up_to_a_number_of_bytes(text: str, kept: int) -> None:
    made = RequestTable(4)
    before = made.text_bytes
    request = made.open(opened(0, request_id="a", tenant=text))
    assert request.tenant == text[:kept]
    assert made.text_bytes - before == request.held_bytes >= len(request.tenant.encode())
    made.close(0)
    assert made.text_bytes == before


def test_requests_share_texts_of_which_python_keeps_none() -> None:
    """Clients choose these texts, and early releases of Python 3.12 never free a text that is interned."""
    made, names = RequestTable(4), ("model", "tenant", "slo_class", "effort", "refused_slo_class")
    for number in range(2 * MAX_SHARED):
        texts = dict.fromkeys(names, f"chosen by client {number}")
        first, second = (made.open(opened(slot, **texts)) for slot in (0, 1))
        for name in names:
            assert getattr(first, name) is getattr(second, name)
    assert sys.intern(f"chosen by client {number}") is not first.tenant
    assert len(opened_request._shared) <= MAX_SHARED


def test_requests_join_their_first_step() -> None:
    made = RequestTable(4)
    for slot, queued in ((0, True), (5, True), (6, False), (7, True)):
        made.open(opened(slot, phase=PROMPT, queued=queued))
    assert made.queued.nonzero()[0].tolist() == [0, 5, 7]
    # A slot that is not live, and times that no agent measures.
    told = {0: 250.0, 3: 1.0, 6: 4.0, 5: math.nan, 7: -1.0, 2**32 - 1: 2.0}
    made.take_joined(agent_pb2.JoinedColumns(slot=told.keys(), queueing_ms=told.values()))
    assert (made.joined.slot.tolist(), made.joined.queueing_ms.tolist()) == ([0, 6], [250.0, 4.0])
    assert not made.queued.any()
    made.take_joined(agent_pb2.JoinedColumns())
    assert [len(column) for column in made.joined] == [0, 0]
    with pytest.raises(BadReport, match="joined columns must have one length"):
        made.take_joined(agent_pb2.JoinedColumns(slot=[1]))


def test_a_slot_that_is_used_again_remembers_nothing() -> None:
    fresh, used = table({}), table({})
    for name in (*COLUMNS, *HISTORIES):
        getattr(used, name)[0] = 1
    used.window[:] = 9.0
    used.close(0)
    assert not used.holds(0)
    assert list(used.requests()) == []
    used.open(opened(0, request_id="r0", phase=THINK))
    for name in (*COLUMNS, *HISTORIES):
        np.testing.assert_array_equal(getattr(used, name)[0], getattr(fresh, name)[0], err_msg=name)
    assert used.max_think_tokens[0] == used.rank[0] == UNTOLD


def test_capacity_grows_and_keeps_what_is_there() -> None:
    made = RequestTable(4, capacity=2)
    made.open(opened(1, phase=THINK))
    made.add_tokens(tokens([(1, THINK, 0, 2.0)] * 3))
    made.open(opened(37, phase=OUTPUT))
    assert (made.think_tokens[1], made.entropy_sum[1], made.window[1].tolist()) == (3, 6.0, [2, 2, 2, 0])
    assert made.slots().tolist() == [1, 37]


def test_the_last_slot() -> None:
    made = RequestTable(1)
    made.open(opened(MAX_SLOTS - 1))
    assert made.holds(MAX_SLOTS - 1)
    assert not made.holds(MAX_SLOTS)
    made.close(2**32 - 1)


@pytest.mark.parametrize("phase", [4, 300, -1])
def test_phases_of_another_version(phase: int) -> None:
    """Enums are open on the wire: an unknown phase counts as unspecified, and its tokens count for no phase."""
    made = table({})
    sent = agent_pb2.RequestOpened(slot=1, phase=phase)  # type: ignore[arg-type]
    made.open(agent_pb2.RequestOpened.FromString(sent.SerializeToString()))
    assert made.phase[1] == agent_pb2.PHASE_UNSPECIFIED
    assert made.add_tokens(tokens([(0, THINK, 0, 0.0), (0, phase, 0, 0.0), (1, OUTPUT, 0, 0.0)])) == 3
    assert made.phase[:2].tolist() == [agent_pb2.PHASE_UNSPECIFIED, OUTPUT]
    assert (made.think_tokens[0], made.output_tokens[0], made.output_tokens[1]) == (1, 0, 1)


def test_rows_of_unknown_and_closed_slots_are_left_out() -> None:
    made = table(thinking(), thinking())
    made.close(1)
    counted = made.add_tokens(
        tokens([(0, THINK, 0, 1.0), (1, THINK, 0, 1.0), (99, THINK, 0, 1.0), (2**32 - 1, 2, 0, 1)])
    )
    assert counted == 1
    assert made.think_tokens.tolist() == [1, 0]
    last = table(*[thinking()] * 4)
    for slot in range(3):
        last.close(slot)
    # The rows are sorted by the low 16 bits of the slot, which are 0 for the first one.
    assert last.add_tokens(tokens([(MAX_SLOTS, THINK, 0, 1.0), (3, THINK, 0, 1.0)])) == 1
    assert last.think_tokens[:4].tolist() == [0, 0, 0, 1]


def test_tokens_of_every_kind() -> None:
    made = table({"phase": PROMPT}, thinking(think_tokens=5), {"phase": OUTPUT, "output_tokens": 4, "preempted": True})
    rows = [
        (0, THINK, phases.FLAG_MARKER, 0.1, 3, -1.0),
        (0, THINK, 0, 0.2, 4, -2.0),
        (1, THINK, phases.FLAG_MARKER | phases.FLAG_END | 2 << phases.TAKE_BACK_SHIFT, 0.3, 1, -0.5),
        (1, OUTPUT, 0, 0.4, 9, -9.0),
        (2, THINK, phases.FLAG_MARKER | phases.FLAG_FROM_OUTPUT | 3 << phases.TAKE_BACK_SHIFT, 0.5, 7, -7.0),
    ]
    assert made.add_tokens(tokens(rows)) == 5
    assert made.phase[:3].tolist() == [THINK, OUTPUT, THINK]
    assert made.think_tokens[:3].tolist() == [1, 3, 0]
    assert made.output_tokens[:3].tolist() == [0, 1, 1]
    assert not made.preempted.any()
    assert made.end_rank[:3].tolist() == [4, 9, 7]
    np.testing.assert_allclose(made.entropy_nats[:3], [0.2, 0.4, 0.5], rtol=1e-6)
    assert made.end_logprob_nats[:3].tolist() == [-2.0, -9.0, -7.0]
    assert made.entropy_count[:3].tolist() == [1, 0, 0], "only thinking text counts for RPDI"


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_sentence_that_goes_on_has_no_end(cut: int) -> None:
    """A row may say that the token before it ended no sentence, also in the next report. The same bit means something
    else at an end of thinking."""
    made, goes_on = table(thinking()), phases.FLAG_GOES_ON
    rows = [(FLAG_BOUNDARY, 1), (goes_on, 2), (FLAG_BOUNDARY, 3), (FLAG_BOUNDARY | goes_on, 4), (0, 5), (0, 6)]
    for part in (rows[:cut], rows[cut:]):
        made.add_tokens(tokens([(0, THINK, flags, 1.0, rank) for flags, rank in part]))
    assert (made.boundary_count[0], made.boundary_ranks[0, 0]) == (1, 5)
    ended = phases.FLAG_MARKER | phases.FLAG_END | phases.FLAG_FORCED | phases.FLAG_BY_CAP
    made.add_tokens(tokens([(0, THINK, FLAG_BOUNDARY, 1.0, 7), (0, THINK, ended, 1.0, 8)]))
    assert (made.boundary_count[0], made.boundary_ranks[0, 0]) == (2, 8)


def test_the_byte_columns_of_older_agents_say_what_the_other_columns_say() -> None:
    plain = tokens([(0, THINK, FLAG_BOUNDARY, 1.0, 9, -4.0, -0.5), (3, OUTPUT, 0, 0.25, 7, -2.0, -1.0)])
    known, signals = rows.columns_of(plain)
    encoded = known.astype("<u4").tobytes() + signals.astype("<f4").tobytes()
    for there, here in zip(
        rows.columns_of(agent_pb2.TokenColumns(byte_columns=encoded)), (known, signals), strict=True
    ):
        np.testing.assert_array_equal(there, here)


def test_an_older_agent_sends_no_log_probability_of_the_likeliest_token() -> None:
    made = table(thinking())
    assert made.add_tokens(tokens([(0, THINK, FLAG_BOUNDARY, 1.0, 9, -4.0), (0, THINK, 0, 1.0, 9, -4.0)])) == 2
    assert made.boundary_count[0] == 1
    only_one = tokens([(0, THINK, 0, 1.0, 9, -4.0, -1.0), (0, THINK, 0, 1.0, 9, -4.0)])
    with pytest.raises(BadReport, match=r"one length; got \[2, 2, 2, 2, 2, 2, 1\]"):
        made.add_tokens(only_one)
    with pytest.raises(BadReport, match=r"byte_columns must have 28 bytes for each token; got 29 bytes"):
        made.add_tokens(agent_pb2.TokenColumns(byte_columns=bytes(29)))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"slot": bytes(5)}, r"sparse.slot must have 2 bytes for each of 3 numbers; got 5 bytes"),
        ({"phase": bytes(4)}, r"sparse.slot must have 2 bytes for each of 4 numbers; got 6 bytes"),
        ({"flags": b""}, r"sparse.flags must have 4 bytes for each of 1 numbers; got 0 bytes"),
        ({"flagged_row": bytes([0, 1, 0, 0])}, r"sparse.flagged_row must be below the 3 rows of the report; got 256"),
        ({"measured_row": bytes(7)}, r"sparse.measured_row must have 4 bytes for each of 1 numbers; got 7 bytes"),
        ({"measured_row": bytes([3, 0, 0, 0])}, r"sparse.measured_row must be below the 3 rows of the report; got 3"),
        ({"signals": bytes(32)}, r"sparse.signals must have 4 bytes for each of 4 numbers; got 32 bytes"),
    ],
)
def test_sparse_columns_that_do_not_fit_are_refused(fields: dict[str, Any], complaint: str) -> None:
    good = {
        **{"slot": bytes(6), "phase": bytes([THINK] * 3)},
        **{"flagged_row": bytes(4), "flags": bytes(4), "measured_row": bytes([2, 0, 0, 0]), "signals": bytes(16)},
    }
    made = table(thinking())
    assert made.add_tokens(agent_pb2.TokenColumns(sparse=agent_pb2.SparseColumns(**good))) == 3
    with pytest.raises(BadReport, match=complaint):
        made.add_tokens(agent_pb2.TokenColumns(sparse=agent_pb2.SparseColumns(**(good | fields))))


def test_a_new_window_length_begins_anew() -> None:
    made = table(thinking())
    made.add_tokens(tokens([(0, THINK, FLAG_BOUNDARY, 1.0, 5)] * 6))
    assert np.isfinite(made.boundary_rpdi[0, :2]).all()
    made.set_window(5)
    assert np.isnan(made.boundary_rpdi).all(), "RPDI of another window is another signal"
    made = table(thinking())
    made.add_tokens(tokens([(0, THINK, 0, 1.0)] * 3))
    made.set_window(4)
    assert made.entropy_count[0] == 3
    made.set_window(2)
    assert (made.entropy_count[0], made.entropy_sum[0], made.entropy_window_sum[0]) == (0, 0.0, 0.0)
    assert made.window.shape == (2, 2)
    made.add_tokens(tokens([(0, THINK, 0, 1.0)] * 3))
    assert made.entropy_window_sum[0] == 2.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from([THINK, OUTPUT]),
            st.sampled_from([0, 1, 3, FLAG_BOUNDARY, FLAG_BOUNDARY]),
            st.sampled_from([0.25, 0.5, math.nan]),
            st.integers(1, 99),
            st.sampled_from([-0.5, -2.0]),
            st.just(-1.0),
        ),
        max_size=80,
    ),
    st.integers(1, 10),
    st.sampled_from([1, 3, 50]),
)
def test_reports_may_be_cut_anywhere(rows: list[tuple[Any, ...]], size: int, window: int) -> None:
    """A slot may repeat within a report (merged steps, draft tokens): its rows count in order, as if each came alone,
    and of many rows the newest are remembered."""
    whole, cut = table(*[thinking()] * 4), table(*[thinking()] * 4)
    for made in (whole, cut):
        made.set_window(window)
    whole.add_tokens(tokens(rows))
    for at in range(0, len(rows), size):
        cut.add_tokens(tokens(rows[at : at + size]))
    for name in ("window", *HISTORIES, *(set(COLUMNS) - {"boundary_now"})):
        np.testing.assert_array_equal(getattr(whole, name), getattr(cut, name), err_msg=name)
    for slot in range(4):
        own = [r for r in rows if r[0] == slot]
        text = [row[1] for row in own if not row[2] & 3]
        assert whole.think_tokens[slot] == text.count(THINK)
        assert whole.output_tokens[slot] == text.count(OUTPUT)
        if own:
            assert whole.phase[slot] == (OUTPUT if own[-1][2] & phases.FLAG_END else own[-1][1])


# ------------------------------------------------------------------------------------------------------- intervals


def reported(made: RequestTable, now_ms: float, *rows: tuple[int, int, int]) -> tuple[list[float], list[float]]:
    """Return the output ITL and the TTOT, in milliseconds, that a report gives."""
    made.add_tokens(tokens([(*row, 0.0) for row in rows]), now_ms)
    return made.intervals.output_itl_ms.tolist(), made.intervals.ttot_ms.tolist()


ENDED = phases.FLAG_MARKER | phases.FLAG_END


def test_times_from_token_to_token() -> None:
    made = table(thinking())
    assert reported(made, 10, (0, THINK, 0)) == ([], [])
    assert reported(made, 30, (0, THINK, ENDED)) == ([], [])
    assert reported(made, 35, (0, OUTPUT, 0)) == ([], [5])
    assert reported(made, 42, (0, OUTPUT, 0)) == ([7], [])
    assert reported(made, 50) == ([], [])
    assert reported(made, 52, (0, OUTPUT, 0)) == ([10], []), "the request had no token in the step between"
    assert reported(made, 60, (0, THINK, phases.FLAG_MARKER)) == ([], [])
    assert reported(made, 64, (0, THINK, ENDED)) == ([], [])
    assert reported(made, 67, (0, OUTPUT, 0)) == ([], [3]), "TTOT begins at the newest end of thinking"


def test_several_tokens_of_a_report_came_evenly_spread() -> None:
    """Tokens of merged steps, or drafted ones, count once each, and together they take the time between the reports."""
    made = table({"phase": OUTPUT}, thinking())
    reported(made, 10, (0, OUTPUT, 0), (1, THINK, 0))
    rows = [(0, OUTPUT, 0), (1, THINK, 0), (0, OUTPUT, 0), (1, THINK, ENDED), (1, OUTPUT, 0), (1, OUTPUT, 0)]
    assert reported(made, 30, *rows) == ([10, 10, 5], [5])


def test_the_report_with_a_requests_first_tokens_gives_no_interval() -> None:
    """The first tokens give no interval, because the request was opened, or named in a snapshot, at another time than
    its last token was made."""
    made = table({"phase": OUTPUT}, thinking())
    assert reported(made, 90, (0, OUTPUT, 0), (0, OUTPUT, 0), (1, THINK, ENDED), (1, OUTPUT, 0)) == ([], [])
    assert reported(made, 95, (0, OUTPUT, 0), (1, OUTPUT, 0)) == ([5, 5], [])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([(THINK, 0), (THINK, ENDED), (OUTPUT, 0)])), max_size=40),
    st.integers(1, 10),
)
def test_intervals_are_those_of_each_request_alone(rows: list[tuple[int, tuple[int, int]]], size: int) -> None:
    together, alone = table(*[thinking()] * 4), [table(*[thinking()] * 4) for _ in range(4)]
    for number, at in enumerate(range(0, len(rows), size)):
        now_ms = 7.0 * (number + 1)
        report = [(slot, *token) for slot, token in rows[at : at + size]]
        itl, ttot = reported(together, now_ms, *report)
        parts = [reported(one, now_ms, *(row for row in report if row[0] == slot)) for slot, one in enumerate(alone)]
        assert itl == [value for part, _ in parts for value in part]
        assert ttot == [value for _, part in parts for value in part]
