"""KV blocks that a finished request gives back to the pool: those that no later prompt can hit in the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.engine.kv_blocks import KvBlocks, unreachable_blocks


def scheduler_of(groups: tuple[tuple[int, list[int]], ...], evicted: list[set[int]]) -> Any:
    """Return a scheduler with these KV cache groups, each a block size and the blocks of the one request. Block 0 is
    vLLM's null block."""
    blocks = {i: SimpleNamespace(ref_cnt=1, block_hash=i or None) for _, ids in groups for i in ids}
    manager = SimpleNamespace(
        block_pool=SimpleNamespace(blocks=blocks),
        get_block_ids=lambda _: tuple(ids for _, ids in groups),
        coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=size) for size, _ in groups]),
        evict_blocks=evicted.append,
    )
    return SimpleNamespace(kv_cache_manager=manager)


def test_a_probe_gives_back_its_blocks_of_each_group() -> None:
    """Probes also run on models with several KV cache groups, such as sliding windows beside full attention."""
    evicted: list[set[int]] = []
    scheduler = scheduler_of(((16, [1, 2, 3]), (32, [0, 5]), (8, [0, 0, 6, 7, 8])), evicted)
    probe = SimpleNamespace(request_id="meridian-probe:1")
    assert KvBlocks(SimpleNamespace(), None, None).evict(scheduler, probe, 33) == 3  # type: ignore[arg-type]
    assert evicted == [{3, 5, 8}]


@given(st.integers(1, 64), st.integers(0, 400), st.integers(0, 400), st.sets(st.integers(0, 40)))
def test_no_block_of_the_prompt_and_none_that_is_shared(
    block_size: int, prompt_tokens: int, generated: int, shared: set[int]
) -> None:
    count = -(-(prompt_tokens + generated) // block_size)
    found = unreachable_blocks(list(range(count)), prompt_tokens, block_size, lambda b: 2 if b in shared else 1)
    for block in range(count):
        holds_generated = (block + 1) * block_size > prompt_tokens
        assert (block in found) == (holds_generated and block not in shared)
