"""Decisions waiting to be applied: exact caps, and exactly one outcome for every decision, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import (
    ALL_BUT_CAPS,
    CAPS,
    MAX_HOLD_MS,
    MAX_SKIP_STEPS,
    MEMORY,
    NOT_KNOWN,
    ORDER,
    RULES,
    SOFT_CLOSE,
    Outcome,
)
from meridian_agent.core.live_request import PHASE_RANK
from meridian_agent.core.phases import NO_MARKERS, Markers, Phase
from meridian_agent.core.reclaim import Tier
from tests.fakes.engine import END, MARKERS, START, TEXT, FakeEngine

TWO = Markers(((START,),), ((5, 6),))


def message(step: int = 1000, **fields: Any) -> agent_pb2.Directives:
    return agent_pb2.Directives(step=step, **fields)


def cap(decision_id: int, slot: int, tokens: int | None, shadow: bool = False) -> agent_pb2.ThinkCap:
    return agent_pb2.ThinkCap(decision_id=decision_id, slot=slot, max_think_tokens=tokens, shadow=shadow)


def force(decision_id: int, slot: int, shadow: bool = False) -> agent_pb2.ForceEnd:
    return agent_pb2.ForceEnd(decision_id=decision_id, slot=slot, reason=agent_pb2.FORCE_REASON_EAT, shadow=shadow)


def plan(decision_id: int, **fields: Any) -> agent_pb2.DispatchPlan:
    return agent_pb2.DispatchPlan(decision_id=decision_id, **fields)


def text_until_end(engine: FakeEngine, name: str, limit: int = 50) -> int:
    """Steps of a model that never ends thinking by itself, until something else does; returns their number."""
    for count in range(limit):
        if not engine.thinking(name):
            return count
        engine.run({name: TEXT})
    raise AssertionError(f"{name} still thinks after {limit} steps")


def test_values_are_those_of_the_contract() -> None:
    assert {o.name: o.value for o in Outcome} == {
        name.removeprefix("OUTCOME_"): value for name, value in agent_pb2.Outcome.items() if value
    }
    assert SOFT_CLOSE == agent_pb2.FORCE_REASON_SOFT_CLOSE
    assert {t.name: t.value for t in Tier} == {
        name.removeprefix("EVICTION_TIER_"): value for name, value in agent_pb2.EvictionTier.items() if value
    }


# ---------------------------------------------------------------------------------------------------------- targets


def test_a_decision_for_an_unknown_slot_or_an_older_request_of_that_slot() -> None:
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
    assert (tr.cap, tr.ending, tr.tier, tr.rank, engine.directives.probes) == (None, None, None, None, [])
    opened_at = engine.records[-1].step
    engine.accept(message(opened_at, caps=[cap(7, 0, 5)]))
    assert tr.cap is not None


# ------------------------------------------------------------------------------------------------------------- caps


@pytest.mark.parametrize("markers", [MARKERS, TWO], ids=["one token", "two tokens"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_caps_are_exact(markers: Markers, tokens: int) -> None:
    engine = FakeEngine(markers)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, tokens)]))
    steps = text_until_end(engine, "a")
    assert steps == tokens + len(markers.ending)
    assert (tr.state.think_tokens, tr.forced, tr.ending) == (tokens, True, None)
    assert engine.outcomes == {1: [Outcome.APPLIED]}
    assert engine.records[-1].outcomes[0][2] == tokens
    engine.run({"a": TEXT})
    assert tr.state.output_tokens == 1


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_requests_own_cap_needs_no_decision(tokens: int) -> None:
    engine = FakeEngine()
    tr = engine.open("a", own_cap=tokens)
    text_until_end(engine, "a")
    assert (tr.state.think_tokens, tr.forced) == (tokens, True)
    assert engine.outcomes == {}


def test_the_own_cap_is_enforced_before_a_larger_one() -> None:
    engine = FakeEngine()
    tr = engine.open("a", own_cap=2)
    engine.accept(message(caps=[cap(1, 0, 5)]))
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 2
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}


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
    assert engine.outcomes[1] == [Outcome.APPLIED], "ended by what the decision says, before it came"


def test_an_ending_that_comes_before_the_cap() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 5)]))
    for token in (TEXT, TEXT, END, TEXT):
        engine.run({"a": token})
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}
    assert not tr.forced
    # The cap outlives its outcome: it holds for thinking that is entered again, over all of it.
    for token in (START, TEXT, TEXT, TEXT):
        engine.run({"a": token})
    assert text_until_end(engine, "a") == 1
    assert (tr.state.think_tokens, tr.forced, engine.outcomes) == (5, True, {1: [Outcome.ENDED_NATURALLY]})


def test_a_cap_that_comes_after_thinking_still_holds_for_re_entry() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.run({"a": END})
    engine.accept(message(caps=[cap(1, 0, 1)]))
    engine.run({"a": START})
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 1


def test_a_cap_on_a_request_that_never_thinks() -> None:
    engine = FakeEngine()
    engine.open("a", prompt=[])
    engine.accept(message(caps=[cap(1, 0, 0)]))
    engine.run({"a": TEXT})
    assert engine.outcomes == {}
    engine.finish("a")
    engine.take()
    assert engine.outcomes == {1: [Outcome.REQUEST_GONE]}


def test_lifting_a_cap() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 3)]))
    engine.run({"a": TEXT})
    engine.accept(message(caps=[cap(2, 0, None)]))
    for _ in range(5):
        engine.run({"a": TEXT})
    assert engine.thinking("a")
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


def test_nobody_looks_for_a_lifted_cap() -> None:
    """As long as a request is due, no step of its batch is noted as a whole."""
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 2)]))
    engine.run({"a": TEXT})
    engine.accept(message(caps=[cap(2, 0, None)]))
    for _ in range(3):
        engine.run({"a": TEXT})
    assert engine.tracker.due == {}


def test_a_newer_cap_supersedes() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 3)]))
    engine.run({"a": TEXT})
    engine.accept(message(caps=[cap(2, 0, 6), cap(3, 0, 5)]))
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 5
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.SUPERSEDED], 3: [Outcome.APPLIED]}


@pytest.mark.parametrize("newer", [cap(2, 0, None), cap(2, 0, 40), cap(2, 0, 2, shadow=True)])
def test_a_cap_lifted_while_its_ending_is_being_written(newer: agent_pb2.ThinkCap) -> None:
    """Half a marker is never left in the text: the ending is finished, and each decision has one outcome."""
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
    """The old cap's ending was decided for this step, the step did not reach it: the new cap counts."""
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


