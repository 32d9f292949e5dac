"""Measure what it costs that kept thinking has a time: `python -m tests.bench.kept_thinking`.

The program allocates and frees the blocks of requests in vLLM's own block pool, and beside it notes, finds and gives up
their kept thinking. The last line is JSON, in CPU microseconds for a request.
"""

from __future__ import annotations

import json
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

from meridian_agent.engine.kept_thinking import KeptThinking

# A request's blocks in its prompt and after it, and requests in all.
PROMPT, THINKING, REQUESTS = 64, 128, 2000


def main() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool = BlockPool(4 * (PROMPT + THINKING), True, 16)
    now = count()
    kept = KeptThinking(lambda: float(next(now)))
    kept.set_seconds(3)
    held: dict[str, list[Any]] = {}
    manager = SimpleNamespace(
        block_pool=pool,
        evict_blocks=pool.evict_blocks,
        get_block_ids=lambda name: ([block.block_id for block in held[name]],),
    )
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager)
    stock = agent = 0.0
    for number in range(REQUESTS):
        hashes = [BlockHash(f"{number}-{i}".encode()) for i in range(PROMPT + THINKING)]
        name = f"r{number}"
        request: Any = SimpleNamespace(request_id=name, block_hashes=hashes[:PROMPT])
        begin = time.process_time()
        kept.arrived(scheduler, request)
        agent += time.process_time() - begin
        begin = time.process_time()
        held[name] = pool.get_new_blocks(PROMPT + THINKING)
        stock += time.process_time() - begin
        for block, known in zip(held[name], hashes, strict=True):
            key = make_block_hash_with_group_id(known, 0)
            block._block_hash = key
            pool.cached_block_hash_to_block.insert(key, block)
        request.block_hashes = hashes
        begin = time.process_time()
        kept.keep(scheduler, request, PROMPT)
        agent += time.process_time() - begin
        begin = time.process_time()
        pool.free_blocks(reversed(held.pop(name)))
        stock += time.process_time() - begin
    assert kept.given_up > REQUESTS
    each = {"agent_us": agent, "block_pool_us": stock}
    print(json.dumps({name: round(seconds / REQUESTS * 1e6, 1) for name, seconds in each.items()}))


if __name__ == "__main__":
    main()
