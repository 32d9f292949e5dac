"""A busy session gives each decision one outcome and agrees with its agent."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.common.enum_names import outcome_name
from meridian_control.common.slices import at_once
from meridian_control.fleet.views import each_request_view
from tests.fakes.tables import policy
from tests.unit.sessions import CALIBRATED, Stream, opens, play, stream

BUDGET_STAGES = fleet_pb2.BudgetStage.values()[1:]


def test_close_settles_what_is_open() -> None:
    made = play(stream(), opens("a"), 1)
    opened = len(made.session.open_decisions)
    at_once(made.session.closing(made.now))
    counted = made.session.totals
    assert (made.session.open_decisions, counted.outcomes["agent_off"]) == ({}, opened)
    assert sum(counted.outcomes.values()) == sum(counted.decisions.values()) > 0


def busy(seed: int) -> Stream:
    """Make 150 random steps with arrivals, aborts, preemptions, operators' ends, new policies and refused settings, and
    with budgets that are used up and refilled."""
    rng, operator, spender = random.Random(seed), random.Random(f"operator {seed}"), random.Random(f"spender {seed}")
    budget = {"name": "b", "tokens_per_day": 1, "soft_think_tokens": 8, "max_think_tokens": 12, "shadow": False}
    made = stream(
        policy(scheduler={"max_think_tokens": 40, "min_think_tokens": 0}, entropy=CALIBRATED, budget=[budget])
    )
    policies = [
        policy(),
        policy(scheduler={"max_think_tokens": 12, "min_think_tokens": 0}, entropy=CALIBRATED, budget=[budget]),
        policy(scheduler={"max_think_tokens": 12, "min_think_tokens": 3, "shadow": True}, kv_memory={"shadow": True}),
        policy(scheduler={"enabled": False}, entropy={"enabled": False}, kv_memory={"enabled": False}),
    ]
    for number in range(150):
        live = list(made.agent.engine.live)
        if rng.random() < 0.5 and len(live) < 8:
            prompt = rng.choice([[1], [1, 2], [40]])
            think, answer = rng.randrange(25), 1 + rng.randrange(10)
            made.open(f"r{number}", think, answer, prompt=prompt, own_cap=rng.choice([None, None, 0, 7]))
        if spender.random() < 0.1:
            made.stages(b=spender.choice(BUDGET_STAGES))
        if live and operator.random() < 0.15:
            made.end(operator.choice(live))
        if live and rng.random() < 0.05:
            made.agent.abort(rng.choice(live))
        elif live and rng.random() < 0.3:
            name = rng.choice(live)
            if made.agent.engine.live[name].preempted or rng.random() < 0.3:
                made.agent.preempt(name, waits=not made.agent.engine.live[name].preempted)
        if number > 50 and rng.random() < 0.08:
            made.agent.refuse_settings = rng.choice(["", "", "bad"])
            made.apply(rng.choice(policies))
        made.agent.step_cost_ms = rng.choice([(5.0, 0.0), (10.0, 8.0)])
        made.agent.eat_nats = rng.choice([0.01, 1.0])
        made.step(then_ms=rng.choice([5, 400]))
        assert made.balanced()
    return made


@pytest.mark.parametrize("seed", range(4))
def test_both_sides_count_alike_and_every_decision_has_one_outcome(seed: int) -> None:
    made = busy(seed)
    live = each_request_view(made.session)
    seen = {r.request_id: (r.slot, int(r.phase), r.think_tokens, r.output_tokens) for r in live}
    assert seen == {
        name: (tr.slot, int(tr.state.phase), tr.state.think_tokens, tr.state.output_tokens)
        for name, tr in made.agent.engine.live.items()
    }
    for name in list(made.agent.engine.live):
        made.agent.abort(name)
    made.step(2)
    assert made.session.open_decisions == {}
    assert made.session.totals.unknown_outcomes == 0
    counted = Counter(outcome_name(outcomes[0]) for outcomes in made.agent.engine.outcomes.values())
    assert made.session.totals.outcomes == counted
    assert all(len(outcomes) == 1 for outcomes in made.agent.engine.outcomes.values())
    assert list(each_request_view(made.session)) == []
    kinds = Counter(made.agent.checker.kinds.values())
    decided = Counter(kind.split("/")[0] for kind in made.session.totals.decisions.elements())
    assert kinds == decided
    assert made.session.totals.decisions["force/operator"]
    assert set(kinds) == {"cap", "force", "plan", "tier", "probe"}