# ------------------------------------------------------------------------------------------------------- draft rows


def test_draft_rows() -> None:
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 5)]))
    engine.schedule()
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {}, "five tokens are allowed, four rows come"
    assert engine.directives.forced_tokens(tr, 6, [TEXT] * 5) == {5: END}
    engine.feed("a", [TEXT, TEXT])
    assert tr.ending is None, "the row was not reached"
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {3: END}
    engine.feed("a", [TEXT, TEXT, TEXT, END])
    engine.take()
    assert (tr.state.think_tokens, tr.forced) == (5, True)
    assert engine.outcomes == {1: [Outcome.APPLIED]}


def test_the_row_after_the_last_allowed_token_is_reached_but_not_taken() -> None:
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a", own_cap=2)
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {2: END}
    engine.feed("a", [TEXT, TEXT])
    assert tr.ending is not None
    assert engine.directives.forced_tokens(tr, 4) == {0: END}
    engine.feed("a", [END, TEXT])
    assert (tr.state.think_tokens, tr.state.output_tokens) == (2, 1)


def test_two_token_endings_over_draft_rows() -> None:
    engine = FakeEngine(TWO, lookahead=3)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 1)]))
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {1: 5, 2: 6}
    engine.feed("a", [TEXT, 5])
    assert engine.directives.forced_tokens(tr, 4) == {0: 6}
    engine.feed("a", [6, TEXT, TEXT])
    engine.take()
    assert (tr.state.think_tokens, tr.state.output_tokens) == (1, 2)
    assert engine.outcomes == {1: [Outcome.APPLIED]}


def test_a_draft_that_ends_thinking_before_the_cap() -> None:
    """No second end marker may land in the answer (vLLM #54906)."""
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


