"""Decisions about requests: what each does to thinking, also over draft tokens and half-written end markers, and the
one outcome that each has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MAX_SKIP_STEPS, MAX_WAIT_STEPS
from meridian_agent.core.live_request import PHASE_RANK
from meridian_agent.core.phases import NO_MARKERS, Markers, Phase
from meridian_agent.core.probe_admission import MAX_HOLD_MS
from meridian_agent.core.sentences import TokenText, table_of
from meridian_agent.core.step_record import NOT_KNOWN, Outcome, Tier
from tests.fakes.engine import END, MARKERS, START, TEXT, FakeEngine
from tests.reached import reached, reaches
from tests.unit.directive_messages import TWO, cap, force, message, model_stops, plan, text_until_end


def test_values_are_those_of_the_contract() -> None:
    assert {o.name: o.value for o in Outcome} == {
        name.removeprefix("OUTCOME_"): value for name, value in agent_pb2.Outcome.items() if value
    }
    assert {t.name: t.value for t in Tier} == {
        name.removeprefix("EVICTION_TIER_"): value for name, value in agent_pb2.EvictionTier.items() if value
    }


# ------------------------------------------------------------------------------------------------- one request's story

APPLIED, SHADOWED, SUPERSEDED = Outcome.APPLIED, Outcome.SHADOWED, Outcome.SUPERSEDED
NATURALLY, GONE = Outcome.ENDED_NATURALLY, Outcome.REQUEST_GONE
# Steps until something ends thinking; the end of the request, and its end by its client; a stop of the model, which the
# engine takes back so that thinking ends there; and the end of all leases.
UNTIL_END, FINISH, LEAVE, STOP, LAPSE = "until end", "finish", "leave", "stop", "lapse"


def tier(decision_id: int, which: Tier) -> agent_pb2.Directives:
    sent = message()
    sent.tiers.add(decision_id=decision_id, slot=0, tier=int(which))
    return sent


def caps(*sent: agent_pb2.ThinkCap) -> agent_pb2.Directives:
    return message(caps=sent)


def forces(*sent: agent_pb2.ForceEnd) -> agent_pb2.Directives:
    return message(forces=sent)


PROBE = message(probes=[{"decision_id": 3, "slot": 0}])
# The story of a request: decisions, the tokens that its model wants, UNTIL_END, FINISH or LEAVE; then the outcomes, and
# whether the request thinks, how many tokens it has thought, and whether an end was forced.
STORIES: dict[str, tuple[Sequence[Any], dict[int, Outcome], tuple[bool, int, bool] | None]] = {
    "a cap in shadow that is reached at once": (
        [caps(cap(1, 0, 0, shadow=True)), *[TEXT] * 6],
        {1: SHADOWED},
        (True, 6, False),
    ),
    "a cap in shadow that is reached": (
        [caps(cap(1, 0, 4, shadow=True)), *[TEXT] * 6],
        {1: SHADOWED},
        (True, 6, False),
    ),
    "a cap in shadow that is not reached": (
        [caps(cap(1, 0, 4, shadow=True)), TEXT, TEXT, END, TEXT],
        {1: NATURALLY},
        (False, 2, False),
    ),
    "a force in shadow": ([forces(force(1, 0, shadow=True)), TEXT], {1: SHADOWED}, (True, 1, False)),
    "a force": ([TEXT, forces(force(1, 0)), UNTIL_END], {1: APPLIED}, (False, 1, True)),
    "a second force": ([forces(force(1, 0), force(2, 0)), UNTIL_END], {1: APPLIED, 2: SUPERSEDED}, (False, 0, True)),
    "a force settles the cap": (
        [message(caps=[cap(1, 0, 9)], forces=[force(2, 0)]), UNTIL_END],
        {1: SUPERSEDED, 2: APPLIED},
        (False, 0, True),
    ),
    "thinking that ends before the cap": (
        [caps(cap(1, 0, 5)), TEXT, TEXT, END, TEXT],
        {1: NATURALLY},
        (False, 2, False),
    ),
    # The cap outlives its outcome, and counts all thinking tokens.
    "thinking that begins again": (
        [caps(cap(1, 0, 5)), TEXT, TEXT, END, TEXT, START, TEXT, TEXT, TEXT, UNTIL_END],
        {1: NATURALLY},
        (False, 5, True),
    ),
    "a cap after thinking": ([END, caps(cap(1, 0, 1)), START, UNTIL_END], {1: NATURALLY}, (False, 1, True)),
    "a lifted cap": (
        [caps(cap(1, 0, 3)), TEXT, caps(cap(2, 0, None)), *[TEXT] * 5],
        {1: SUPERSEDED, 2: APPLIED},
        (True, 6, False),
    ),
    "newer caps": (
        [caps(cap(1, 0, 3)), TEXT, caps(cap(2, 0, 6), cap(3, 0, 5)), UNTIL_END],
        {1: SUPERSEDED, 2: SUPERSEDED, 3: APPLIED},
        (False, 5, True),
    ),
    "a cap that is decided after a stop": ([TEXT, STOP, caps(cap(1, 0, 9)), UNTIL_END], {1: APPLIED}, (False, 1, True)),
    "a cap that is lifted after a stop": (
        [caps(cap(1, 0, 9)), TEXT, STOP, caps(cap(2, 0, None)), UNTIL_END],
        {1: APPLIED, 2: APPLIED},
        (False, 1, True),
    ),
    "a cap in shadow after a stop": (
        [TEXT, STOP, caps(cap(1, 0, 9, shadow=True)), UNTIL_END],
        {1: NATURALLY},
        (False, 1, True),
    ),
    "leases that run out after a stop": (
        [caps(cap(1, 0, 9)), TEXT, STOP, LAPSE, UNTIL_END],
        {1: APPLIED},
        (False, 1, True),
    ),
    "leases that run out after a force and a stop": (
        [TEXT, forces(force(1, 0)), STOP, LAPSE, UNTIL_END],
        {1: APPLIED},
        (False, 1, True),
    ),
    "a request that goes": (
        [caps(cap(1, 0, 9)), forces(force(2, 0)), PROBE, tier(4, Tier.UNREACHABLE), LEAVE],
        {1: GONE, 2: GONE, 3: GONE, 4: APPLIED},
        None,
    ),
    "a newer tier": ([tier(1, Tier.UNREACHABLE), tier(2, Tier.REUSABLE), FINISH], {1: SUPERSEDED, 2: APPLIED}, None),
}


def play(engine: FakeEngine, story: Sequence[Any]) -> None:
    for event in story:
        if isinstance(event, agent_pb2.Directives):
            engine.accept(event)
        elif event == UNTIL_END:
            text_until_end(engine, "a")
        elif event == STOP:
            model_stops(engine, "a")
        elif event == LAPSE:
            engine.directives.drop(ALL_BUT_CAPS | CAPS)
        elif event in (FINISH, LEAVE):
            (engine.finish if event == FINISH else engine.abort)("a")
            engine.take()
        else:
            engine.run({"a": event})


@pytest.mark.parametrize("markers", [MARKERS, TWO], ids=["one token", "two tokens"])
@pytest.mark.parametrize(("story", "outcomes", "ends"), STORIES.values(), ids=STORIES)
def test_stories(
    story: Sequence[Any], outcomes: dict[int, Outcome], ends: tuple[bool, int, bool] | None, markers: Markers
) -> None:
    if markers is TWO and END in story:
        pytest.skip("the story is written for an end marker of one token")
    engine = FakeEngine(markers)
    tr = engine.open("a")
    play(engine, story)
    assert engine.outcomes == {decision: [outcome] for decision, outcome in outcomes.items()}
    if ends is not None:
        assert (engine.thinking("a"), tr.state.think_tokens, tr.forced) == ends
        # No step can be counted as a whole while one of its requests is due.
        assert engine.tracker.due == {}


@pytest.mark.parametrize("shadow", [True, False])
def test_a_cap_says_nothing_of_a_request_that_never_thinks(shadow: bool) -> None:
    engine = FakeEngine()
    engine.open("a", prompt=[])
    play(engine, [caps(cap(1, 0, 0, shadow)), TEXT, TEXT])
    assert engine.outcomes == {}
    play(engine, [FINISH])
    assert engine.outcomes == {1: [GONE]}


@pytest.mark.parametrize("markers", [MARKERS, TWO], ids=["one token", "two tokens"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("own", [False, True])
def test_caps_are_exact(markers: Markers, tokens: int, own: bool) -> None:
    """A request's own cap needs no decision, and holds before a larger one."""
    engine = FakeEngine(markers)
    tr = engine.open("a", own_cap=tokens if own else None)
    engine.accept(caps(cap(1, 0, tokens + 3 if own else tokens)))
    assert text_until_end(engine, "a") == tokens + len(markers.ending)
    assert (tr.state.think_tokens, tr.forced, tr.ending) == (tokens, True, None)
    assert engine.outcomes == {1: [NATURALLY if own else APPLIED]}
    assert engine.records[-1].outcomes[0][2] == tokens
    engine.run({"a": TEXT})
    assert tr.state.output_tokens == 1


