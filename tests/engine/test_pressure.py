"""Order, victims, share and reclaimed blocks on the real scheduler and block pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm import SamplingParams

from tests.engine import Run, cases, chat, prompt_ids
from tests.engine.policies import NEUTRAL
from tests.engine.test_decisions import endless, opened

if TYPE_CHECKING:
    from tests.processes import Control

ANSWER = {"enable_thinking": False}


def pressure(llm: Any, agent: Any, control: Control) -> tuple[int, int]:
    """Thinkers first, answers last, more than the cache holds; returns preemptions of (thinking, answering)."""
    before = agent.preempted_think, agent.output_critical
    run = Run(llm)
    for i in range(5):
        run.add(f"think-{i}", opened(i), endless(agent, max_tokens=380))
    for i in range(3):
        run.add(f"answer-{i}", {**cases()[i], "template": ANSWER}, endless(agent, max_tokens=250))
    run.until()
    assert {len(t) for n, t in run.tokens.items() if n.startswith("answer")} == {250}
    assert {len(t) for n, t in run.tokens.items() if n.startswith("think")} == {380}
    control.settled()
    return agent.preempted_think - before[0], agent.output_critical - before[1]


def test_answers_are_never_preempted_before_thinking(llm: Any, agent: Any, control: Control) -> None:
    """Stock vLLM preempts the answers that came last; governed, only thinking is preempted."""
    control.apply({**NEUTRAL, "scheduler": {"enabled": False}})
    thinking, answering = pressure(llm, agent, control)
    assert answering > 0, (thinking, answering)
    control.apply(NEUTRAL)
    thinking, answering = pressure(llm, agent, control)
    assert thinking > 0
    assert answering == 0


def test_preempted_thinking_resumes_with_its_counts(llm: Any, agent: Any, control: Control) -> None:
    """A cap counts across preemption and resumption."""
    control.apply({"scheduler": {"max_think_tokens": 300}, "entropy": {"enabled": False}})
    before = agent.preempted_think
    run = Run(llm)
    for i in range(6):
        run.add(f"r{i}", opened(i), endless(agent, max_tokens=380))
    run.until()
    assert agent.preempted_think > before
    end = agent.tracker.markers.end[0]
    assert {t.index(end) for t in run.tokens.values()} == {300}


def order_of(scheduler: Any, agent: Any) -> list[int]:
    return [int(agent.tracker.by_id[r.request_id].state.phase) for r in scheduler.running]


def test_running_order_puts_answers_first(llm: Any, agent: Any, control: Control, scheduler: Any) -> None:
    run = Run(llm)
    for i in range(3):
        run.add(f"think-{i}", opened(i), endless(agent))
    run.add("answer", {**cases()[0], "template": ANSWER}, endless(agent))
    run.until(lambda: len(run.tokens["answer"]) > 20)
    assert order_of(scheduler, agent) == [3, 2, 2, 2]
    for name in run.tokens:
        run.abort(name)
    run.until()


def test_share_leaves_thinkers_out_and_starves_none(llm: Any, agent: Any, control: Control) -> None:
    """With steps over the answers' budget, one thinker in six joins a step, in turns; tokens stay the same."""
    chosen = [opened(i) for i in range(6)] + [{**cases()[0], "template": ANSWER}]
    params = [endless(agent, max_tokens=200)] * 6 + [endless(agent, max_tokens=60)]
    reference = chat(llm, chosen, params)
    before = agent.think_skips
    tight = {"output_tpot_budget_ms": 0.001, "think_batch_multiplier": 1.0, "think_tpot_budget_ms": 10_000.0}
    control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **tight}})
    run = Run(llm)
    for i, (case, param) in enumerate(zip(chosen, params, strict=True)):
        run.add(f"r{i}", case, param)
    run.until(lambda: "r6" in run.finished)
    skipped = agent.think_skips - before
    lengths = [len(run.tokens[f"r{i}"]) for i in range(6)]
    assert skipped > 100
    assert max(lengths) - min(lengths) <= 20
    assert min(lengths) > 0
    run.until()
    assert [run.tokens[f"r{i}"] for i in range(7)] == reference
    control.settled()


@pytest.mark.parametrize("budget_ms", [1.0, 10_000.0])
def test_think_tpot_budget_bounds_the_wait(llm: Any, agent: Any, control: Control, budget_ms: float) -> None:
    """A budget below the step time allows no skip at all."""
    tight = {"output_tpot_budget_ms": 0.001, "think_batch_multiplier": 1.0, "think_tpot_budget_ms": budget_ms}
    control.apply({**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], **tight}})
    before = agent.think_skips
    chosen = [opened(i) for i in range(3)] + [{**cases()[0], "template": ANSWER}]
    chat(llm, chosen, endless(agent, max_tokens=40))
    assert (agent.think_skips > before) == (budget_ms > 1.0)


@pytest.mark.parametrize("fraction", [0.01, 1.0])
def test_think_phase_memory_fraction_holds_admission(llm: Any, agent: Any, control: Control, fraction: float) -> None:
    """In vLLM's own order answers get preempted; while they wait and thinking has its share, nothing new comes in."""
    control.apply({"scheduler": {"enabled": False}, "kv_memory": {"think_phase_memory_fraction": fraction}})
    limits: list[int] = []
    before_schedule = agent.before_schedule

    def watched(*args: Any) -> Any:
        limit = before_schedule(*args)
        if limit is not None:
            limits.append(limit)
        return limit

    agent.before_schedule = watched
    try:
        pressure(llm, agent, control)
    finally:
        del agent.before_schedule
    assert bool(limits) == (fraction < 1.0)


def cached(scheduler: Any, blocks: list[int]) -> list[bool]:
    pool = scheduler.kv_cache_manager.block_pool.blocks
    return [pool[b].block_hash is not None for b in blocks]


@pytest.mark.parametrize("enabled", [True, False])
def test_unreachable_blocks_go_first(llm: Any, agent: Any, control: Control, scheduler: Any, enabled: bool) -> None:
    """Blocks past the prompt lose their hash and head the free queue; the prompt's stay cached. Off, all stay."""
    llm.llm_engine.reset_prefix_cache()
    control.apply({**NEUTRAL, "kv_memory": {"enabled": enabled}})
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=120))
    run.until(lambda: len(run.tokens["r"]) == 119)
    (name,) = agent.tracker.by_id
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
    prompt_blocks = len(prompt_ids(llm, opened())) // agent.block_size
    assert prompt_blocks >= 1
    run.until()
    full = blocks[: (len(prompt_ids(llm, opened())) + 119) // agent.block_size]
    kept = cached(scheduler, full)
    assert all(kept[:prompt_blocks])
    assert all(kept[prompt_blocks:]) != enabled
    assert any(kept[prompt_blocks:]) != enabled
    control.settled()


def test_shared_blocks_are_left_alone(llm: Any, agent: Any, control: Control, scheduler: Any) -> None:
    """Two requests with the same thinking share blocks; the first to finish takes none of them away."""
    llm.llm_engine.reset_prefix_cache()
    run = Run(llm)
    run.add("long", opened(), endless(agent, max_tokens=200))
    run.until(lambda: len(run.tokens["long"]) > 100)
    text = prompt_ids(llm, opened()) + run.tokens["long"][:96]
    llm.llm_engine.add_request("twin", {"prompt_token_ids": text}, SamplingParams(temperature=0.0, max_tokens=2))
    run.until(lambda: "twin" in run.finished)
    (name,) = agent.tracker.by_id
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
    assert all(cached(scheduler, blocks[: len(text) // agent.block_size]))
    run.until()