@given(
    st.integers(0, 12),
    st.sampled_from([MARKERS, TWO]),
    st.lists(
        st.tuples(
            drafts_strategy, st.lists(st.sampled_from([TEXT, TEXT, TEXT, 91, END, 5, 6]), min_size=4, max_size=4)
        ),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_caps_are_exact_with_any_drafts(
    limit: int, markers: Markers, steps: list[tuple[list[int], list[int]]], drafts_right: list[bool]
) -> None:
    """What is yielded equals what the model wanted, up to the cap; there the end marker stands, once."""
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
            assert tokens == wanted[: len(tokens)], "nothing was forced, nothing may differ"
        if tr.state.ends:
            # Past the first end nothing is forced unless thinking is entered again.
            assert tr.state.ends == 1 or START in yielded
            break
    assert tr.state.think_tokens <= limit + (len(markers.ending) - 1 if tr.ending or not tr.state.ends else 0)
    if tr.forced:
        # The model's last token before the cap may begin the marker, which is completed then.
        begun = len(markers.end) > 1 and yielded[:limit][-1:] == [markers.end[0]]
        assert tr.state.think_tokens == limit - begun


@pytest.mark.parametrize("by_cap", [True, False])
@pytest.mark.parametrize(("begun", "rest"), [([], [5, 6, 7]), ([5], [6, 7]), ([5, 6], [7]), ([5, 6, 5], [6, 7])])
def test_a_marker_that_the_model_has_begun_is_completed(by_cap: bool, begun: list[int], rest: list[int]) -> None:
    """By a cap that falls into it and by a force: no second beginning, and the first is no thinking."""
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


# --------------------------------------------------------------------------------------------------------- shadowed


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_shadowed_cap_is_reported_when_it_would_act_and_changes_nothing(tokens: int) -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, tokens, shadow=True)]))
    for _ in range(6):
        engine.run({"a": TEXT})
    assert engine.thinking("a")
    assert not tr.forced
    assert engine.outcomes == {1: [Outcome.SHADOWED]}
    (reported,) = [o for record in engine.records for o in record.outcomes]
    assert reported[2] == max(1, tokens)


def test_a_shadowed_cap_that_is_not_reached() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 4, shadow=True)]))
    for token in (TEXT, TEXT, END, TEXT):
        engine.run({"a": token})
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}


def test_a_shadowed_cap_says_nothing_of_a_request_that_never_thinks() -> None:
    engine = FakeEngine()
    engine.open("a", prompt=[])
    engine.accept(message(caps=[cap(1, 0, 0, shadow=True)]))
    engine.run({"a": TEXT})
    engine.run({"a": TEXT})
    assert engine.outcomes == {}


def test_a_shadowed_force() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.accept(message(forces=[force(1, 0, shadow=True)]))
    engine.run({"a": TEXT})
    assert engine.outcomes == {1: [Outcome.SHADOWED]}
    assert (tr.ending, engine.thinking("a")) == (None, True)


# ----------------------------------------------------------------------------------------------------------- forces


@pytest.mark.parametrize("markers", [MARKERS, TWO], ids=["one token", "two tokens"])
def test_a_force_ends_thinking_now(markers: Markers) -> None:
    engine = FakeEngine(markers)
    tr = engine.open("a")
    engine.run({"a": TEXT})
    engine.accept(message(forces=[force(1, 0)]))
    assert text_until_end(engine, "a") == len(markers.ending)
    assert (tr.state.think_tokens, tr.forced) == (1, True)
    assert engine.outcomes == {1: [Outcome.APPLIED]}


def test_a_force_that_comes_too_late() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.open("b")
    engine.run({"a": END, "b": TEXT})
    engine.accept(message(forces=[force(1, 0), force(2, 1)]))
    # b's token of the step before is still on its way (asynchronous scheduling), and ends thinking.
    engine.feed("b", [END])
    engine.take()
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY], 2: [Outcome.ENDED_NATURALLY]}


def test_a_second_force_is_superseded_by_the_one_under_way() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(forces=[force(1, 0), force(2, 0)]))
    text_until_end(engine, "a")
    assert engine.outcomes == {1: [Outcome.APPLIED], 2: [Outcome.SUPERSEDED]}


def test_a_force_settles_the_cap_too() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 9)], forces=[force(2, 0)]))
    text_until_end(engine, "a")
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


def test_a_request_that_goes_takes_its_decisions_along() -> None:
    engine = FakeEngine()
    engine.open("a")
    directives = message(caps=[cap(1, 0, 9)], forces=[force(2, 0)], probes=[{"decision_id": 3, "slot": 0}])
    directives.tiers.add(decision_id=4, slot=0, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    engine.accept(directives)
    engine.abort("a")
    engine.take()
    assert engine.outcomes == {i: [Outcome.REQUEST_GONE] for i in (1, 2, 3, 4)}


# ------------------------------------------------------------------------------------------------------------ plans


def test_a_rank_belongs_to_the_phase_it_was_decided_in() -> None:
    """Once thinking has ended the answer goes by its phase, until a plan that knows of the answer says otherwise."""
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
    assert (a.rank, b.rank) == (2, 5), "only what changed is sent"
    engine.directives.active_plan()
    engine.accept(message(plan=plan(3)))
    active = engine.directives.active_plan()
    assert active is not None
    assert active.think_per_step is None
    engine.take()
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED], 3: [Outcome.APPLIED]}


