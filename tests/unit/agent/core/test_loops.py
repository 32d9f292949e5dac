"""Thinking that repeats itself: what the agent reports of it, and what the control plane decides from that.

The rule on near-loops has a part of its own at the end.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import Markers
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.token_cycles import LOOK_TOKENS, MAX_PERIOD, REPEAT_WINDOW, LoopSearch
from meridian_agent.core.tracker import Tracker
from meridian_agent.link.messages import step_report as report_of
from meridian_control.common.errors import InvalidRequest
from meridian_control.decision_log.messages import decision_message
from tests.fakes.tables import policy
from tests.unit.sessions import EARLY, Stream, stream

if TYPE_CHECKING:
    from meridian_agent.core.live_request import LiveRequest

START, END, OTHER = 1, 2, 3
OFF = {"enabled": False}
LOOP = {"shadow": False, "min_rounds": 3, "min_tokens": 40}


# ---------------------------------------------------------------------------------------------------------- the agent


class Looking(Tracker):
    """A tracker whose looks are taken at once."""

    def __init__(self, markers: Markers, tokens_per_step: int) -> None:
        super().__init__(markers, tokens_per_step)
        self.search = LoopSearch()

    def look(self) -> None:
        self.look_for_loops()
        loops, repeats = self.search.search(self.record.looks)
        self.record.loops += loops
        self.record.repeats += repeats
        self.record.looks = []


class Writer:
    """One request whose tokens a test writes, with the tracker that accounts them."""

    def __init__(self, tracker: Looking, name: str) -> None:
        self.tracker, self.ref = tracker, SimpleNamespace(output_token_ids=[])
        info = RequestInfo(name, "model", "tenant", "slo", 7, 100_000, None)
        self.live: LiveRequest = tracker.open(info, [START], 0, self.ref)

    def write(self, *tokens: int) -> None:
        self.ref.output_token_ids += tokens
        self.tracker.feed(self.live, tokens, 0)
        self.tracker.look()


def tracker(tokens_per_step: int = 1) -> Looking:
    made = Looking(Markers(((START,),), ((END,),)), tokens_per_step)
    made.loops.enabled = True
    return made


@pytest.mark.parametrize("period", [1, 2, 3, 31, 32, 33, 255, MAX_PERIOD])
def test_a_loop_is_reported_before_its_fourth_round_or_256_tokens(period: int) -> None:
    writer = Writer(tracker(), "a")
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
    writer = Writer(tracker(tokens_per_step), "a")
    for _ in range(200 // tokens_per_step):
        writer.write(*[100] * tokens_per_step)
    tokens = [tokens for _, _, tokens in writer.tracker.record.loops]
    gaps = [after - before for before, after in pairwise(tokens)]
    assert tokens
    assert max(gaps) <= LOOK_TOKENS


@pytest.mark.parametrize(("merge_loops", "gap"), [(False, LOOK_TOKENS), (True, 2 * LOOK_TOKENS)])
def test_looks_are_half_as_often_while_no_end_follows_from_one(merge_loops: bool, gap: int) -> None:
    writer = Writer(tracker(), "a")
    writer.tracker.loops.obey(find_loops=True, repeats_from=0, merge_loops=merge_loops)
    for _ in range(300):
        writer.write(100)
    tokens = [tokens for _, _, tokens in writer.tracker.record.loops]
    assert {after - before for before, after in pairwise(tokens)} == {gap}


def test_only_the_thinking_that_goes_on_counts() -> None:
    """Neither the prompt, nor an answer, nor thinking before an answer belongs to a loop."""
    writer = Writer(tracker(), "a")
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
    shared = tracker()
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


def test_a_report_has_the_loops_of_all_its_steps() -> None:
    writer = Writer(tracker(), "a")
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
    ("period", "tokens", "ends"), [(1, 39, False), (1, 40, True), (14, 41, False), (14, 42, True), (20, 59, False)]
)
def test_both_bounds_must_be_reached(period: int, tokens: int, ends: bool) -> None:
    made, slot = begun(LOOP)
    forces = looping(made, slot, period, tokens)
    assert [(f.slot, f.reason, f.shadow) for f in forces] == [(slot, agent_pb2.FORCE_REASON_LOOP, False)] * ends


def test_in_shadow_a_loop_is_counted_once() -> None:
    made, slot = begun({})
    forces = [force for tokens in (200, 232, 264) for force in looping(made, slot, 1, tokens)]
    assert [(f.reason, f.shadow) for f in forces] == [(agent_pb2.FORCE_REASON_LOOP, True)]


def test_a_request_may_have_bounds_of_its_own() -> None:
    made, slot = begun(LOOP, override=[{"tenant": "long", "loop": {"min_tokens": 400}}, {"tenant": "no", "loop": OFF}])
    long, never = made.open("b", tenant="long"), made.open("c", tenant="no")
    made.step(3)
    assert [len(looping(made, other, 1, 300)) for other in (long, never, slot)] == [0, 0, 1]
    assert [force.slot for force in looping(made, long, 1, 400)] == [long]


def test_a_requests_own_floor_holds() -> None:
    made, _ = begun(LOOP)
    slot = made.open("b", min_think_tokens=1000)
    made.step(3)
    assert looping(made, slot, 1, 300) == []


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


# ---------------------------------------------------------------------------------------------------------- near-loops

NEAR = {"near_repeated_tokens": 700, "near_shadow": False, "shadow": False, "min_rounds": 1000}


def write_rounds(writer: Writer, tokens: int, per_step: int = 1) -> None:
    """Write rounds of 40 tokens, the first of which counts the rounds."""
    rounds = [token for count in range(10_000, 10_100) for token in (count, *range(100, 139))][:tokens]
    for begin in range(0, len(rounds), per_step):
        writer.write(*rounds[begin : begin + per_step])


@pytest.mark.parametrize("tokens_per_step", [1, 3, 7])
def test_a_near_loop_is_reported_once_enough_tokens_repeat(tokens_per_step: int) -> None:
    writer = Writer(tracker(tokens_per_step), "a")
    writer.tracker.loops.obey(True, 700)
    write_rounds(writer, 1200, tokens_per_step)
    record = writer.tracker.record
    assert record.loops == []
    # 32 of the 40 tokens of each round end a sequence that the round before had too.
    assert {slot for slot, _ in record.repeats} == {0}
    assert min(tokens for _, tokens in record.repeats) >= 700
    assert max(tokens for _, tokens in record.repeats) <= 32 * (REPEAT_WINDOW // 40) + REPEAT_WINDOW % 40
    assert record.urgent
    columns = report_of([writer.tracker.take_record()]).repeats
    assert list(columns.repeated_tokens) == [tokens for _, tokens in record.repeats]


def test_repetition_is_not_urgent_if_no_end_follows_from_it() -> None:
    writer = Writer(tracker(), "a")
    writer.tracker.merge_openings = True
    writer.tracker.take_record()
    writer.tracker.loops.obey(True, 700, merge_loops=True)
    write_rounds(writer, 1200)
    assert writer.tracker.record.repeats
    assert not writer.tracker.record.urgent


def test_repeated_tokens_are_counted_only_if_asked_for_and_only_in_thinking() -> None:
    writer = Writer(tracker(), "a")
    write_rounds(writer, 1500)
    assert writer.tracker.record.repeats == []
    writer.tracker.loops.obey(True, 700)
    writer.write(END)
    write_rounds(writer, 1500)
    writer.write(START)
    write_rounds(writer, 1000)
    assert writer.tracker.record.repeats == [], "the thinking that goes on has not filled the window"
    write_rounds(writer, 100)
    assert writer.tracker.record.repeats
    writer.tracker.loops.obey(True, 0)
    write_rounds(writer, LOOK_TOKENS)
    assert writer.tracker.search._repeats == {}


def test_counts_of_a_slot_begin_anew_with_its_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meridian_agent.core.tracker.RESTING_SLOTS", 0)
    shared = tracker()
    shared.loops.obey(True, 700)
    first = Writer(shared, "a")
    write_rounds(first, 1000)
    shared.close(first.live, 1)
    shared.take_record()
    after = Writer(shared, "b")
    assert after.live.slot == first.live.slot
    write_rounds(after, 600)
    assert shared.record.repeats == []


def repeating(made: Stream, slot: int, tokens: int) -> list[agent_pb2.ForceEnd]:
    """Report a request's repeated tokens and return the ends that are decided."""
    columns = agent_pb2.RepeatColumns(slot=[slot], repeated_tokens=[tokens])
    report = agent_pb2.StepReport(step=made.session._ledger.step + 1, steps=1, repeats=columns)
    responses = made.session.on_message(agent_pb2.ConnectRequest(step=report), made.now)
    return [force for response in responses for force in response.directives.forces]


