"""Connects EAT probes with vLLM's prefix cache: a probe starts on the KV blocks of the request that it measures, and
vLLM's prefix-cache metrics do not count probes. Changes the order in which vLLM reuses free blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.guard import hook
from meridian_agent.core.request_info import is_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meridian_agent.core.guard import Guard
    from meridian_agent.vllm_types import Block, BlockPool, Scheduler


def free_anew(pool: BlockPool, blocks: Sequence[Block]) -> None:
    """Put free blocks where vLLM puts blocks that it frees: those without a hash first in the order of reuse, and all
    others last, with the first of these blocks at the very end.

    An exception between the two calls would leave blocks that no request owns and that are never free again. The two
    calls are one expression, so that an exception raised at the beginning of a line cannot come between them; `touch`
    returns None.
    """
    pool.touch(blocks) or pool.free_blocks(blocks[::-1])


def hide_from_cache_stats(manager: Any) -> None:
    """Keep probes out of vLLM's prefix-cache metrics."""
    record = getattr(manager, "record_prefix_cache_stats", None)
    if record is None:
        _look_up_unrecorded(manager)
        return

    def record_unless_probe(request: Any, *args: Any, **kwargs: Any) -> None:
        if not is_probe(request.request_id):
            record(request, *args, **kwargs)

    manager.record_prefix_cache_stats = record_unless_probe


def _look_up_unrecorded(manager: Any) -> None:
    """Keep probes out of the prefix-cache metrics of vLLM up to 0.26, which records each request when it looks the
    request up."""
    lookup = manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        records = manager.log_stats
        manager.log_stats = records and not is_probe(request.request_id)
        try:
            return lookup(request, *args, **kwargs)
        finally:
            manager.log_stats = records

    manager.get_computed_blocks = get_computed_blocks


def share_blocks(scheduler: Scheduler, shared_with: Callable[[str], tuple[str, int] | None], guard: Guard) -> bool:
    """Let probes start on their parent's KV blocks, including a last block that is partly filled. Return False if this
    engine does not support shared blocks.

    vLLM treats the partly filled block as a partial prefix hit: the block is copied on write, so neither request sees
    what the other writes.

    shared_with: returns, for a request id, the parent's id and how many of the parent's tokens are shared; None for a
    request that shares nothing. guard: runs the lookup, which vLLM calls inside `schedule`.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager: Any = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    one_kind = len(groups) == 1 and type(groups[0]) is FullAttentionManager
    if not (manager.enable_caching and one_kind):
        return False
    block_size, lookup = groups[0].block_size, manager.get_computed_blocks

    @hook(agent_pb2.FAULT_CAUSE_SHARED_BLOCKS)
    def shared_blocks(request_id: str, hit: Any) -> Any:
        if (shared := shared_with(request_id)) is None:
            return hit
        other, tokens = shared
        (blocks,) = manager.get_blocks(other).blocks or ((),)
        needed = -(-tokens // block_size)
        if len(blocks) < needed:
            return hit
        return (manager.create_kv_cache_blocks((list(blocks[:needed]),)), tokens, *hit[2:])

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        hit = lookup(request, *args, **kwargs)
        return guard.run(shared_blocks, request.request_id, hit) or hit

    manager.get_computed_blocks = get_computed_blocks
    return True
