"""Defines eviction tiers, and finds the KV blocks of a finished request that cannot be hit again. Pure arithmetic over
block ids; runs on the engine-core thread."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Callable


class Tier(IntEnum):
    """The values of meridian.v1.EvictionTier."""

    REUSABLE = agent_pb2.EVICTION_TIER_REUSABLE
    UNREACHABLE = agent_pb2.EVICTION_TIER_UNREACHABLE


# The tiers that this agent knows; a newer control plane may send others.
TIERS = frozenset(map(int, Tier))


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
