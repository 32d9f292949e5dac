"""Dispatch order and share: each strategy, each policy field's effect, and that only changes are sent."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.live_request import PHASE_RANK
from meridian_agent.core.phases import Phase
from meridian_control.capabilities.order.rule import (
    HEADROOM,
    MAX_SLACK_MS,
    READING_MS,
    STRETCH,
    SUNK_TOKENS,
    THINK_BUDGETS,
    USUAL_MS,
    Budgets,
    Share,
    budgets,
    changed_ranks,
    ranks,
    share,
)
from meridian_control.common.table_columns import UNTOLD
from meridian_control.engine.request_table import OUTPUT, PROMPT, THINK, RequestTable
from meridian_control.engine.step_cost import WARM_STEPS, StepCost
from meridian_control.policy.schema import SchedulerPolicy
from tests.fakes.tables import answering, table, thinking
from tests.reached import reached, reaches

# Budgets that fit the step times below.
GIVEN = {"output_tpot_budget_ms": 20.0, "think_tpot_budget_ms": 80.0, "min_prefill_tokens": 128}


def scheduler(**fields: Any) -> SchedulerPolicy:
    return SchedulerPolicy.model_validate({**GIVEN, **fields})


POLICY = scheduler()


def cost(a: float, b: float, c: float, steps: int = 400, noise: float = 0.0) -> StepCost:
    """Return a cost model that has learnt from steps of this cost."""
    rng, made = random.Random(0), StepCost()
    for _ in range(steps):
        sequences, prefill = rng.randint(1, 64), rng.choice([0, 0, 0, 100, 700])
        made.add_step_time(sequences, prefill, (a + b * sequences + c * prefill) * (1 + noise * rng.uniform(-1, 1)))
    return made


# ------------------------------------------------------------------------------------------------------------- order


def stated(policy: SchedulerPolicy) -> Budgets:
    return Budgets(policy.output_tpot_budget_ms, policy.think_tpot_budget_ms, True)


def order(policy: SchedulerPolicy, *rows: dict[str, Any], now_ms: float = 0.0) -> list[int]:
    """Return the slots, most urgent first."""
    return [int(s) for s in np.argsort(ranks(policy, table(*rows), stated(policy), now_ms)[: len(rows)], kind="stable")]


def test_output_first() -> None:
    assert order(POLICY, {"phase": 0}, {"phase": PROMPT}, thinking(), answering()) == [3, 0, 1, 2]


def test_thinking_with_the_least_sunk_cost_is_the_first_victim() -> None:
    rows = [thinking(think_tokens=n, prompt_tokens=p) for n, p in ((10, 0), (0, 4000), (500, 20))]
    assert order(POLICY, *rows) == [1, 2, 0]


def test_deadline_orders_by_slack_and_begins_with_first_answer_tokens() -> None:
    policy = scheduler(strategy="deadline", output_tpot_budget_ms=20, think_tpot_budget_ms=80)
    late_think, think = thinking(token_ms=930), thinking(token_ms=995)
    answer, first = answering(token_ms=990, output_tokens=5), answering(token_ms=999)
    assert order(policy, think, late_think, answer, first, now_ms=1000) == [3, 1, 2, 0]
    assert ranks(policy, table(thinking(token_ms=1e9)), stated(policy), 0)[0] == 1 + MAX_SLACK_MS


def test_reasoning_first_demotes_long_thinkers() -> None:
    policy = scheduler(strategy="reasoning_first", long_think_tokens=1000)
    rows = [answering(), {"phase": PROMPT}, thinking(think_tokens=1000), thinking(think_tokens=999)]
    assert order(policy, *rows) == [3, 1, 0, 2]


def told(made: RequestTable, policy: SchedulerPolicy = POLICY) -> dict[int, int]:
    """Return the ranks that a plan has by slot, and note the ranks of all requests."""
    slots, ranked = changed_ranks(policy, made, stated(policy), 0.0)
    made.set_ranks(ranked)
    return dict(zip(slots.tolist(), ranked[slots].tolist(), strict=True))


def test_only_changes_are_told() -> None:
    made = table(thinking(), answering(), thinking())
    made.forget_ranks()
    assert (made.rank[:3] == UNTOLD).all()
    assert told(made) == {0: 544, 1: 0, 2: 544}
    assert told(made) == {}
    made.think_tokens[0] = 2 * SUNK_TOKENS
    made.close(1)
    assert told(made) == {0: 543}
    made.forget_ranks()
    assert told(made) == {0: 543, 2: 544}


def test_the_ranks_of_phases_are_told_only_in_place_of_other_ranks() -> None:
    """The agent ranks a request by its phase, from its beginning and from each change of its phase on."""
    made = table({"phase": PROMPT}, thinking(), thinking(think_tokens=2 * SUNK_TOKENS))
    assert told(made) == {2: 543}
    made.phase[:3] = THINK, OUTPUT, OUTPUT
    assert told(made) == {}
    assert made.rank[:3].tolist() == [544, 0, 0]
    made.phase[2], made.think_tokens[2] = THINK, 2 * SUNK_TOKENS
    assert told(made) == {2: 543}, "the agent has dropped the rank of the earlier thinking"
    made.prompt_tokens[2] = made.think_tokens[2] = 0
    assert told(made) == {2: 544}, "the agent holds another rank"


@pytest.mark.parametrize("strategy", ["output_first", "reasoning_first", "deadline"])
def test_an_agent_that_is_told_changes_only_has_every_rank(strategy: str) -> None:
    rng, policy = random.Random(7), scheduler(strategy=strategy, long_think_tokens=200)
    made, agent = table(*[{"phase": PROMPT}] * 8), dict[int, int]()
    for _ in range(300):
        for slot in rng.sample(range(8), 3):
            phase = rng.choice([PROMPT, THINK, THINK, OUTPUT])
            if rng.random() < 0.1:
                made.open(agent_pb2.RequestOpened(slot=slot, phase=phase))
                agent.pop(slot, None)
            elif phase != made.phase[slot]:
                made.phase[slot] = phase
                agent.pop(slot, None)
            made.think_tokens[slot], made.token_ms[slot] = rng.randint(0, 400), rng.randint(0, 30)
        agent |= told(made, policy)
        in_force = [agent.get(slot, PHASE_RANK[Phase(int(made.phase[slot]))]) for slot in range(8)]
        assert in_force == ranks(policy, made, stated(policy), 0.0)[:8].tolist()


# -------------------------------------------------------------------------------------------------------- step cost


def test_the_cost_of_a_step_is_learnt() -> None:
    assert cost(5.0, 0.5, 0.01).coefficients == pytest.approx((5.0, 0.5, 0.01), rel=0.01)
    assert cost(5.0, 0.5, 0.01, noise=0.2).coefficients == pytest.approx((5.0, 0.5, 0.01), rel=0.25)


def test_the_cost_of_a_step_follows_a_change() -> None:
    made = cost(5.0, 0.5, 0.01)
    rng = random.Random(1)
    for _ in range(1500):
        n = rng.randint(1, 64)
        made.add_step_time(n, 0, 9.0 + 1.0 * n)
    a, b, _ = made.coefficients
    assert (a, b) == pytest.approx((9.0, 1.0), rel=0.05)


def test_no_variation_and_no_sense_do_no_harm() -> None:
    made = StepCost()
    for _ in range(2000):
        made.add_step_time(8, 0, 10.0)
    a, b, _ = made.coefficients
    assert a + 8 * b == pytest.approx(10.0, rel=0.01)
    for _ in range(100):
        made.add_step_time(64, 0, 0.0)
    assert min(made.coefficients) >= 0
    assert np.isfinite(made.coefficients).all()


# ------------------------------------------------------------------------------------------------------------ share

SLOW = cost(5.0, 1.0, 0.05)


def joins(policy: SchedulerPolicy, made: RequestTable, steps: StepCost, in_force: Share) -> Share:
    return share(policy, made, budgets(policy, made, steps, True), steps, in_force)


TEN = table(answering(), answering(), *[thinking()] * 18)


# 20 sequences take 25 ms, so a budget of 20 ms leaves room for 15 sequences.
WIDE = {"output_tpot_budget_ms": 20.5, "think_batch_multiplier": 100.0, "think_tpot_budget_ms": 1000.0}
LAST = {"strategy": "reasoning_first", "output_tpot_budget_ms": 55.0}
HALF = table(*[answering()] * 10, *[thinking()] * 10)
FEW, UNKNOWN = table(answering(), thinking()), cost(5.0, 1.0, 0.05, steps=WARM_STEPS - 1)
SHARES: dict[str, tuple[dict[str, Any], RequestTable, StepCost, Share, dict[str, Any]]] = {
    "a budget with room": ({"output_tpot_budget_ms": 26.0}, TEN, SLOW, Share(), {"think_per_step": None}),
    "what the answers' budget leaves": (WIDE, TEN, SLOW, Share(), {"think_per_step": 13}),
    "a limit that is about the same": (WIDE, TEN, SLOW, Share(think_per_step=12), {"think_per_step": 12}),
    "a limit that is another": (WIDE, TEN, SLOW, Share(think_per_step=11), {"think_per_step": 13}),
    "prompts get what is left": (
        {"output_tpot_budget_ms": 20.0},
        FEW,
        SLOW,
        Share(),
        {"prefill_tokens_per_step": pytest.approx(260, abs=3)},
    ),
    "but never less than their least": (
        {"output_tpot_budget_ms": 7.5, "min_prefill_tokens": 70},
        FEW,
        SLOW,
        Share(),
        {"prefill_tokens_per_step": 70},
    ),
    "prompts that cost nothing": (
        {"output_tpot_budget_ms": 1.0},
        TEN,
        cost(5.0, 1.0, 0.0),
        Share(),
        {"prefill_tokens_per_step": None},
    ),
    # If sequences cost next to nothing, leaving some out would only lose throughput.
    "what makes steps no shorter": ({}, TEN, cost(25.0, 0.01, 0.05), Share(), {"think_per_step": None}),
    "before the cost is known": ({}, TEN, UNKNOWN, Share(), asdict(Share())),
    "stock order": ({"strategy": "stock"}, TEN, SLOW, Share(), asdict(Share())),
    "answers after thinking, at their budget": (
        LAST,
        HALF,
        SLOW,
        Share(),
        asdict(Share(output_per_step=5, max_skip_steps=1)),
    ),
    "answers after thinking, without a budget for them": (
        {"strategy": "reasoning_first"},
        HALF,
        SLOW,
        Share(),
        asdict(Share()),
    ),
    "answers without thinking": (LAST, table(*[answering()] * 10), SLOW, Share(), asdict(Share())),
    **{
        f"prompts that cost {c} ms": (
            {},
            table(answering()),
            cost(5.0, 0.1, c),
            Share(),
            {"prefill_tokens_per_step": None},
        )
        for c in (0.0, 1e-9, 1e-5)
    },
}


@pytest.mark.parametrize(("fields", "made", "steps", "in_force", "wanted"), SHARES.values(), ids=SHARES)
def test_what_is_limited(
    fields: dict[str, Any], made: RequestTable, steps: StepCost, in_force: Share, wanted: dict[str, Any]
) -> None:
    found = asdict(joins(scheduler(**fields), made, steps, in_force))
    assert {name: found[name] for name in wanted} == wanted


def test_the_first_answer_finds_its_share_ready() -> None:
    """The share is sent before the first answer, because the agent applies it only while an answer streams."""
    ready = joins(POLICY, table(answering(), *[thinking()] * 30), SLOW, Share())
    assert ready.think_per_step is not None
    for first in ((), (answering(preempted=True),), (answering(live=False),)):
        assert joins(POLICY, table(*first, *[thinking()] * 30), SLOW, Share()) == ready


@pytest.mark.parametrize(
    ("fields", "limit", "skips"),
    [
        # 2.5 thinking sequences per answer: 2 + 5 sequences take 12 ms, and six such steps fit into a thinker's budget.
        ({}, 5, 5),
        ({"think_batch_multiplier": 3.0}, 6, 5),
        ({"think_batch_multiplier": 0.1}, 5, 5),
        ({"think_tpot_budget_ms": 1010.0, "think_batch_multiplier": 0.1}, 1, 125),
        # Each of 18 thinkers must get its token within 40 ms.
        ({"think_tpot_budget_ms": 40.0}, 10, 1),
        ({"strategy": "deadline", "think_tpot_budget_ms": 81.0}, 13, 3),
    ],
)
def test_each_field_has_an_effect(fields: dict[str, Any], limit: int, skips: int) -> None:
    found = joins(scheduler(output_tpot_budget_ms=20.5, **fields), TEN, SLOW, Share())
    assert (found.think_per_step, found.max_skip_steps) == (limit, skips)


@pytest.mark.parametrize(
    ("fields", "held_back"),
    [({}, False), ({"output_tpot_budget_ms": 20.0}, True), ({"min_prefill_tokens": 9}, True)],
)
def test_an_engine_without_thinking_computes_prompts_as_stock_does(fields: dict[str, Any], held_back: bool) -> None:
    policy, made = SchedulerPolicy(**fields), table(answering(), answering())
    for has_thought in (False, True):
        found = share(policy, made, budgets(policy, made, SLOW, has_thought), SLOW, Share())
        assert (found.prefill_tokens_per_step is not None) is (held_back or has_thought)


@pytest.mark.parametrize("strategy", ["output_first", "deadline", "reasoning_first"])
@pytest.mark.parametrize("budget_ms", [5e-324, 1e308])
@pytest.mark.parametrize("multiplier", [5e-324, 1e308])
def test_any_valid_budget_gives_limits_that_can_be_sent(strategy: str, budget_ms: float, multiplier: float) -> None:
    for name in ("think_tpot_budget_ms", "output_tpot_budget_ms"):
        policy = scheduler(strategy=strategy, think_batch_multiplier=multiplier, **{name: budget_ms})
        found = joins(policy, TEN, SLOW, Share())
        assert all(limit is None or 0 <= limit < 2**32 for limit in asdict(found).values()), (name, found)


@reaches("all join", "some take turns")
@given(
    st.integers(1, 20),
    st.integers(1, 60),
    st.floats(0.1, 10),
    st.floats(50, 1000),
    st.sampled_from(["output_first", "deadline"]),
)
def test_thinking_can_meet_its_own_budget(
    answers: int, thinkers: int, multiplier: float, budget_ms: float, strategy: str
) -> None:
    """All thinking requests join a step, or enough of them that taking turns meets the thinking budget."""
    policy = scheduler(think_batch_multiplier=multiplier, think_tpot_budget_ms=budget_ms, strategy=strategy)
    found = joins(policy, table(*[answering()] * answers, *[thinking()] * thinkers), SLOW, Share())
    if found.think_per_step is None:
        assert found.max_skip_steps == 0
        reached("all join")
        return
    reached("some take turns")
    a, b, _ = SLOW.coefficients
    step_ms = a + b * (answers + found.think_per_step)
    assert 1 <= found.think_per_step < thinkers
    assert (found.max_skip_steps + 1) * step_ms <= max(budget_ms, step_ms) * (1 + 1e-9)


# --------------------------------------------------------------------------------------- budgets that follow the engine

FOLLOW = SchedulerPolicy()


def test_budgets_follow_what_steps_take() -> None:
    """20 sequences take 25 ms; sequences that are preempted or have no token yet take no time."""
    found = budgets(FOLLOW, TEN, SLOW, True)
    assert found.output_ms == pytest.approx(STRETCH * 25.0, rel=0.01)
    assert found.think_ms == pytest.approx(THINK_BUDGETS * found.output_ms)
    more = table(answering(), answering(), *[thinking()] * 18, thinking(preempted=True), {"phase": PROMPT})
    assert budgets(FOLLOW, more, SLOW, True) == found
    assert budgets(scheduler(), TEN, SLOW, True) == Budgets(20.0, 80.0, True)
    assert budgets(scheduler(think_tpot_budget_ms=0.0), TEN, SLOW, True) == Budgets(20.0, 20.0 * THINK_BUDGETS, True)


def test_budgets_before_the_cost_is_known_and_for_readers() -> None:
    unknown = cost(5.0, 1.0, 0.05, steps=WARM_STEPS - 1)
    assert budgets(FOLLOW, TEN, unknown, True) == Budgets(USUAL_MS, USUAL_MS * THINK_BUDGETS, True)
    reading = FOLLOW.model_copy(update={"strategy": "reasoning_first"})
    assert budgets(reading, TEN, SLOW, True).output_ms == READING_MS


@given(st.integers(1, 30), st.integers(0, 60), st.floats(0.1, 100), st.floats(0, 5), st.floats(0.001, 1))
def test_following_budgets_leave_no_thinker_out(answers: int, thinkers: int, a: float, b: float, c: float) -> None:
    """Only prompts are held back: to what makes a step STRETCH times as long, or to HEADROOM times their arrival."""
    steps = cost(a, b, c)
    made = table(*[answering()] * answers, *[thinking()] * thinkers)
    found = joins(FOLLOW, made, steps, Share())
    assert (found.think_per_step, found.max_skip_steps) == (None, 0)
    if found.prefill_tokens_per_step is not None:
        assert found.prefill_tokens_per_step >= HEADROOM * steps.prefill_tokens


def test_prompts_are_never_held_back_below_their_arrival() -> None:
    """Prompts that arrive at 300 tokens a step are admitted at HEADROOM times that rate, whatever they cost."""
    steps = StepCost()
    for i in range(2000):
        steps.add_step_time(20, 600 * (i % 2), 25.0 + 0.25 * 600 * (i % 2))
    found = joins(FOLLOW, TEN, steps, Share()).prefill_tokens_per_step
    assert found == pytest.approx(HEADROOM * 300, rel=0.02)
    assert joins(scheduler(output_tpot_budget_ms=30.0), TEN, steps, Share()).prefill_tokens_per_step == 128