# ---------------------------------------------------------------------------------------------------------- targets


def test_a_decision_for_an_unknown_slot_or_an_older_request_of_that_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meridian_agent.core.tracker.RESTING_SLOTS", 0)
    engine = FakeEngine()
    engine.open("a")
    engine.take()
    decided_at = engine.tracker.take_record().step
    engine.abort("a")
    engine.take()
    tr = engine.open("b")
    assert tr.slot == 0
    every = message(decided_at, forces=[force(1, 0)], caps=[cap(2, 0, 5)], probes=[{"decision_id": 3, "slot": 0}])
    every.tiers.add(decision_id=4, slot=0, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    every.plan.CopyFrom(plan(5, slot=[0], rank=[7]))
    engine.accept(every)
    engine.accept(message(caps=[cap(6, 9, 5)]))
    engine.take()
    assert engine.outcomes == {i: [Outcome.REQUEST_GONE] for i in (1, 2, 3, 4, 6)}
    assert (tr.cap, tr.ending, tr.tier, tr.rank, list(engine.directives.probes)) == (None, None, None, None, [])
    opened_at = engine.records[-1].step
    engine.accept(message(opened_at, caps=[cap(7, 0, 5)]))
    assert tr.cap is not None


@pytest.mark.parametrize(
    ("reason", "own_cap", "kept"),
    [
        # The rest of `3.14` and of `Dr. Smith` comes first; a cap and other ends do not wait for it.
        (agent_pb2.FORCE_REASON_SOFT_CLOSE, None, [" 3", ".", "14", " Dr", ".", " Smith"]),
        (agent_pb2.FORCE_REASON_SOFT_CLOSE, 4, [" 3", ".", "14"]),
        (agent_pb2.FORCE_REASON_EAT, None, [" 3"]),
    ],
)
def test_a_soft_close_divides_no_number_and_no_abbreviation(
    reason: agent_pb2.ForceReason.ValueType, own_cap: int | None, kept: list[str]
) -> None:
    texts = [" so", " 3", ".", "14", " Dr", " Smith"]
    engine = FakeEngine()
    engine.tracker.sentences = table_of([TokenText("", special=True)] * TEXT + [*map(TokenText, texts)])
    tr = engine.open("a", own_cap=own_cap)
    engine.run({"a": TEXT})
    engine.run({"a": TEXT + 1})
    engine.accept(message(forces=[agent_pb2.ForceEnd(decision_id=1, slot=0, reason=reason)]))
    for text in [".", "14", " Dr", ".", " Smith", " so"]:
        if engine.thinking("a"):
            engine.run({"a": TEXT + texts.index(text)})
    assert not engine.thinking("a")
    assert tr.state.think_tokens == 1 + len(kept)


def test_a_soft_close_does_not_wait_for_a_number_without_end() -> None:
    engine = FakeEngine()
    engine.tracker.sentences = table_of([TokenText("3")] * (TEXT + 1))
    tr = engine.open("a")
    soft = agent_pb2.FORCE_REASON_SOFT_CLOSE
    engine.accept(message(forces=[agent_pb2.ForceEnd(decision_id=1, slot=0, reason=soft)]))
    for _ in range(2 * MAX_WAIT_STEPS):
        engine.run({"a": TEXT})
    assert not engine.thinking("a")
    assert tr.state.think_tokens <= MAX_WAIT_STEPS + 1


def test_a_soft_close_does_not_wait_for_a_model_that_has_stopped() -> None:
    engine = FakeEngine()
    engine.tracker.sentences = table_of([TokenText("3")] * (TEXT + 1))
    tr = engine.open("a")
    engine.run({"a": TEXT})
    engine.accept(message(forces=[agent_pb2.ForceEnd(decision_id=1, slot=0, reason=agent_pb2.FORCE_REASON_SOFT_CLOSE)]))
    engine.run({"a": TEXT})
    assert engine.thinking("a"), "the end waits for the rest of the number"
    model_stops(engine, "a")
    engine.run({"a": TEXT})
    assert (engine.thinking("a"), tr.state.think_tokens) == (False, 2)


@pytest.mark.parametrize("ended", [True, False])
def test_a_freeze_drops_the_end_that_follows_a_stop(ended: bool) -> None:
    """Whether the freeze begins after the engine has queued the request anew or before."""
    engine = FakeEngine()
    tr = engine.open("a")
    engine.run({"a": TEXT})
    tr.stopped_after = tr.state.ends
    if ended:
        engine.directives.end_stopped(tr)
    engine.directives.freeze()
    if not ended:
        engine.directives.end_stopped(tr)
    engine.run({"a": TEXT})
    assert (engine.thinking("a"), tr.state.think_tokens) == (True, 2)
    # After the freeze the model stops again.
    model_stops(engine, "a")
    engine.run({"a": TEXT})
    assert (engine.thinking("a"), tr.state.think_tokens) == (False, 2)


def test_a_force_that_comes_too_late() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.open("b")
    engine.run({"a": END, "b": TEXT})
    engine.accept(message(forces=[force(1, 0), force(2, 1)]))
    # The token of b's last step is still under way (asynchronous scheduling), and it ends thinking.
    engine.feed("b", [END])
    engine.take()
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY], 2: [Outcome.ENDED_NATURALLY]}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tier_waits_for_blocks_that_a_connector_keeps(frozen: bool) -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(tier(1, Tier.UNREACHABLE))
    engine.finish("a", keeps_blocks=True)
    engine.take()
    assert engine.outcomes == {}
    if frozen:
        engine.directives.freeze()
    engine.free("a")
    engine.take()
    assert engine.outcomes == {1: [Outcome.AGENT_OFF if frozen else Outcome.APPLIED]}
    assert not engine.tracker.unfreed