def test_a_plan_that_makes_no_sense_is_refused_and_the_one_in_force_stays() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(plan=plan(1, think_per_step=2)))
    engine.accept(message(plan=plan(2, slot=[0, 1], rank=[3])))
    engine.run({"a": TEXT})
    assert engine.outcomes == {1: [Outcome.APPLIED], 2: [Outcome.REFUSED]}
    assert engine.directives.plan is not None
    assert engine.directives.plan.decision_id == 1


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


def test_tiers() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    for decision_id, tier in ((1, Tier.UNREACHABLE), (2, Tier.REUSABLE)):
        directives = message()
        directives.tiers.add(decision_id=decision_id, slot=0, tier=int(tier))
        engine.accept(directives)
    assert tr.tier == (2, Tier.REUSABLE, False)
    engine.finish("a")
    engine.take()
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


# -------------------------------------------------------------------------------------------- lease loss, new stream


def everything(engine: FakeEngine) -> None:
    """One decision of each kind, none of them applied yet: 1 cap, 2 force (on b), 3 probe, 4 tier, 5 plan."""
    directives = message(
        caps=[cap(1, 0, 4)],
        forces=[force(2, 1)],
        probes=[{"decision_id": 3, "slot": 0}],
        plan=plan(5, slot=[0, 1], rank=[3, 3], think_per_step=1),
    )
    directives.tiers.add(decision_id=4, slot=0, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    engine.accept(directives)


def test_past_the_lease_only_caps_are_kept() -> None:
    engine = FakeEngine()
    a, b = engine.open("a"), engine.open("b")
    everything(engine)
    engine.directives.drop(ALL_BUT_CAPS)
    engine.take()
    assert engine.outcomes == {i: [Outcome.AGENT_OFF] for i in (2, 3, 4, 5)}
    assert engine.directives.active_plan() is None
    assert (a.rank, b.rank, a.tier, b.ending, engine.directives.probes) == (None, None, None, None, [])
    for _ in range(5):
        engine.run({"a": TEXT, "b": TEXT})
    assert (a.state.think_tokens, engine.thinking("a"), engine.thinking("b")) == (4, False, True)
    assert engine.outcomes[1] == [Outcome.APPLIED]


@pytest.mark.parametrize(
    ("parts", "dropped"),
    [(ORDER, [5]), (CAPS, [1]), (RULES, [2, 3]), (MEMORY, [4]), (ORDER | CAPS, [1, 5])],
)
def test_a_section_ends_alone(parts: int, dropped: list[int]) -> None:
    """What the other sections decided goes on."""
    engine = FakeEngine()
    a, b = engine.open("a"), engine.open("b")
    everything(engine)
    engine.directives.drop(parts)
    engine.take()
    assert engine.outcomes == {i: [Outcome.AGENT_OFF] for i in dropped}
    assert (a.rank is None) == (engine.directives.active_plan() is None) == (5 in dropped)
    assert (a.cap is None, b.ending is None, a.tier is None) == (1 in dropped, 2 in dropped, 4 in dropped)
    assert (not engine.directives.probes) == (3 in dropped)


def test_a_soft_close_ends_with_the_order() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    soft = agent_pb2.ForceEnd(decision_id=1, slot=0, reason=agent_pb2.FORCE_REASON_SOFT_CLOSE)
    engine.accept(message(forces=[soft]))
    engine.directives.drop(RULES)
    assert tr.ending is not None
    engine.directives.drop(ORDER)
    assert tr.ending is None


def test_order_and_admission_end_apart() -> None:
    """They are one plan: what is left of it goes on."""
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(plan=plan(1, hold_admission=True, think_per_step=1)))
    engine.directives.drop(ORDER)
    assert engine.directives.hold_admission
    assert engine.directives.active_plan() is None
    engine.directives.drop(MEMORY)
    assert not engine.directives.hold_admission
    engine.accept(message(plan=plan(2, hold_admission=True, think_per_step=1)))
    engine.directives.drop(MEMORY)
    assert engine.directives.active_plan() is not None
    assert not engine.directives.hold_admission
    engine.take()
    assert engine.outcomes == {1: [Outcome.APPLIED], 2: [Outcome.APPLIED]}


