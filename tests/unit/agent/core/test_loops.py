"""Thinking that repeats itself: what the agent reports of it, and what the control plane decides from that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import begin
from meridian_agent.core.token_cycles import LOOK_TOKENS, MAX_PERIOD, LoopSearch
from meridian_agent.core.tracker import Tracker
from meridian_agent.link.messages import step_report as report_of
from meridian_control.common.errors import InvalidRequest
from meridian_control.journal.messages import decision_message
from tests.fakes.engine import END, MARKERS, START, opened
from tests.fakes.tables import policy
from tests.unit.sessions import EARLY, Stream, stream

OFF = {"enabled": False}
LOOP = {"shadow": False, "min_rounds": 3, "min_tokens": 40}


# ---------------------------------------------------------------------------------------------------------- the agent


class Looking(Tracker):
    """A tracker whose looks are taken at once."""

    def __init__(self, tokens_per_step: int = 1) -> None:
        super().__init__(MARKERS, tokens_per_step)
        self.loops.enabled, self.search = True, LoopSearch()

    def look(self) -> None:
        self.look_for_loops()
        self.record.loops += self.search.search(self.record.looks)
        self.record.looks = []


class Writer:
    """One request whose tokens a test writes, with the tracker that accounts them."""

    def __init__(self, tracker: Looking, name: str) -> None:
        self.tracker, self.ref = tracker, SimpleNamespace(output_token_ids=[])
        self.live = opened(tracker, name, ref=self.ref)

    def write(self, *tokens: int) -> None:
        self.ref.output_token_ids += tokens
        self.tracker.feed(self.live, tokens, 0)
        self.tracker.look()


@pytest.mark.parametrize("period", [1, 2, 3, 31, 32, 33, 255, MAX_PERIOD])
def test_a_loop_is_reported_before_its_fourth_round_or_256_tokens(period: int) -> None:
    writer = Writer(Looking(), "a")
    cycle = list(range(100, 100 + period))
    writer.write(*range(10_000, 10_700))
    for number in range(max(4 * period, 256)):
        writer.write(cycle[number % period])
    found = [entry for entry in writer.tracker.record.loops if entry[1] == period]
    assert found
    first = next(tokens for _, _, tokens in found if tokens >= max(3 * period, 192))
    assert first <= max(3 * period, 192) + LOOK_TOKENS
    assert writer.tracker.record.urgent


@pytest.mark.parametrize("tokens_per_step", [2, 4, 9])
def test_a_step_of_several_tokens_is_looked_at_no_later(tokens_per_step: int) -> None:
    writer = Writer(Looking(tokens_per_step), "a")
    for _ in range(200 // tokens_per_step):
        writer.write(*[100] * tokens_per_step)
    tokens = [tokens for _, _, tokens in writer.tracker.record.loops]
    gaps = [after - before for before, after in pairwise(tokens)]
    assert tokens
    assert max(gaps) <= LOOK_TOKENS


@pytest.mark.parametrize(("merge_loops", "gap"), [(False, LOOK_TOKENS), (True, 2 * LOOK_TOKENS)])
def test_looks_are_half_as_often_while_no_end_follows_from_one(merge_loops: bool, gap: int) -> None:
    writer = Writer(Looking(), "a")
    writer.tracker.loops.obey(find_loops=True, merge_loops=merge_loops)
    for _ in range(300):
        writer.write(100)
    tokens = [tokens for _, _, tokens in writer.tracker.record.loops]
    assert {after - before for before, after in pairwise(tokens)} == {gap}


def test_only_the_thinking_that_goes_on_counts() -> None:
    """Neither the prompt, nor an answer, nor thinking before an answer belongs to a loop."""
    writer = Writer(Looking(), "a")
    writer.write(*[100] * 20)
    writer.write(END)
    for _ in range(100):
        writer.write(100)
    assert writer.tracker.record.loops == []
    writer.write(START)
    for _ in range(100):
        writer.write(100)
    assert writer.tracker.record.loops
    assert max(tokens for *_, tokens in writer.tracker.record.loops) <= 100


def test_requests_take_turns_and_slots_are_not_confused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes over a slot has none of the tokens of the request before it."""
    monkeypatch.setattr("meridian_agent.core.tracker.RESTING_SLOTS", 0)
    shared = Looking()
    writers = [Writer(shared, f"r{number}") for number in range(40)]
    for _ in range(70):
        for writer in writers:
            writer.ref.output_token_ids.append(100)
            shared.feed(writer.live, [100], 0)
        shared.look()
    assert {slot for slot, *_ in shared.record.loops} == set(range(40))
    shared.close(writers[5].live, 1)
    shared.take_record()
    after = Writer(shared, "new")
    assert after.live.slot == 5
    for number in range(4 * LOOK_TOKENS):
        after.write(1000 + number)
    assert not [entry for entry in shared.record.loops if entry[0] == 5]


