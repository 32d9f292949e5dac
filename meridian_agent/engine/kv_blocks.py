"""Decides in which order vLLM reuses the KV blocks of requests that end or are preempted.

The module finds the blocks that no later prompt can hit, applies eviction tiers to vLLM's block pool and counts
reclaimed blocks. Runs on the engine-core thread, while vLLM frees or preempts a request.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meridian_agent.core.phases import Phase
from meridian_agent.core.step_record import Outcome, Tier
from meridian_agent.vllm_adapter.prefix_cache import free_anew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meridian_agent.core.directives import Directives
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.engine.kept_thinking import KeptThinking
    from meridian_agent.engine.later_turns import LaterTurns
    from meridian_agent.vllm_types import Request, Scheduler


# The agent searches the freed blocks of a request with at most this many output tokens, because a longer search would
# delay the step.
LONGEST_TOKENS = 65_536


class KvBlocks:
    """The KV blocks of one engine. later_turns: knows whether later turns repeat a request's thinking. kept: gives up
    kept thinking after a time."""

    def __init__(self, directives: Directives, later_turns: LaterTurns, kept: KeptThinking) -> None:
        self._directives, self._later_turns, self.kept = directives, later_turns, kept
        self.reclaimed = 0

    def freeing(self, scheduler: Scheduler, request: Request, live: LiveRequest, probes: Iterable[str]) -> None:
        """Unhash the blocks of a finished request that no later prompt can hit, if its tier says so; note the blocks of
        a preempted answer. probes: the ids of the request's own probes that vLLM has not freed yet."""
        if not request.is_finished():
            if live.phase is Phase.OUTPUT:
                _remember(scheduler, request, live)
            return
        if (decided := live.take_tier()) is not None:
            decision_id, tier, shadow = decided
            outcome, detail = Outcome.APPLIED, ""
            if tier == Tier.UNREACHABLE:
                outcome, detail = self._reclaim(scheduler, request, live, probes, shadow)
            self._directives.report(decision_id, outcome, detail=detail)
        self.kept.ended(scheduler, request)

    def _reclaim(
        self, scheduler: Scheduler, request: Request, live: LiveRequest, probes: Iterable[str], shadow: bool
    ) -> tuple[Outcome, str]:
        if refusal := self._cannot(scheduler, request):
            return Outcome.REFUSED, refusal
        reachable = min(live.info.prompt_tokens, live.info.repeated_tokens)
        first = reachable // scheduler.block_size
        if refusal := self._repeats(request, live):
            if not shadow and self.kept.seconds:
                self.kept.keep(scheduler, request, first)
                refusal += f"; kept for {self.kept.seconds} s"
            return Outcome.REFUSED, refusal
        if first < len(request.block_hashes):
            self._later_turns.gave_up(live, request.block_hashes[first])
        if shadow:
            return Outcome.SHADOWED, ""
        count = self.evict(scheduler, request, reachable, probes)
        self.reclaimed += count
        return Outcome.APPLIED, f"{count} block{'s'[: count != 1]}"

    @staticmethod
    def _cannot(scheduler: Scheduler, request: Request) -> str:
        """Return why the blocks of a request cannot be given up; empty if they can."""
        if request.num_output_tokens > LONGEST_TOKENS:
            return f"an output of over {LONGEST_TOKENS} tokens"
        if len(scheduler.kv_cache_manager.get_block_ids(request.request_id)) != 1:
            return "several KV cache groups"
        return ""

    def _repeats(self, request: Request, live: LiveRequest) -> str:
        """Return why a later turn may repeat the thinking of a request; empty if none does."""
        if str(request.get_finished_reason()) != "stop":
            return "the answer was cut: a later request may go on with it"
        structured = request.structured_output_request is not None
        return self._later_turns.refusal(live, request.output_token_ids, structured=structured)

    def evict(self, scheduler: Scheduler, request: Request, reachable_tokens: int, probes: Iterable[str] = ()) -> int:
        """Unhash, in each KV cache group, the blocks after this many tokens that no other request shares; return the
        number of blocks. probes: the request's own probes, which do not count as other requests."""
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool.blocks
        blocks = set[int]()
        probed = Counter(b for probe in probes for ids in manager.get_block_ids(probe) for b in ids)
        ids_of_groups = manager.get_block_ids(request.request_id)
        for ids, group in zip(ids_of_groups, manager.coordinator.single_type_managers, strict=True):
            unreachable = unreachable_blocks(
                ids, reachable_tokens, group.block_size, lambda b: pool[b].ref_cnt - probed[b]
            )
            blocks.update(b for b in unreachable if pool[b].block_hash is not None)
        manager.evict_blocks(blocks)
        return len(blocks)


def unreachable_blocks(
    block_ids: list[int], reachable_tokens: int, block_size: int, reference_count: Callable[[int], int]
) -> set[int]:
    """Return the blocks that are not wholly inside the first `reachable_tokens` tokens, without blocks that another
    request shares.

    block_ids: the request's blocks in order. The next turn of a conversation repeats the prompt and then differs. So no
    later prompt can have the hash of the first block with a generated token, or of any block after it.
    """
    kept = reachable_tokens // block_size
    return {b for b in block_ids[kept:] if reference_count(b) == 1}


def reuse_answers_last(scheduler: Scheduler, preempted: Iterable[LiveRequest]) -> None:
    """Put the blocks of preempted answers last in the order of reuse again, because the blocks of a preempted thinking
    request have just gone behind them."""
    pool = scheduler.kv_cache_manager.block_pool
    for live in preempted:
        kept = [block for block, known in live.kept if block.block_hash == known and block.ref_cnt == 0]
        free_anew(pool, kept)


def _remember(scheduler: Scheduler, request: Request, live: LiveRequest) -> None:
    """Note the blocks of a preempted answer with their hashes; a block belongs to the answer for as long as its hash is
    the same."""
    groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    blocks = groups[0] if len(groups) == 1 else ()
    live.kept = [(block, block.block_hash) for block in blocks if block.block_hash is not None]