def thinking(loop: dict[str, Any], entropies: tuple[float, float] = (2.0, 0.2), **sections: Any) -> tuple[Stream, int]:
    """Return a stream with a request that has thought 24 tokens at the first entropy and 8 at the second.

    RPDI, over the newest 8 tokens, is then 0.2 / 1.55 = 0.13.
    """
    made = stream(policy(scheduler=EARLY, entropy={"enabled": False, "rpdi_window_tokens": 8}, loop=loop, **sections))
    slot = made.open("a")
    think(made, "a", entropies)
    return made, slot


def think(made: Stream, name: str, entropies: tuple[float, float] = (2.0, 0.2)) -> None:
    """Let all requests think 24 tokens, and then 8; a request's entropy falls in between."""
    made.agent.scripts[name].entropy_nats = entropies[0]
    made.step(24)
    made.agent.scripts[name].entropy_nats = entropies[1]
    made.step(8)


@pytest.mark.parametrize(("tokens", "ends"), [(699, False), (700, True)])
def test_a_near_loop_ends_if_enough_repeats_and_entropy_has_collapsed(tokens: int, ends: bool) -> None:
    made, slot = thinking(NEAR)
    found = [(force.slot, force.reason, force.shadow) for force in repeating(made, slot, tokens)]
    assert found == [(slot, agent_pb2.FORCE_REASON_NEAR_LOOP, False)] * ends


