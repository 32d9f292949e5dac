"""Probes and vLLM's prefix cache: probes begin on the KV of their request, and vLLM's metrics do not count them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.guard import hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_agent.core.guard import Guard


def hide_from_cache_stats(manager: Any, prefix: str) -> None:
    """Keep requests out of vLLM's prefix-cache metrics, by what their ids begin with."""
    record = getattr(manager, "record_prefix_cache_stats", None)
    if record is None:
        _look_up_unrecorded(manager, prefix)
        return

    def record_unless_hidden(request: Any, *args: Any, **kwargs: Any) -> None:
        if not request.request_id.startswith(prefix):
            record(request, *args, **kwargs)

    manager.record_prefix_cache_stats = record_unless_hidden


def _look_up_unrecorded(manager: Any, prefix: str) -> None:
    """The same up to 0.26, where looking up is what records."""
    lookup = manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        records = manager.log_stats
        manager.log_stats = records and not request.request_id.startswith(prefix)
        try:
            return lookup(request, *args, **kwargs)
        finally:
            manager.log_stats = records

    manager.get_computed_blocks = get_computed_blocks


def share_blocks(scheduler: Any, shared_with: Callable[[str], tuple[str, int] | None], guard: Guard) -> bool:
    """Let some requests begin on the KV of another, a last block that is not full included; whether this engine can.

    shared_with: by request id, the other request and how many of its tokens. vLLM takes such a block as a partial
    prefix hit: it is copied on write, so neither request sees what the other writes. guard: runs this, in the midst of
    `schedule`.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    one_kind = len(groups) == 1 and type(groups[0]) is FullAttentionManager
    if not (manager.enable_caching and one_kind):
        return False
    block_size, lookup = groups[0].block_size, manager.get_computed_blocks

    @hook(agent_pb2.FAULT_CAUSE_SHARED_BLOCKS)
    def shared_blocks(request_id: str, found: Any) -> Any:
        if (shared := shared_with(request_id)) is None:
            return found
        other, tokens = shared
        (blocks,) = manager.get_blocks(other).blocks or ((),)
        needed = -(-tokens // block_size)
        if len(blocks) < needed:
            return found
        return (manager.create_kv_cache_blocks((list(blocks[:needed]),)), tokens, *found[2:])

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = lookup(request, *args, **kwargs)
        return guard.run(shared_blocks, request.request_id, found) or found

    manager.get_computed_blocks = get_computed_blocks
    return True