@pytest.mark.parametrize("own_cap", [None, 6])
def test_past_a_lease_of_the_schedulers_only_the_requests_own_cap_is_left(own_cap: int | None) -> None:
    engine = FakeEngine()
    engine.tracker.default_cap = 3
    a, b = engine.open("a", own_cap=own_cap), engine.open("b", own_cap=own_cap)
    engine.accept(message(caps=[cap(1, 0, 4)]))
    engine.directives.drop(CAPS)
    assert (a.limit, b.limit) == (own_cap, own_cap)
    for _ in range(10):
        engine.run({"a": TEXT, "b": TEXT})
    assert engine.thinking("a") is engine.thinking("b") is (own_cap is None)
    assert a.state.think_tokens == b.state.think_tokens == (own_cap or 10)
    assert engine.outcomes == {1: [Outcome.AGENT_OFF]}


@pytest.mark.parametrize("begun", [False, True])
def test_a_freeze_ends_everything_at_once(begun: bool) -> None:
    """An ending that has begun, too; the caps hold again afterwards, and no decision has a second outcome."""
    engine = FakeEngine(TWO)
    a = engine.open("a")
    b = engine.open("b")
    everything(engine)
    if begun:
        engine.run({"a": TEXT, "b": TEXT})
        assert b.ending is not None
        assert b.ending.position == 1
    engine.directives.freeze()
    engine.take()
    assert {i: o for i, o in engine.outcomes.items() if i != 3} == {
        1: [Outcome.AGENT_OFF],
        2: [Outcome.AGENT_OFF],
        4: [Outcome.AGENT_OFF],
        5: [Outcome.APPLIED if begun else Outcome.AGENT_OFF],
    }
    assert (a.rank, b.ending, a.tier, engine.directives.plan) == (None, None, None, None)
    assert not b.expected
    while engine.thinking("a"):
        engine.run({"a": TEXT, "b": TEXT})
        assert engine.thinking("b")
    assert a.state.think_tokens == 4
    assert all(len(outcomes) == 1 for outcomes in engine.outcomes.values())


def test_a_marker_half_written_is_finished_past_the_lease() -> None:
    for begin in ("written", "in a mask"):
        engine = FakeEngine(TWO)
        engine.open("a")
        engine.accept(message(forces=[force(1, 0)]))
        engine.schedule()
        engine.mask()
        if begin == "in a mask":
            engine.directives.drop(ALL_BUT_CAPS)
        engine.feed("a", [5])
        if begin == "written":
            engine.directives.drop(ALL_BUT_CAPS)
        engine.run({"a": TEXT})
        assert not engine.thinking("a")
        assert engine.outcomes == {1: [Outcome.APPLIED]}


def test_a_new_stream_keeps_caps_and_owes_nothing() -> None:
    engine = FakeEngine()
    a, b = engine.open("a"), engine.open("b")
    everything(engine)
    engine.directives.report(77, Outcome.REFUSED)
    engine.directives.new_stream()
    # Decision 1 is another one now.
    engine.accept(message(plan=plan(1)))
    for _ in range(5):
        engine.run({"a": TEXT, "b": TEXT})
    assert (a.state.think_tokens, engine.thinking("a"), b.ending, engine.thinking("b")) == (4, False, None, True)
    assert engine.outcomes == {1: [Outcome.APPLIED]}
    engine.finish("a")
    engine.finish("b")
    engine.take()
    assert engine.outcomes == {1: [Outcome.APPLIED]}


# --------------------------------------------------------------------------------------------- one outcome, always