@pytest.mark.parametrize(("ratio", "ends"), [(0.5, False), (1.2, True), (0.0, True)])
def test_without_a_collapse_only_a_policy_that_leaves_entropy_out_ends(ratio: float, ends: bool) -> None:
    made, slot = thinking({**NEAR, "entropy_collapse_ratio": ratio}, (1.0, 1.0))
    assert len(repeating(made, slot, 1000)) == ends


def test_unknown_entropy_is_no_collapse() -> None:
    made = stream(policy(scheduler=EARLY, entropy={"enabled": False, "rpdi_window_tokens": 512}, loop=NEAR))
    slot = made.open("a")
    made.step(32)
    assert repeating(made, slot, 1000) == []


@pytest.mark.parametrize(("shadow", "near_shadow"), [(True, False), (False, True), (True, True)])
def test_near_loops_are_in_shadow_with_the_section_or_alone(shadow: bool, near_shadow: bool) -> None:
    made, slot = thinking({**NEAR, "shadow": shadow, "near_shadow": near_shadow})
    forces = [force for _ in range(3) for force in repeating(made, slot, 1000)]
    assert [(force.reason, force.shadow) for force in forces] == [(agent_pb2.FORCE_REASON_NEAR_LOOP, True)]


def test_near_loops_are_ended_for_some_requests_and_above_their_floor() -> None:
    shadowed = {"near_shadow": True}
    override = [{"tenant": "tables", "loop": shadowed}, {"tenant": "high", "loop": {"near_repeated_tokens": 1000}}]
    made, slot = thinking(NEAR, override=[*override, {"tenant": "none", "loop": {"enabled": False}}])
    others = {tenant: made.open(tenant, tenant=tenant) for tenant in ("tables", "high", "none")}
    think(made, "tables")
    others["floored"] = made.open("floored", min_think_tokens=1000)
    for name in ("tables", "high", "none", "floored"):
        think(made, name)
    assert [force.shadow for force in repeating(made, others["tables"], 720)] == [True]
    assert [len(repeating(made, others[tenant], 720)) for tenant in ("high", "none")] == [0, 0]
    assert repeating(made, others["floored"], 1024) == []
    assert len(repeating(made, slot, 720)) == 1


def test_an_exact_loop_in_the_same_report_comes_first() -> None:
    made, slot = thinking({**NEAR, "min_rounds": 3})
    report = agent_pb2.StepReport(
        step=made.session._ledger.step + 1,
        steps=1,
        loops=agent_pb2.LoopColumns(slot=[slot], period_tokens=[1], loop_tokens=[400]),
        repeats=agent_pb2.RepeatColumns(slot=[slot], repeated_tokens=[1000]),
    )
    responses = made.session.on_message(agent_pb2.ConnectRequest(step=report), made.now)
    forces = [force.reason for response in responses for force in response.directives.forces]
    assert forces == [agent_pb2.FORCE_REASON_LOOP]


def test_repeats_of_one_report_say_nothing_about_the_next() -> None:
    made, slot = thinking({**NEAR, "entropy_collapse_ratio": 0.01})
    assert repeating(made, slot, 1000) == []
    assert made.session.table.repeated_tokens[slot] == 1000
    made.step(2)
    assert not made.session.table.repeated_tokens.any()


def test_repeats_that_break_the_contract_or_name_a_free_slot() -> None:
    made, slot = thinking(NEAR)
    assert repeating(made, 40_000, 1000) == []
    with pytest.raises(InvalidRequest, match="repeat columns must have one length"):
        made.say(repeats=agent_pb2.RepeatColumns(slot=[slot], repeated_tokens=[]))


def test_explain_names_the_values_of_a_near_loop() -> None:
    made, slot = thinking(NEAR)
    repeating(made, slot, 800)
    (decision,) = (d for d in made.session.open_decisions.values() if d.kind == "force")
    told = decision_message(decision)
    assert (told.reason, told.signals.repeated_tokens) == ("near_loop", 800)
    assert [(c.signal, c.value, c.limit_name, c.limit) for c in told.comparisons] == [
        ("repeated_tokens", 800, "loop.near_repeated_tokens", 700),
        ("rpdi", pytest.approx(0.2 / 1.55), "loop.entropy_collapse_ratio", 0.5),
    ]


def test_the_agent_counts_repeats_and_measures_entropy_only_if_a_policy_asks() -> None:
    near = {"tenant": "a", "loop": {"near_repeated_tokens": 600}}
    for sections, expected in (
        ({"loop": {}}, (0, False)),
        ({"loop": NEAR}, (700, True)),
        ({"loop": {**NEAR, "entropy_collapse_ratio": 0.0}}, (700, False)),
        ({"loop": NEAR, "override": [near]}, (600, True)),
        ({"loop": {**NEAR, "enabled": False}}, (0, False)),
    ):
        made = stream(policy(scheduler={"soft_think_tokens": 0}, entropy=OFF, **sections))
        sent = [response.settings for response in made.responses if response.HasField("settings")]
        assert [(told.repeats_from_tokens, told.observe_entropy) for told in sent] == [expected]