def test_a_rank_belongs_to_the_phase_it_was_decided_in() -> None:
    """After thinking has ended, the answer's rank comes from its phase, until a plan that knows of the answer says
    otherwise."""
    engine = FakeEngine()
    tr = engine.open("a")
    before = engine.run({"a": TEXT}).step
    engine.accept(message(before, plan=plan(1, slot=[0], rank=[540])))
    assert tr.effective_rank == 540
    ended = engine.run({"a": END}).step
    assert tr.effective_rank == PHASE_RANK[Phase.OUTPUT]
    engine.accept(message(before, plan=plan(2, slot=[0], rank=[541])))
    assert tr.effective_rank == PHASE_RANK[Phase.OUTPUT]
    engine.accept(message(ended, plan=plan(3, slot=[0], rank=[7])))
    assert tr.effective_rank == 7


def test_plans() -> None:
    engine = FakeEngine()
    a, b = engine.open("a"), engine.open("b")
    assert engine.directives.active_plan() is None
    engine.accept(message(plan=plan(1, slot=[0, 1], rank=[2, 0])))
    engine.accept(message(plan=plan(2, slot=[1], rank=[5], think_per_step=0, max_skip_steps=3, hold_admission=True)))
    active = engine.directives.active_plan()
    assert active is not None
    assert (active.think_per_step, active.max_skip_steps, active.hold_admission) == (0, 3, True)
    assert (a.rank, b.rank) == (2, 5), "a plan has only the ranks that changed"
    engine.directives.active_plan()
    engine.accept(message(plan=plan(3)))
    active = engine.directives.active_plan()
    assert active is not None
    assert active.think_per_step is None
    engine.take()
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED], 3: [Outcome.APPLIED]}


