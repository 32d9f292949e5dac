"""Keeps what was counted of each engine's connection at the previous look at the fleet, so that the growth since can be
told.

An engine's counters begin again with each of its connections, so only counters of one connection may be subtracted from
each other. The module does not know what is counted. Time is passed in.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian.v1 import fleet_pb2

Counted = TypeVar("Counted")


class PreviousLook(Generic[Counted]):
    def __init__(self) -> None:
        # Time of the connection and its counters, by engine id and incarnation.
        self._kept: dict[tuple[str, str], tuple[datetime, Counted]] = {}
        self._looked_at: datetime | None = None

    def of(self, engine: fleet_pb2.Engine, nothing: Counted) -> Counted | None:
        """Return what was counted of the engine's connection at the previous look, and `nothing` if the connection has
        begun since. None if that is not known: at the first look, and if the previous look did not show the engine."""
        connected_at = engine.connect_time.ToDatetime(UTC)
        kept = self._kept.get((engine.engine_id, engine.incarnation))
        if kept is not None and kept[0] == connected_at:
            return kept[1]
        return nothing if self._looked_at is not None and connected_at > self._looked_at else None

    def replace(self, look: Iterable[tuple[fleet_pb2.Engine, Counted]], now: datetime) -> None:
        """Keep a look at the fleet for the next one."""
        self._kept = {
            (engine.engine_id, engine.incarnation): (engine.connect_time.ToDatetime(UTC), counted)
            for engine, counted in look
        }
        self._looked_at = now
