"""Decisions waiting to be applied: forces, shadowed decisions, plans and tiers, each with exactly one outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import MAX_SKIP_STEPS, MAX_WAIT_STEPS
from meridian_agent.core.live_request import PHASE_RANK
from meridian_agent.core.phases import NO_MARKERS, Markers, Phase
from meridian_agent.core.probe_admission import MAX_HOLD_MS
from meridian_agent.core.sentences import TokenText, table_of
from meridian_agent.core.step_record import NOT_KNOWN, Outcome, Tier
from tests.fakes.engine import END, MARKERS, TEXT, FakeEngine
from tests.unit.directive_messages import TWO, cap, force, message, plan, text_until_end


def test_values_are_those_of_the_contract() -> None:
    assert {o.name: o.value for o in Outcome} == {
        name.removeprefix("OUTCOME_"): value for name, value in agent_pb2.Outcome.items() if value
    }
    assert {t.name: t.value for t in Tier} == {
        name.removeprefix("EVICTION_TIER_"): value for name, value in agent_pb2.EvictionTier.items() if value
    }


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
    assert engine.outcomes == {**{i: [Outcome.REQUEST_GONE] for i in (1, 2, 3)}, 4: [Outcome.APPLIED]}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tier_waits_for_blocks_that_a_connector_keeps(frozen: bool) -> None:
    engine = FakeEngine()
    engine.open("a")
    directives = message()
    directives.tiers.add(decision_id=1, slot=0, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    engine.accept(directives)
    engine.finish("a", keeps_blocks=True)
    engine.take()
    assert engine.outcomes == {}
    if frozen:
        engine.directives.freeze()
    engine.free("a")
    engine.take()
    assert engine.outcomes == {1: [Outcome.AGENT_OFF if frozen else Outcome.APPLIED]}
    assert not engine.tracker.unfreed


# ------------------------------------------------------------------------------------------------------------ plans


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
