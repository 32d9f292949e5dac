"""Defines eviction tiers, and finds the KV blocks of a finished request that cannot be hit again. Pure arithmetic over
block ids; engine-core thread."""

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


# A newer control plane may send other tiers.
TIERS = frozenset(map(int, Tier))


def unreachable_blocks(
    block_ids: list[int], reachable_tokens: int, block_size: int, reference_count: Callable[[int], int]
) -> set[int]:
    """Blocks not wholly inside the first `reachable_tokens` tokens, without those another request shares.

    block_ids: the request's blocks in order. The next turn repeats the prompt and then differs, so every block from
    the first one that holds a generated token on has a hash no later prompt can reach.
    """
    kept = reachable_tokens // block_size
    return {b for b in block_ids[kept:] if reference_count(b) == 1}