class OneOutcome(RuleBasedStateMachine):
    """Random requests, tokens and decisions, with tokens and messages in any order asynchronous scheduling allows."""

    @initialize(two=st.booleans())
    def begin(self, two: bool) -> None:
        self.markers = TWO if two else MARKERS
        self.engine = FakeEngine(self.markers, lookahead=3)
        self.last_id = self.opened = 0
        self.drafts: dict[str, list[int]] = {}
        self.forgotten: set[int] = set()

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    @property
    def now(self) -> int:
        return max(1, self.engine.tracker._last_step)

    @precondition(lambda self: len(self.engine.live) < 4)
    @rule(prompt=st.sampled_from([(), (START,), (START,)]), own_cap=st.sampled_from([None, None, 0, 3]))
    def open(self, prompt: tuple[int, ...], own_cap: int | None) -> None:
        self.opened += 1
        self.engine.open(str(self.opened), prompt, own_cap)

    @precondition(lambda self: self.engine.live)
    @rule(which=st.integers(0, 9), aborted=st.booleans())
    def close(self, which: int, aborted: bool) -> None:
        name = sorted(self.engine.live)[which % len(self.engine.live)]
        (self.engine.abort if aborted else self.engine.finish)(name)

    @rule(drafts=st.lists(st.sampled_from([TEXT, END, START, 5, 6]), max_size=3))
    def schedule_and_mask(self, drafts: list[int]) -> None:
        self.engine.schedule()
        self.drafts = dict.fromkeys(self.engine.live, drafts)
        self.engine.mask(self.drafts)

    @rule(wanted=st.lists(st.sampled_from([TEXT, TEXT, TEXT, END, START, 5, 6]), min_size=4, max_size=4))
    def update(self, wanted: list[int]) -> None:
        for name in list(self.engine.live):
            self.engine.feed(name, self.engine.sample(name, wanted, self.drafts.get(name, ())))
        self.engine.take()
        self.drafts = {}
        self.engine._masks = {}

    @rule(slot=st.integers(0, 4), tokens=st.sampled_from([None, 0, 1, 3, 6]), shadow=st.booleans(), old=st.booleans())
    def send_cap(self, slot: int, tokens: int | None, shadow: bool, old: bool) -> None:
        step = self.now - 1 if old else self.now + 1
        self.engine.accept(message(step, caps=[cap(self.new_id(), slot, tokens, shadow)]))

    @rule(slot=st.integers(0, 4), shadow=st.booleans())
    def send_force(self, slot: int, shadow: bool) -> None:
        self.engine.accept(message(forces=[force(self.new_id(), slot, shadow)]))

    @rule(slot=st.integers(0, 4))
    def send_probe(self, slot: int) -> None:
        self.engine.accept(message(probes=[{"decision_id": self.new_id(), "slot": slot}]))

    @rule(slot=st.integers(0, 4), tier=st.sampled_from(Tier), shadow=st.booleans())
    def send_tier(self, slot: int, tier: Tier, shadow: bool) -> None:
        directives = message()
        directives.tiers.add(decision_id=self.new_id(), slot=slot, tier=int(tier), shadow=shadow)
        self.engine.accept(directives)

    @rule(slots=st.lists(st.integers(0, 4), unique=True), flag=st.sampled_from(["", "shadow", "stock"]))
    def send_plan(self, slots: list[int], flag: str) -> None:
        fields = {flag: True} if flag else {}
        self.engine.accept(message(plan=plan(self.new_id(), slot=slots, rank=[1] * len(slots), **fields)))

    @rule(parts=st.sampled_from([ALL_BUT_CAPS, ORDER, CAPS, RULES, MEMORY, ORDER | CAPS]))
    def lose_a_lease(self, parts: int) -> None:
        self.engine.directives.drop(parts)

    @rule()
    def freeze(self) -> None:
        self.engine.directives.freeze()

    @rule()
    def new_stream(self) -> None:
        """All that was decided so far is settled by the control plane itself; ids go on, so that a mix-up shows."""
        self.engine.take()
        self.forgotten = set(range(1, self.last_id + 1))
        self.reported_before = {i: list(o) for i, o in self.engine.outcomes.items()}
        self.engine.directives.new_stream()

    @invariant()
    def never_two(self) -> None:
        if hasattr(self, "engine"):
            assert [i for i, outcomes in self.engine.outcomes.items() if len(outcomes) > 1] == []
            assert set(self.engine.outcomes) <= set(range(1, self.last_id + 1))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.engine.live):
            self.engine.abort(name)
        self.engine.schedule()
        self.engine.take()
        self.never_two()
        assert set(range(1, self.last_id + 1)) - set(self.engine.outcomes) <= self.forgotten
        for decision_id in self.forgotten:
            assert self.engine.outcomes.get(decision_id) == self.reported_before.get(decision_id), "of an old stream"


TestOneOutcome = OneOutcome.TestCase
TestOneOutcome.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ------------------------------------------------------------------------------------------------ markers not known


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
