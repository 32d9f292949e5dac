"""An alternative to eviction tiers: cached blocks that no other request ever hit are reused first.

The order follows vLLM pull requests 51909 and 55998. The scheduler class is for vLLM's own `scheduler_cls`, only the
benchmark uses it, and it runs in the engine-core process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable


class TwoClassQueue:
    """Replaces the block pool's free queue: blocks that were never hit come before blocks that were hit.

    Within each class the least recently used block comes first.
    """

    def __init__(self, queue: Any) -> None:
        self._never, self._hit = queue, FreeKVCacheBlockQueue([])
        # Ids of the blocks that were hit since they were allocated; `_waiting` has the ones of them that are in the
        # free queue.
        self.were_hit: set[int] = set()
        self._waiting: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return int(self._never.num_free_blocks + self._hit.num_free_blocks)

    def popleft_n(self, count: int) -> list[Any]:
        first = min(count, self._never.num_free_blocks)
        popped = [*self._never.popleft_n(first), *self._hit.popleft_n(count - first)]
        ids = {block.block_id for block in popped}
        self.were_hit -= ids
        self._waiting -= ids
        return popped

    def remove(self, block: Any) -> None:
        if block.block_id in self._waiting:
            self._waiting.discard(block.block_id)
            self._hit.remove(block)
        else:
            self._never.remove(block)

    def prepend_n(self, blocks: list[Any]) -> None:
        self._never.prepend_n(blocks)

    def append_n(self, blocks: list[Any]) -> None:
        hit = [block for block in blocks if block.block_id in self.were_hit]
        self._waiting.update(block.block_id for block in hit)
        self._hit.append_n(hit)
        self._never.append_n([block for block in blocks if block.block_id not in self.were_hit])


class NeverHitFirst(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, whose block pool reuses blocks that were never hit first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        pool.free_block_queue = queue = TwoClassQueue(pool.free_block_queue)
        touch = pool.touch

        def touched(blocks: Iterable[Any]) -> None:
            blocks = list(blocks)
            touch(blocks)
            queue.were_hit.update(block.block_id for block in blocks)

        pool.touch = touched
