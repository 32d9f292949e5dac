"""Gives up, after a time, the KV blocks of thinking that later turns may repeat and have not repeated.

vLLM reuses the blocks of finished requests least recently used first, however long a conversation has been silent. The
policy may say for how long kept thinking waits for the next turn; each turn that repeats it begins this time anew.
Blocks whose time is over are given up when the next requests arrive, those of a few conversations each time, so that
steps pay nothing for it. Runs on the engine-core thread.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_agent.vllm_adapter.prefix_cache import free_anew

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_agent.vllm_types import Request, Scheduler

# Most conversations whose kept thinking has a time; with one more, the oldest stays as in stock vLLM. And most of them
# that are given up when one request arrives, which waits for that.
MAX_KEPT, MAX_GIVEN_UP = 4096, 4


class Kept(NamedTuple):
    """The blocks of a conversation from its first kept thinking on, by number, each with its hash.

    first: index of the first of these blocks in the request. since_s: time at which the newest of its requests ended.
    """

    first: int
    since_s: float
    blocks: dict[int, Any]


class KeptThinking:
    """The kept thinking of one engine's finished requests.

    seconds: time for which it is kept, 0 for as long as vLLM keeps it. given_up: number of blocks so far whose time was
    over.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.seconds = clock, 0
        self.given_up = 0
        # By the hash of the first of the blocks; the one whose time is over first stands first.
        self._kept: dict[Any, Kept] = {}
        # Number of blocks in all of it, at most as many as the engine has: with more, some have been reused meanwhile,
        # and those of the oldest conversations first, of which no live request has the blocks.
        self._blocks = 0
        # Each live request whose prompt repeats kept thinking has the keys of that thinking here.
        self._repeating: dict[str, list[Any]] = {}

    def set_seconds(self, seconds: int) -> None:
        """Keep thinking for this time from now on, that of earlier requests included."""
        self.seconds = seconds
        if not seconds:
            self._kept, self._repeating, self._blocks = {}, {}, 0

    def arrived(self, scheduler: Scheduler, request: Request) -> None:
        """Give up what has waited too long, and see whether a new request repeats what still waits."""
        if not self._kept:
            return
        self._expire(scheduler)
        if not self._kept.keys().isdisjoint(request.block_hashes):
            self._repeating[request.request_id] = [known for known in request.block_hashes if known in self._kept]
            if len(self._repeating) > MAX_KEPT:
                del self._repeating[next(iter(self._repeating))]

    def keep(self, scheduler: Scheduler, request: Request, first: int) -> None:
        """Note the blocks of a request that ends and whose thinking is kept. first: index of the first block with a
        generated token."""
        repeated = [self._forget(k) for k in self._repeating.pop(request.request_id, ()) if k in self._kept]
        first = repeated[0].first if repeated else first
        if not self.seconds or first >= len(request.block_hashes):
            return
        manager = scheduler.kv_cache_manager
        pool, numbers = manager.block_pool.blocks, manager.get_block_ids(request.request_id)[0][first:]
        blocks = {number: known for number in numbers if (known := pool[number].block_hash) is not None}
        key = request.block_hashes[first]
        if key in self._kept:
            repeated.append(self._forget(key))
        for earlier in repeated:
            # Blocks that have been reused since are not counted any more.
            blocks = {n: known for n, known in earlier.blocks.items() if pool[n].block_hash == known} | blocks
        self._note(key, Kept(first, self._clock(), blocks))
        self._bound(len(pool))

    def ended(self, scheduler: Scheduler, request: Request) -> None:
        """Note a request that ends; without kept thinking of its own it may repeat that of earlier turns."""
        if request.request_id in self._repeating:
            self.keep(scheduler, request, len(request.block_hashes))

    def _bound(self, most_blocks: int) -> None:
        """Forget the oldest conversations of which there are too many, those last that live requests repeat."""
        in_use: set[Any] | None = None
        while len(self._kept) > MAX_KEPT or self._blocks > most_blocks:
            if in_use is None:
                in_use = {key for keys in self._repeating.values() for key in keys}
            unused = (key for key in self._kept if key not in in_use)
            self._forget(next(unused, None) or next(iter(self._kept)))

    def _note(self, key: Any, kept: Kept) -> None:
        self._kept[key] = kept
        self._blocks += len(kept.blocks)

    def _forget(self, key: Any) -> Kept:
        kept = self._kept.pop(key)
        self._blocks -= len(kept.blocks)
        return kept

    def _expire(self, scheduler: Scheduler) -> None:
        now_s, pool = self._clock(), scheduler.kv_cache_manager.block_pool
        for key in [*islice(self._kept, MAX_GIVEN_UP)]:
            if self._kept[key].since_s > now_s - self.seconds:
                return
            kept = self._forget(key)
            if any(key in keys for keys in self._repeating.values()):
                # A live request repeats it, which may wait without its blocks; the time begins anew when it ends.
                self._note(key, kept._replace(since_s=now_s))
                continue
            free = [
                number
                for number, known in kept.blocks.items()
                if pool.blocks[number].block_hash == known and pool.blocks[number].ref_cnt == 0
            ]
            scheduler.kv_cache_manager.evict_blocks(set(free))
            free_anew(pool, [pool.blocks[number] for number in free])
            self.given_up += len(free)
