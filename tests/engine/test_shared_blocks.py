"""Blocks that a live request shares with an ending one are left alone, on the real scheduler and block pool."""

from __future__ import annotations

from typing import Any

from tests.engine import STRIPPED, Run, prompt_ids, stops_next
from tests.engine.pacing import Settled
from tests.engine.test_decisions import endless, opened
from tests.processes import Control


def blocks_of(agent: Any, scheduler: Any, name: str) -> list[int]:
    """Return the KV blocks of the request with this name, in order."""
    (request_id,) = (known for known in agent.tracker.by_id if known.split("-")[0] == name)
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(request_id)
    return list(blocks)


def test_what_a_live_request_shares_is_left_alone(
    llm: Any, agent: Any, control: Control, scheduler: Any, settled: Settled
) -> None:
    """A second request begins on blocks of the first request's thinking, which are past the first one's prompt.

    When the first request ends, its own blocks are given up, the shared ones stay, and a third request finds them.
    """
    llm.llm_engine.reset_prefix_cache()
    size, pool = agent.block_size, scheduler.kv_cache_manager.block_pool.blocks
    prompt, run = prompt_ids(llm, opened()), Run(llm)
    # The third request teaches the engine to keep the blocks of such requests, so these have a tenant of their own.
    run.put("first", prompt, endless(agent, max_tokens=200, extra_args={**STRIPPED, "meridian_tenant": "shared"}))
    run.until(lambda: len(run.tokens["first"]) > 3 * size)
    text = prompt + run.tokens["first"][: 3 * size]
    run.put("second", text, endless(agent, max_tokens=130))
    run.until(lambda: bool(run.tokens["second"]))
    first, second = (blocks_of(agent, scheduler, name) for name in ("first", "second"))
    shared = [block for block in second if block in first]
    past_the_prompt = [block for block in shared if first.index(block) >= len(prompt) // size]
    assert len(past_the_prompt) >= 2
    assert {pool[block].ref_cnt for block in past_the_prompt} == {2}
    reclaimed, (ending,) = (
        agent.blocks.reclaimed,
        (r for r in agent.tracker.by_id.values() if "first" in r.info.request_id),
    )
    # The control plane decides which of the request's blocks no later turn can reach.
    run.until(lambda: ending.tier is not None, settled=settled)
    told = ending.tier
    run.until(lambda: len(run.tokens["first"]) > 5 * size, settled=settled)
    stops_next(scheduler, ending.info.request_id)
    run.until(lambda: "first" in run.finished, settled=settled)
    assert agent.blocks.reclaimed > reclaimed, told
    assert {pool[block].ref_cnt for block in past_the_prompt} == {1}
    assert all(pool[block].block_hash is not None for block in shared)
    own = [block for block in first if block not in second and first.index(block) >= len(prompt) // size]
    assert own
    assert all(pool[block].block_hash is None for block in own)
    run.put("third", text, endless(agent, max_tokens=130))
    run.until(lambda: bool(run.tokens["third"]))
    third = blocks_of(agent, scheduler, "third")
    assert third[: len(shared)] == shared
    assert "'shared'" in agent.facts.later_turns.note
    run.until()
    assert run.tokens["second"] == run.tokens["third"]
    control.settled()