def test_nobody_waits_for_ever_whatever_is_said() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(plan=plan(1, think_per_step=0, max_skip_steps=2**32 - 1)))
    engine.accept(message(probes=[{"decision_id": 2, "slot": 0, "hold_ms": 2**32 - 1}]))
    assert engine.directives.plan is not None
    assert engine.directives.plan.max_skip_steps == MAX_SKIP_STEPS
    ((_, _, _, hold_ms),) = engine.directives.probes
    assert hold_ms == MAX_HOLD_MS


def test_of_a_requests_probes_only_the_newest_waits() -> None:
    engine = FakeEngine()
    for name in ("a", "b"):
        engine.open(name)
    waiting = [{"decision_id": i, "slot": i % 2, "placement": agent_pb2.PLACEMENT_SENTENCE} for i in range(1, 100)]
    engine.accept(message(probes=waiting))
    assert sorted(p[0] for p in engine.directives.probes) == [98, 99]
    engine.take()
    assert engine.outcomes == {i: [Outcome.SUPERSEDED] for i in range(1, 98)}


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [({"shadow": True}, Outcome.SHADOWED), ({"stock": True}, Outcome.APPLIED)],
)
def test_shadowed_and_stock_plans_are_not_obeyed(fields: dict[str, bool], outcome: Outcome) -> None:
    engine = FakeEngine()
    engine.accept(message(plan=plan(1, **fields)))
    assert engine.directives.active_plan() is None
    assert engine.directives.active_plan() is None
    engine.take()
    assert engine.outcomes == {1: [outcome]}


