"""Limits of vLLM's scheduler that a policy changes while the real engine runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from meridian_agent.core.request_info import is_probe
from tests.engine import ENGINE_ARGS, FIRST_TOKENS, Run, cases, chat
from tests.engine.policies import NEUTRAL
from tests.engine.test_equality import GREEDY
from tests.processes import Control, wait_for

PLACES = ENGINE_ARGS["max_num_seqs"]


def of_clients(scheduler: Any) -> set[str]:
    """Return the running requests, probes left out."""
    return {r.request_id for r in scheduler.running if not is_probe(r.request_id)}


def limited(**limits: int) -> dict[str, Any]:
    """Return a policy with these limits, under which no plan limits prompts."""
    return {**NEUTRAL, "scheduler": {**NEUTRAL["scheduler"], "strategy": "stock"}, "engine": limits}


def test_running_requests_finish_below_a_lowered_limit_and_others_wait(
    llm: Any, agent: Any, scheduler: Any, control: Control, stock: list[list[int]]
) -> None:
    """None is preempted, a request joins only once fewer than two others run, and each gets stock vLLM's tokens."""
    before = agent.preempted_think, agent.output_critical
    run = Run(llm)
    for number, case in enumerate(cases()):
        run.add(f"r{number}", case, GREEDY)
    run.until(lambda: len(of_clients(scheduler)) == len(stock))
    first = of_clients(scheduler)
    control.set_policy(limited(max_num_active_seqs=2))
    wait_for(lambda: agent.link.mailbox.arrived, 20, "the settings to arrive")
    for number, case in enumerate(cases()[:3]):
        run.add(f"late{number}", case, GREEDY)
    run.step()
    assert scheduler.max_num_active_reqs == 2
    together = []

    def all_ended() -> bool:
        running = of_clients(scheduler)
        if running - first:
            together.append(len(running))
        return len(run.finished) == len(run.tokens)

    run.until(all_ended)
    assert max(together) == 2
    assert [run.tokens[f"r{number}"] for number in range(len(stock))] == stock
    assert [run.tokens[f"late{number}"] for number in range(3)] == stock[:3]
    assert (agent.preempted_think, agent.output_critical) == before
    (shown,) = [row for row in control.settled().engine_limits if row.name == "max_num_active_seqs"]
    assert (shown.limit.startup, shown.limit.highest, shown.wanted, shown.in_force) == (PLACES, PLACES, 2, 2)
    control.apply(NEUTRAL)
    for number, case in enumerate(cases()):
        run.add(f"again{number}", case, GREEDY)
    run.until(lambda: len(of_clients(scheduler)) == len(stock))
    assert scheduler.max_num_active_reqs == PLACES
    run.until()
    assert [run.tokens[f"again{number}"] for number in range(len(stock))] == stock


def test_prompts_are_cut_to_the_limits_unless_a_cpu_cannot_cut_them(  # noqa: PLR0917
    llm: Any, agent: Any, scheduler: Any, control: Control, stock: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of stock vLLM, and the start-up values are back with the next policy."""
    block, startup = agent.block_size, scheduler.max_num_scheduled_tokens
    # Requests by the largest number of tokens that a step computed for them, and the largest step.
    most, schedule = Counter[str](), scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for name, tokens in {**output.num_scheduled_tokens, "step": output.total_num_scheduled_tokens}.items():
            most[name] = max(most[name], tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=FIRST_TOKENS)
    llm.llm_engine.reset_prefix_cache()
    free = chat(llm, cases(), seeded)
    assert most["step"] > 3 * block
    llm.llm_engine.reset_prefix_cache()
    control.apply(limited(long_prefill_token_threshold=1, max_num_scheduled_tokens=2 * block))
    most.clear()
    assert chat(llm, cases(), GREEDY) == stock
    assert most.pop("step") == 2 * block
    assert max(most.values()) == block
    # On a CPU vLLM fails if it computes a prompt in pieces whose tokens are drawn with a seed.
    llm.llm_engine.reset_prefix_cache()
    most.clear()
    assert chat(llm, cases(), seeded) == free
    assert most["step"] > 3 * block
    control.apply(NEUTRAL)
    assert chat(llm, cases()[:1], GREEDY) == stock[:1]
    assert (scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold) == (startup, 0)
