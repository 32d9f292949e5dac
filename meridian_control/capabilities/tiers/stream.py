"""Decides which KV blocks are evicted first, and sends an engine the eviction tiers of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream, Turn
    from meridian_control.engine.request_table import RequestTable


class Tiers(Part):
    """The eviction tiers of one engine's requests."""

    def __init__(self, stream: Stream) -> None:
        self._can, self._table, self._ledger = stream.hello.capabilities, stream.table, stream.ledger
        self._revises = False

    def revise(self) -> None:
        self._revises = True

    def decide(self, turn: Turn) -> Sliced[None] | None:
        memory, table = turn.policy.kv_memory, self._table
        revises, self._revises = self._revises, False
        if not memory.enabled:
            tier = agent_pb2.EVICTION_TIER_REUSABLE
            return self._send(unreachable(table), "reusable", tier, False, turn) if revises else None
        slots, tier = newly_unreachable(self._can, table), agent_pb2.EVICTION_TIER_UNREACHABLE
        if revises:
            # All tiers are sent again, also those of requests that answer by now.
            slots = np.union1d(slots, unreachable(table))
        return self._send(slots, "unreachable", tier, memory.shadow, turn) if len(slots) else None

    def _send(
        self, slots: NDArray[np.intp], why: str, tier: agent_pb2.EvictionTier.ValueType, shadow: bool, turn: Turn
    ) -> Sliced[None]:
        self._table.put(slots, tier=tier)
        for count, slot in enumerate(slots.tolist(), 1):
            decision_id = self._ledger.make("tier", why, slot, shadow)
            turn.out.tiers.add(decision_id=decision_id, slot=slot, tier=tier, shadow=shadow)
            if not count % SLICE_ROWS:
                yield


def newly_unreachable(capabilities: agent_pb2.Capabilities, table: RequestTable) -> NDArray[np.intp]:
    """Return thinking slots that have another tier and whose finished blocks later prompts may be unable to hit; the
    agent decides so for each request when it ends."""
    if not (capabilities.reclaim and capabilities.template_strips_think):
        return np.zeros(0, np.intp)
    unmarked: NDArray[np.bool_] = table.thinking & (table.tier != agent_pb2.EVICTION_TIER_UNREACHABLE)
    return unmarked.nonzero()[0]


def unreachable(table: RequestTable) -> NDArray[np.intp]:
    """Return the slots whose blocks have been given up, in force or in shadow."""
    return np.flatnonzero(table.live & (table.tier == agent_pb2.EVICTION_TIER_UNREACHABLE))
