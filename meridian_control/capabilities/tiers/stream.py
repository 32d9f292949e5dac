"""Sends an engine the eviction tiers of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.capabilities.tiers import rule
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream, Turn


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
            return self._send(rule.unreachable(table), "reusable", tier, False, turn) if revises else None
        slots, tier = rule.newly_unreachable(self._can, table), agent_pb2.EVICTION_TIER_UNREACHABLE
        if revises:
            # All tiers are sent again, also those of requests that answer by now.
            slots = np.union1d(slots, rule.unreachable(table))
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
