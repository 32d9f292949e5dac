"""Run an engine whose vLLM lacks hooks: `python -m tests.engine.lacking`.

The program prints the engine's greedy tokens for the shared cases and the kind of its scheduler, as JSON, and stays
until SIGTERM. Before the agent looks, one function is removed and another loses a parameter; stock vLLM needs neither
for these requests.
"""

from __future__ import annotations

import json
import signal
from typing import Any

from tests.engine import ENGINE_ARGS, MAX_TOKENS, cases, chat


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import vllm
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    stock_touch: Any = BlockPool.touch
    BlockPool.touch = lambda self, *, blocks: stock_touch(self, blocks)
    del KVCacheManager.evict_blocks
    llm = vllm.LLM(**{**ENGINE_ARGS, "enable_prefix_caching": False})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    tokens = chat(llm, cases(), vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    print("\n" + json.dumps({"scheduler": type(scheduler).__name__, "tokens": tokens}), flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
