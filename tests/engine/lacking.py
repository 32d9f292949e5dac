"""Run an engine whose vLLM lacks hooks: `python -m tests.engine.lacking`.

The program prints the engine's greedy tokens for the shared cases and the kind of its scheduler, as JSON, and stays
until SIGTERM. Before the agent looks, one function is removed and another loses a parameter; stock vLLM needs neither
for these requests. The engine believes that it is the second of several data-parallel ranks.
"""

from __future__ import annotations

import functools
import json
import signal
from typing import Any

from tests.engine import ENGINE_ARGS, FIRST_TOKENS, cases, chat


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import vllm
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    stock_touch: Any = BlockPool.touch
    BlockPool.touch = lambda self, *, blocks: stock_touch(self, blocks)
    del KVCacheManager.evict_blocks
    built: Any = Scheduler.__init__

    @functools.wraps(built)
    def second_rank(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.parallel_config.data_parallel_index = 1
        built(self, vllm_config, *args, **kwargs)

    setattr(Scheduler, "__init__", second_rank)  # noqa: B010
    llm = vllm.LLM(**{**ENGINE_ARGS, "enable_prefix_caching": False})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    tokens = chat(llm, cases(), vllm.SamplingParams(temperature=0.0, max_tokens=FIRST_TOKENS))
    print("\n" + json.dumps({"scheduler": type(scheduler).__name__, "tokens": tokens}), flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
