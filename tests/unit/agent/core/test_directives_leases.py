"""The decisions that a lost lease, a freeze or a new stream ends, and those that stay in force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, OTHER_ENDS, RULES, Directives
from meridian_agent.core.step_record import Outcome
from tests.fakes.engine import END, TEXT, FakeEngine
from tests.unit.directive_messages import TWO, cap, force, message, plan


def everything(engine: FakeEngine) -> None:
    """Send one decision of each kind, none of them applied yet: 1 cap, 2 force (on b), 3 probe, 4 tier, 5 plan."""
    directives = message(
        caps=[cap(1, 0, 4)],
        forces=[force(2, 1)],
        probes=[{"decision_id": 3, "slot": 0}],
        plan=plan(5, slot=[0, 1], rank=[3, 3], think_per_step=1),
    )
    directives.tiers.add(decision_id=4, slot=0, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)
    engine.accept(directives)


@pytest.mark.parametrize(
    ("parts", "dropped"),
    [
        (ORDER, [5]),
        (CAPS, [1]),
        (RULES, [2, 3]),
        (MEMORY, [4]),
        (ORDER | CAPS, [1, 5]),
        (ALL_BUT_CAPS, [2, 3, 4, 5]),
    ],
)
def test_what_a_lease_ends_and_nothing_else(parts: int, dropped: list[int]) -> None:
    """When one section's decisions end, the decisions of the other sections stay in force."""
    engine = FakeEngine()
    a, b = engine.open("a"), engine.open("b")
    everything(engine)
    engine.directives.drop(parts)
    engine.take()
    assert engine.outcomes == {i: [Outcome.AGENT_OFF] for i in dropped}
    assert (a.rank is None) == (b.rank is None) == (engine.directives.active_plan() is None) == (5 in dropped)
    assert (a.cap is None, b.ending is None, a.tier is None) == (1 in dropped, 2 in dropped, 4 in dropped)
    assert (not engine.directives.probes) == (3 in dropped)
    for _ in range(5):
        engine.run({"a": TEXT, "b": TEXT})
    assert (engine.thinking("a"), engine.thinking("b")) == (1 in dropped, 2 in dropped)
    assert a.state.think_tokens == (5 if 1 in dropped else 4)


@pytest.mark.parametrize(
    ("reason", "kept_by", "ended_by"),
    [
        (agent_pb2.FORCE_REASON_SOFT_CLOSE, CAPS | RULES | MEMORY, ORDER),
        (agent_pb2.FORCE_REASON_EAT, ORDER | CAPS | MEMORY, RULES),
        (agent_pb2.FORCE_REASON_OPERATOR, ORDER | CAPS | RULES | MEMORY, OTHER_ENDS),
        # These sections have no lease of their own.
        (agent_pb2.FORCE_REASON_LOOP, ORDER | CAPS | RULES | MEMORY, OTHER_ENDS),
        (agent_pb2.FORCE_REASON_EXTENSION, ORDER | CAPS | RULES | MEMORY, OTHER_ENDS),
        # A newer control plane's reason belongs to the rules.
        (99, ORDER | CAPS | MEMORY, RULES),
    ],
)
@pytest.mark.parametrize("how", ["kept", "a section's lease", "the lease", "a freeze"])
def test_a_forced_end_belongs_to_the_part_of_its_reason(reason: int, kept_by: int, ended_by: int, how: str) -> None:
    engine = FakeEngine()
    engine.open("a")
    sent = agent_pb2.ForceEnd(decision_id=1, slot=0)
    sent.reason = agent_pb2.ForceReason.ValueType(reason)
    engine.accept(message(forces=[agent_pb2.ForceEnd.FromString(sent.SerializeToString())]))
    engine.directives.drop(kept_by)
    if how == "a freeze":
        engine.directives.freeze()
    elif how != "kept":
        engine.directives.drop(ended_by if how == "a section's lease" else ALL_BUT_CAPS)
    engine.run({"a": TEXT})
    assert engine.thinking("a") == (how != "kept")
    assert engine.outcomes == {1: [Outcome.APPLIED if how == "kept" else Outcome.AGENT_OFF]}


def test_order_and_admission_end_apart() -> None:
    """Order and admission belong to one plan; when one of the two ends, the other stays in force."""
    engine = FakeEngine()
    engine.open("a")
    for number, (dropped, holds, orders) in enumerate(((ORDER, True, False), (MEMORY, False, True)), 1):
        engine.accept(message(plan=plan(number, hold_admission=True, think_per_step=1)))
        engine.directives.drop(dropped)
        assert engine.directives.hold_admission == holds
        assert (engine.directives.active_plan() is not None) == orders
    engine.directives.drop(ORDER | MEMORY)
    assert engine.directives.plan is None
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
    """A freeze also ends an ending that has begun. The caps hold again afterwards, and no decision has a second
    outcome."""
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


@pytest.mark.parametrize("voids", [Directives.freeze, Directives.new_stream])
@pytest.mark.parametrize("natural", [False, True])
def test_the_next_decision_is_the_one_that_a_kept_cap_carries_out(
    voids: Callable[[Directives], None], natural: bool
) -> None:
    """The cap from before the freeze or the stream ends thinking before the cap that is decided then has come."""
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 4)]))
    voids(engine.directives)
    for _ in range(2 if natural else 5):
        engine.run({"a": TEXT})
    engine.run({"a": END})
    engine.accept(message(caps=[cap(8, 0, 4)]))
    engine.take()
    assert engine.outcomes[8] == [Outcome.ENDED_NATURALLY if natural else Outcome.APPLIED]


def test_a_new_stream_keeps_caps_and_owes_nothing() -> None:
    engine = FakeEngine()
    a, b = engine.open("a"), engine.open("b")
    everything(engine)
    engine.directives.report(77, Outcome.REFUSED)
    engine.directives.new_stream()
    # On the new stream, id 1 belongs to another decision.
    engine.accept(message(plan=plan(1)))
    for _ in range(5):
        engine.run({"a": TEXT, "b": TEXT})
    assert (a.state.think_tokens, engine.thinking("a"), b.ending, engine.thinking("b")) == (4, False, None, True)
    assert engine.outcomes == {1: [Outcome.APPLIED]}
    engine.finish("a")
    engine.finish("b")
    engine.take()
    assert engine.outcomes == {1: [Outcome.APPLIED]}
