"""The tracker: slots, counts, requests that are due, and the contents of a record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.live_request import Cap, Ending, LiveRequest
from meridian_agent.core.phases import FLAG_END, FLAG_MARKER, FLAG_PARAGRAPH, FLAG_SENTENCE, Markers, Phase
from meridian_agent.core.request_info import in_sample, shown_id
from meridian_agent.core.tracker import RESTING_SLOTS, Tracker
from meridian_control.capabilities.control_group.rule import held_out
from tests.fakes.engine import END, MARKERS, START, TEXT, opened
from tests.fakes.sentences import ends_by_id


def test_a_slot_is_not_opened_in_the_record_that_closes_it() -> None:
    """One request closes and another opens between two steps; their slots differ, because the record cannot say which
    came first."""
    tracker = Tracker(MARKERS)
    gone = opened(tracker, "a")
    tracker.take_record()
    tracker.close(gone, 3)
    came = opened(tracker, "b")
    record = tracker.take_record()
    assert record.closed == [(0, 3)]
    assert [row[0] for row in record.opened] == [came.slot] == [1]
    assert opened(tracker, "c").slot == 2


def test_records_are_numbered_apart() -> None:
    """Asynchronous scheduling can finish two updates at one engine step; a request knows in which record it was
    opened."""
    tracker = Tracker(MARKERS)
    tracker.record.step = 5
    assert tracker.take_record().step == 5
    tr = opened(tracker, "a")
    assert tr.opened_step == 6
    tracker.record.step = 5
    assert tracker.take_record().step == 6
    tracker.record.step = 20
    assert tracker.take_record().step == 20


def test_whose_tokens_are_measured() -> None:
    tracker = Tracker(MARKERS)
    a, b = opened(tracker, "a", [TEXT]), opened(tracker, "b", [START, END])
    assert tracker.unmeasured_ids == {"a", "b"}, "the model has yet to begin thinking"
    tracker.feed(a, [START], 0)
    assert tracker.unmeasured_ids == {"b"}
    opened(tracker, "c", [START])
    assert tracker.unmeasured_ids == {"b"}
    tracker.feed(a, [END], 0)
    assert tracker.unmeasured_ids == {"a", "b"}
    tracker.feed(b, [START], 0)
    assert tracker.unmeasured_ids == {"a"}
    tracker.close(a, 1)
    assert not tracker.unmeasured_ids


def test_a_request_that_may_think_in_the_step_under_way_is_measured() -> None:
    tracker = Tracker(MARKERS)
    tracker.steps_ahead = True
    opened(tracker, "a", [TEXT]), opened(tracker, "b", [START, END])
    assert tracker.unmeasured_ids == {"b"}


def test_a_share_of_requests_is_measured() -> None:
    """The sample is a share of the ids, the same on each engine, and part of each larger sample. Live requests stay as
    they are until all are measured."""
    names = [f"chatcmpl-{i}" for i in range(2000)]

    def sample(share: float) -> set[str]:
        tracker = Tracker(MARKERS)
        tracker.measure(share)
        for name in names:
            opened(tracker, name)
        unmeasured = {row[1].request_id for row in tracker.snapshot() if row[-1]}
        assert tracker.unmeasured_ids == unmeasured
        assert {row[1].request_id for row in tracker.record.opened if row[-1]} == unmeasured
        assert tracker.measure(0.0) == []
        assert tracker.unmeasured_ids == unmeasured
        gone = opened(tracker, "gone")
        assert tracker.unmeasured_ids == {*unmeasured, "gone"}
        tracker.close(gone, 1)
        assert tracker.unmeasured_ids == unmeasured
        later = tracker.measure(1.0)
        assert {live.info.request_id for live in later} == unmeasured
        for live in later:
            tracker.begin_to_measure(live, 0)
        assert not tracker.unmeasured_ids
        return set(names) - unmeasured

    none, few, half, everyone = (sample(share) for share in (0.0, 0.05, 0.5, 1.0))
    assert none < few < half < everyone == set(names)
    assert 60 < len(few) < 140
    assert 900 < len(half) < 1100


@pytest.mark.parametrize("name", ["chatcmpl-{}", "two\nlines-{}", "{}-" + 300 * "x"])
def test_the_sample_is_the_control_group_of_the_same_share(name: str) -> None:
    """The control plane knows the ids as they are reported."""
    names = [name.format(number) for number in range(200)]
    assert [in_sample(name, 0.5) for name in names] == [held_out(shown_id(name), 0.5) for name in names]


@pytest.mark.parametrize(("live", "share"), [(0, 0.5), (1, 0.05), (16, 0.0), (16, 0.5), (40, 0.05)])
def test_a_cluster_has_as_many_requests_as_are_live_and_the_sample_stays_a_share(live: int, share: float) -> None:
    tracker, most = Tracker(MARKERS), 32
    for number in range(live):
        opened(tracker, f"live {number}")
    tracker.measure(share, most)
    measured = []
    for number in range(20_000):
        request = opened(tracker, f"chatcmpl-{number}")
        measured.append(request.measured)
        tracker.close(request, 1)
    runs = [len(run) for run in "".join("x" if each else " " for each in measured).split()]
    size = max(1, min(live, most))
    assert all(run >= size for run in runs[:-1])
    assert abs(sum(measured) / len(measured) - share) <= 0.2 * share
    assert len(runs) >= share * len(measured) / size / 4


def test_the_record_of_a_step() -> None:
    tracker = Tracker(MARKERS)
    a, b = opened(tracker, "a"), opened(tracker, "b", [])
    tracker.take_record()
    tracker.feed(a, [TEXT, END, TEXT], 4)
    tracker.feed(b, [TEXT], 7)
    record = tracker.take_record()
    assert record.slots == [0, 0, 0, 1]
    assert record.phases == [Phase.THINK, Phase.THINK, Phase.OUTPUT, Phase.OUTPUT]
    assert record.flags[:3] == [0, FLAG_MARKER | FLAG_END, 0]
    assert record.rows == [4, 5, 6, 7]
    assert record.urgent
    assert tracker.record.slots == []
    tracker.feed(a, [TEXT, TEXT], 0)
    assert not tracker.record.presses


def test_arrivals_and_changes_of_phase_press() -> None:
    tracker = Tracker(MARKERS)
    a = opened(tracker, "a")
    assert tracker.take_record().presses
    opened(tracker, "b", [])
    assert tracker.take_record().presses
    tracker.feed(a, [END], 0)
    assert tracker.take_record().presses


def test_merged_openings_press_only_if_a_decision_is_urgent() -> None:
    tracker = Tracker(MARKERS)
    tracker.merge_openings = True
    a = opened(tracker, "a")
    assert tracker.take_record().presses, "the engine was idle"
    b, c = opened(tracker, "b", []), opened(tracker, "c")
    assert not tracker.take_record().presses
    d = opened(tracker, "d", own_cap=127)
    assert tracker.take_record().presses, "a cap of its own that its first tokens may reach"
    tracker.close(opened(tracker, "e", own_cap=128), 1)
    assert not tracker.take_record().presses
    tracker.feed(b, [START], 0)
    assert not tracker.take_record().presses
    tracker.feed(b, [END], 0)
    assert tracker.take_record().presses, "an answer begins while others think"
    tracker.merge_answers = True
    tracker.feed(b, [START], 0)
    tracker.feed(b, [END], 0)
    assert not tracker.take_record().presses
    tracker.merge_answers = False
    tracker.close(c, 1)
    tracker.close(d, 1)
    tracker.feed(a, [END], 0)
    assert not tracker.take_record().presses, "nobody else thinks"


def test_opened_rows_are_copies() -> None:
    tracker = Tracker(MARKERS)
    tr = opened(tracker, "a", own_cap=9)
    (row,) = tracker.record.opened
    tracker.feed(tr, [TEXT, TEXT, END, TEXT], 0)
    tr.forced = tr.preempted = True
    tr.cap = Cap(7, 30, shadow=False, extended=True)
    tr.ending = Ending((END,), 8, reason=agent_pb2.FORCE_REASON_EAT)
    assert row == (0, tr.info, Phase.THINK, 0, 0, 0, False, 0, False, False, False, False)
    assert tracker.snapshot() == [(0, tr.info, Phase.OUTPUT, 2, 1, 2, True, 2, True, True, False, False)]


def test_ended_is_said_once_and_across_re_entry() -> None:
    tracker = Tracker(MARKERS)
    tr = opened(tracker, "a")
    assert tracker.feed(tr, [END, START, TEXT], 0) is True
    assert tr.state.phase is Phase.THINK
    assert tracker.feed(tr, [TEXT], 0) is False


def test_ranks_follow_the_phase_until_a_plan_says_otherwise() -> None:
    tracker = Tracker(MARKERS)
    ranks = [opened(tracker, n, p).effective_rank for n, p in (("a", [START, END]), ("b", []), ("c", [START]))]
    assert ranks == [0, 256, 544]
    tr = tracker.by_id["c"]
    tr.rank = 0
    assert tr.effective_rank == 0
    tracker.feed(tr, [TEXT], 0)
    assert not tracker.reorder
    tracker.feed(tr, [END], 0)
    assert tracker.reorder, "the phase has changed"


def test_a_sentence_that_ends_within_a_step_is_looked_back_at() -> None:
    """The tracker looks back only as far as one step reaches, not past a marker, and once."""
    tracker = Tracker(MARKERS)
    tracker.sentences = ends_by_id(bytes([0, 0, 0, 0, 0, FLAG_SENTENCE, FLAG_SENTENCE | FLAG_PARAGRAPH]))
    tr = opened(tracker, "a")

    def since(*tokens: int) -> tuple[int | None, ...]:
        tracker.feed(tr, tokens, 0)
        return tr.since_end(FLAG_SENTENCE, 2), tr.since_end(FLAG_SENTENCE | FLAG_PARAGRAPH, 2)

    assert tr.since_end(0, 0) == 0
    assert since(TEXT, TEXT) == (None, None)
    assert since(TEXT, 5, TEXT) == (1, None)
    assert since(TEXT) == (2, None)
    assert since(TEXT) == (None, None)
    assert since(6, TEXT, TEXT) == (2, 2)
    assert since(TEXT, TEXT, 5) == (0, None)
    assert since(5, END, START) == (None, None)
    assert since(5, TEXT) == (1, None)
    tr.passed = (0, 0)
    assert since(TEXT) == (None, None)


# -------------------------------------------------------------------------------------------------------------- due


def limits(tr: LiveRequest, *caps: Any) -> list[int | None]:
    found = []
    for cap in caps:
        tr.cap = cap
        found.append(tr.limit)
    return found


def test_the_smaller_cap_holds_and_shadows_do_not() -> None:
    tracker = Tracker(MARKERS)
    caps = (None, Cap(1, 5, False), Cap(2, 50, False), Cap(3, 5, True))
    assert limits(opened(tracker, "a"), *caps) == [None, 5, 50, None]
    assert limits(opened(tracker, "b", own_cap=20), *caps) == [20, 5, 20, 20]
    assert limits(opened(tracker, "c", own_cap=0), *caps) == [0, 0, 0, 0]


def test_due_ends_with_thinking_and_when_the_cap_is_lifted() -> None:
    tracker = Tracker(MARKERS)
    natural, lifted, gone = (opened(tracker, name, own_cap=0) for name in "abc")
    other = opened(tracker, "d", [], own_cap=0)
    assert [*tracker.due] == [natural, lifted, gone], "a request that does not think is not due"
    tracker.feed(natural, [END], 0)
    lifted.info = replace(lifted.info, max_think_tokens=None)
    tracker.watch_limit(lifted)
    tracker.close(gone, 3)
    assert not tracker.due
    tracker.feed(other, [START], 0)
    assert [*tracker.due] == [other]


def test_an_ending_keeps_a_request_due() -> None:
    tracker = Tracker(MARKERS)
    tr = opened(tracker, "a")
    tr.ending = Ending((END,), 1)
    tracker.feed(tr, [TEXT], 0)
    assert [*tracker.due] == [tr]


def test_expected_tokens_move_the_ending_on() -> None:
    tracker = Tracker(Markers(((START,),), ((5, 6),)))
    tr = opened(tracker, "a")
    tr.ending = Ending((5, 6), 1)
    tr.expected = {2: 5}
    tracker.feed(tr, [TEXT], 0)
    assert (tr.ending.position, tr.expected) == (0, {}), "with drafts rejected, the row was not reached"
    tr.expected = {1: 5, 2: 6}
    assert tracker.feed(tr, [TEXT, 5, 6], 0) is True
    assert tr.ending.position == 2
    assert tr.state.think_tokens == 2


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.sampled_from([[], [START], [START, END]])),
            st.tuples(st.just("close"), st.integers(0, 20)),
            st.tuples(st.just("feed"), st.integers(0, 20), st.lists(st.sampled_from([START, END, TEXT]), max_size=3)),
            st.tuples(st.just("take")),
        ),
        max_size=60,
    )
)
def test_slots_and_counts_stay_consistent(events: list[Any]) -> None:
    tracker, number = Tracker(MARKERS), 0
    closed_in_record, resting = list[int](), list[int]()
    for event, *args in events:
        live = list(tracker.by_id.values())
        if event == "open":
            away = {*tracker.by_slot, *closed_in_record, *resting}
            free = set(range(len(away) + 1)) - away
            tr = opened(tracker, str(number), args[0])
            number += 1
            assert tr.slot == min(free)
        elif event == "take":
            record = tracker.take_record()
            assert not {s for s, _ in record.closed} & {row[0] for row in record.opened if row[0] in tracker.by_slot}
            resting, closed_in_record = (resting + closed_in_record)[-RESTING_SLOTS:], []
        elif live:
            tr = live[args[0] % len(live)]
            if event == "feed":
                tracker.feed(tr, args[1], 0)
            else:
                tracker.close(tr, 1)
                closed_in_record.append(tr.slot)
        phases = [tr.state.phase for tr in tracker.by_id.values()]
        assert (tracker.thinking, tracker.answering) == (phases.count(Phase.THINK), phases.count(Phase.OUTPUT))
        assert {slot: tr.info.request_id for slot, tr in tracker.by_slot.items()} == {
            tr.slot: name for name, tr in tracker.by_id.items()
        }