def test_what_ends_thinking_is_refused_while_nobody_knows_the_markers() -> None:
    engine = FakeEngine(NO_MARKERS)
    tr = engine.open("r", own_cap=1)
    engine.accept(
        message(
            forces=[agent_pb2.ForceEnd(decision_id=1, slot=tr.slot)],
            caps=[agent_pb2.ThinkCap(decision_id=2, slot=tr.slot, max_think_tokens=1)],
            probes=[agent_pb2.EatProbe(decision_id=3, slot=tr.slot)],
            tiers=[agent_pb2.TierChange(decision_id=4, slot=tr.slot, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)],
        )
    )
    for _ in range(3):
        engine.schedule()
        assert engine.mask() == {}
        engine.feed("r", [TEXT])
    outcomes = {row[0]: (row[1], row[3]) for row in engine.tracker.record.outcomes}
    assert outcomes == dict.fromkeys((1, 2, 3), (Outcome.REFUSED, NOT_KNOWN))
    assert tr.state.phase is Phase.UNKNOWN


def test_markers_that_are_lost_take_what_needs_them_along() -> None:
    engine = FakeEngine()
    tr = engine.open("r")
    engine.accept(message(caps=[agent_pb2.ThinkCap(decision_id=1, slot=tr.slot, max_think_tokens=2)]))
    engine.accept(message(forces=[agent_pb2.ForceEnd(decision_id=2, slot=tr.slot)]))
    engine.accept(message(probes=[agent_pb2.EatProbe(decision_id=3, slot=tr.slot)]))
    engine.tracker.markers = NO_MARKERS
    engine.directives.lose_markers()
    engine.tracker.reread(tr, replace(tr.state, phase=Phase.UNKNOWN))
    engine.schedule()
    assert engine.mask() == {}
    assert {row[0]: row[1] for row in engine.tracker.record.outcomes} == dict.fromkeys((1, 2, 3), Outcome.REFUSED)


def test_a_plan_that_makes_no_sense_is_refused_and_the_one_in_force_stays() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(plan=plan(1, think_per_step=2)))
    engine.accept(message(plan=plan(2, slot=[0, 1], rank=[3])))
    engine.run({"a": TEXT})
    assert engine.outcomes == {1: [Outcome.APPLIED], 2: [Outcome.REFUSED]}
    assert engine.directives.plan is not None
    assert engine.directives.plan.decision_id == 1


# ------------------------------------------------------------------------------------------- caps and draft rows


def test_the_default_cap_holds_until_the_first_decision() -> None:
    engine = FakeEngine()
    engine.tracker.default_cap = 3
    ended, lifted, shadowed, larger = (engine.open(name) for name in "abcd")
    assert text_until_end(engine, "a") == 3 + 1
    for name in "bcd":
        assert engine.live[name].limit == 3
    engine.accept(message(caps=[cap(1, 0, 3), cap(2, 1, None), cap(3, 2, 3, shadow=True), cap(4, 3, 5)]))
    assert [tr.limit for tr in (lifted, shadowed, larger)] == [None, None, 5]
    engine.accept(message(caps=[cap(5, 3, None)]))
    assert larger.limit is None
    engine.take()
    assert ended.state.think_tokens == 3
    assert engine.outcomes[1] == [Outcome.APPLIED], "thinking had ended at the decision's cap before the decision came"


@pytest.mark.parametrize("newer", [cap(2, 0, None), cap(2, 0, 40), cap(2, 0, 2, shadow=True)])
def test_a_cap_lifted_while_its_ending_is_being_written(newer: agent_pb2.ThinkCap) -> None:
    """The agent never leaves half a marker in the text: it completes the marker, and each decision has one outcome."""
    engine = FakeEngine(TWO)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 2)]))
    for _ in range(3):
        engine.run({"a": TEXT})
    assert tr.ending is not None
    assert tr.ending.position == 1
    engine.accept(message(caps=[newer]))
    engine.run({"a": TEXT})
    assert (engine.thinking("a"), tr.state.think_tokens) == (False, 2)
    engine.finish("a")
    engine.take()
    assert engine.outcomes[1] == [Outcome.APPLIED]
    assert len(engine.outcomes[2]) == 1