def test_requests_that_wait_take_no_turns() -> None:
    """Neither do those that have ended, so a burst of requests leaves nothing behind."""
    shared = Looking()
    burst = [opened(shared, f"r{number}", ref=SimpleNamespace(output_token_ids=[])) for number in range(600)]

    def looked_at() -> list[tuple[int, str]]:
        shared.record.looks = []
        for _ in range(LOOK_TOKENS):
            shared.look_for_loops()
        return sorted((slot, request_id) for slot, request_id, *_ in shared.record.looks)

    assert looked_at() == [(number, f"r{number}") for number in range(600)]
    for live in burst:
        shared.close(live, 1)
    shared.take_record()
    wait = [
        shared.enter(
            replace(live.info, request_id=f"w{live.slot}"), begin(MARKERS, [START], True), 0, live.ref, queued_s=1
        )
        for live in burst[:100]
    ]
    assert looked_at() == [(number, "") for number in range(600)], "the search forgets the requests that have ended"
    assert not any(shared.loops.is_turn_of_any() for _ in range(LOOK_TOKENS))
    shared.join_step(wait[70], 2.0)
    assert looked_at() == [(wait[70].slot, "w70")]
    shared.loops.obey(find_loops=True, merge_loops=True)
    assert looked_at() + looked_at() == [(wait[70].slot, "w70")]


def test_a_report_has_the_loops_of_all_its_steps() -> None:
    writer = Writer(Looking(), "a")
    for _ in range(100):
        writer.write(100)
    loops = report_of([writer.tracker.take_record()]).loops
    assert set(loops.slot) == {0}
    assert set(loops.period_tokens) == {1}
    assert list(loops.loop_tokens) == sorted(loops.loop_tokens)


# ------------------------------------------------------------------------------------------------- the control plane


def looping(made: Stream, slot: int, period: int, tokens: int) -> list[agent_pb2.ForceEnd]:
    """Report a loop of a request and return the ends that are decided."""
    columns = agent_pb2.LoopColumns(slot=[slot], period_tokens=[period], loop_tokens=[tokens])
    report = agent_pb2.StepReport(step=made.session._ledger.step + 1, steps=1, loops=columns)
    responses = made.session.on_message(agent_pb2.ConnectRequest(step=report), made.now)
    return [force for response in responses for force in response.directives.forces]


def begun(loop: dict[str, Any], **sections: Any) -> tuple[Stream, int]:
    made = stream(policy(scheduler=EARLY, entropy=OFF, loop=loop, **sections))
    slot = made.open("a")
    made.step(3)
    return made, slot


@pytest.mark.parametrize(
    ("fields", "period", "tokens", "ends"),
    [
        ({}, 1, 39, False),
        ({}, 1, 40, True),
        ({}, 14, 41, False),
        ({}, 14, 42, True),
        ({}, 20, 59, False),
        # Bounds of a request's own, and a floor.
        ({"tenant": "long"}, 1, 300, False),
        ({"tenant": "long"}, 1, 400, True),
        ({"tenant": "no"}, 1, 300, False),
        ({"min_think_tokens": 1000}, 1, 300, False),
    ],
)
def test_both_bounds_must_be_reached(fields: dict[str, Any], period: int, tokens: int, ends: bool) -> None:
    made, _ = begun(LOOP, override=[{"tenant": "long", "loop": {"min_tokens": 400}}, {"tenant": "no", "loop": OFF}])
    slot = made.open("b", **fields)
    made.step(3)
    forces = looping(made, slot, period, tokens)
    assert [(f.slot, f.reason, f.shadow) for f in forces] == [(slot, agent_pb2.FORCE_REASON_LOOP, False)] * ends


def test_in_shadow_a_loop_is_counted_once() -> None:
    made, slot = begun({})
    forces = [force for tokens in (200, 232, 264) for force in looping(made, slot, 1, tokens)]
    assert [(f.reason, f.shadow) for f in forces] == [(agent_pb2.FORCE_REASON_LOOP, True)]


def test_a_cycle_that_the_thinking_has_left() -> None:
    """A loop in one report says nothing about the next report."""
    made, slot = begun({**LOOP, "min_tokens": 400})
    assert looping(made, slot, 1, 300) == []
    assert made.session.table.loop_tokens.any()
    made.step(2)
    assert not made.session.table.loop_tokens.any()


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"slot": [0], "period_tokens": [1], "loop_tokens": []}, "loop columns must have one length"),
        ({"slot": [0], "period_tokens": [0], "loop_tokens": [9]}, "at least 1 token; got 0 of 9 tokens"),
        ({"slot": [0], "period_tokens": [9], "loop_tokens": [8]}, "at least 1 token; got 9 of 8 tokens"),
    ],
)
def test_a_report_that_breaks_the_contract(columns: dict[str, Any], error: str) -> None:
    made, _ = begun(LOOP)
    with pytest.raises(InvalidRequest, match=error):
        made.say(loops=agent_pb2.LoopColumns(**columns))


def test_a_loop_in_a_free_slot_is_ignored() -> None:
    made, _ = begun(LOOP)
    assert looping(made, 40_000, 1, 300) == []


def test_explain_names_the_values_that_were_compared() -> None:
    made, slot = begun(LOOP)
    looping(made, slot, 14, 45)
    (decision,) = (d for d in made.session.open_decisions.values() if d.kind == "force")
    told = decision_message(decision)
    assert (told.reason, told.signals.loop_period_tokens, told.signals.loop_tokens) == ("loop", 14, 45)
    assert [(c.signal, c.value, c.limit_name, c.limit) for c in told.comparisons] == [
        ("loop_rounds", 3, "loop.min_rounds", 3),
        ("loop_tokens", 45, "loop.min_tokens", 40),
    ]


def test_the_agent_looks_only_if_a_policy_asks() -> None:
    for sections, expected in (
        ({}, True),
        ({"loop": OFF}, False),
        ({"loop": OFF, "override": [{"tenant": "a", "loop": {"enabled": True}}]}, True),
    ):
        made = stream(policy(**sections))
        sent = [response.settings for response in made.responses if response.HasField("settings")]
        assert [settings.find_loops for settings in sent] == [expected]