def test_a_cap_raised_before_its_ending_was_written() -> None:
    """The old cap's end was prepared for this step, but the step did not reach it, so the new cap counts."""
    engine = FakeEngine(lookahead=2)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 1)]))
    engine.schedule()
    assert engine.mask({"a": [TEXT, TEXT]}) == {"a": {1: END}}
    engine.accept(message(caps=[cap(2, 0, 8)]))
    engine.feed("a", [77])
    engine.take()
    assert tr.ending is None
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 8
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


def test_a_draft_that_ends_thinking_before_the_cap() -> None:
    """If a draft ends thinking before the cap, no second end marker may land in the answer (vLLM #54906)."""
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a", own_cap=2)
    assert engine.directives.forced_tokens(tr, 4, [TEXT, END, TEXT]) == {}
    assert engine.directives.forced_tokens(tr, 4, [TEXT, TEXT, END]) == {2: END}


def test_a_draft_that_only_the_workers_know_may_end_thinking_before_the_cap() -> None:
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a", own_cap=2)
    assert engine.directives.forced_tokens(tr, 4, [-1, -1, -1]) == {}
    assert engine.directives.forced_tokens(tr, 4, [TEXT, -1, -1]) == {}
    engine.feed("a", [TEXT, TEXT])
    assert engine.directives.forced_tokens(tr, 4, [-1, -1, -1]) == {0: END}


drafts_strategy = st.lists(st.sampled_from([TEXT, TEXT, 91, END, START]), max_size=3)


@reaches("an end by the cap")
@given(
    st.integers(0, 12),
    st.sampled_from([MARKERS, TWO]),
    st.lists(
        st.tuples(
            drafts_strategy, st.lists(st.sampled_from([TEXT, TEXT, TEXT, 91, END, 5, 6]), min_size=4, max_size=4)
        ),
        min_size=13,
        max_size=20,
    ),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_caps_are_exact_with_any_drafts(
    limit: int, markers: Markers, steps: list[tuple[list[int], list[int]]], drafts_right: list[bool]
) -> None:
    """The engine yields what the model wanted up to the cap, and one end marker there."""
    engine = FakeEngine(markers, lookahead=3)
    tr = engine.open("a", own_cap=limit)
    yielded: list[int] = []
    for (drafts, wanted), right in zip(steps, drafts_right, strict=False):
        guesses = wanted[: len(drafts)] if right else drafts
        engine.schedule()
        engine.mask({"a": guesses})
        before = tr.state.phase
        tokens = engine.sample("a", wanted, guesses)
        engine.feed("a", tokens)
        engine.take()
        yielded += tokens
        if before is Phase.THINK and tr.state.phase is Phase.THINK and tr.ending is None:
            assert tr.state.think_tokens <= limit
        if not tr.forced and tr.ending is None:
            assert tokens == wanted[: len(tokens)], "no token may differ if none was forced"
        if tr.state.ends:
            # After the first end nothing is forced, unless thinking begins again.
            assert tr.state.ends == 1 or START in yielded
            break
    assert tr.state.think_tokens <= limit + (len(markers.ending) - 1 if tr.ending or not tr.state.ends else 0)
    if tr.forced:
        # The model's last token before the cap may begin the marker; then the agent completes this marker.
        begun = len(markers.end) > 1 and yielded[:limit][-1:] == [markers.end[0]]
        assert tr.state.think_tokens == limit - begun
        reached("an end by the cap")


@pytest.mark.parametrize("by_cap", [True, False])
@pytest.mark.parametrize(("begun", "rest"), [([], [5, 6, 7]), ([5], [6, 7]), ([5, 6], [7]), ([5, 6, 5], [6, 7])])
def test_a_marker_that_the_model_has_begun_is_completed(by_cap: bool, begun: list[int], rest: list[int]) -> None:
    """If the model has begun a marker, a cap or a force completes that marker; its tokens do not count as thinking."""
    engine = FakeEngine(Markers(((START,),), ((5, 6, 7),)))
    tr = engine.open("a", own_cap=2 + len(begun) if by_cap else None)
    for token in [TEXT, TEXT, *begun]:
        engine.run({"a": token})
    if not by_cap:
        engine.accept(message(forces=[force(1, 0)]))
    for _ in rest:
        engine.run({"a": TEXT})
    assert (tr.state.phase, tr.forced) == (Phase.OUTPUT, True)
    assert tr.state.think_tokens == 2 + (begun == [5, 6, 5]) * 2
    engine.run({"a": TEXT})
    assert tr.state.output_tokens == 1
