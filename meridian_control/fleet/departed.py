"""Keeps engines whose stream has ended, so that FleetService shows them for a while.

The number, size and age of the kept engines are bounded, so that a flood of short streams costs little memory. The
module also computes the state that a kept engine is in if its process still runs. Time is passed in. All code runs on
the server's event loop.
"""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import agent_pb2, fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

# Seconds for which an engine is kept after its stream ended, unless the bounds below make it go earlier.
FORGET_AFTER_S = 600.0
MAX_ENGINES, MAX_BYTES = 1024, 2 << 20


class _Gone(NamedTuple):
    """An engine whose stream has ended.

    time: end of the stream. engine: the serialised message, a sixth of the message's size in memory. lease_s: seconds
    after the end of the stream for which the agent still obeys its decisions. lost: whether the stream broke off.
    began_ns: begin of the stream, in Unix time.
    """

    time: datetime
    engine: bytes
    lease_s: float
    lost: bool
    began_ns: int

    def is_recent(self, now: datetime) -> bool:
        return (now - self.time).total_seconds() <= FORGET_AFTER_S

    def view(self, now: datetime) -> fleet_pb2.Engine:
        """Return the engine with the state that it is in now if its process still runs."""
        engine = fleet_pb2.Engine.FromString(self.engine)
        comes_back = engine.HasField("recover_time") and now >= engine.recover_time.ToDatetime(UTC)
        if engine.agent_state != agent_pb2.AGENT_STATE_OFF or comes_back:
            expired = (now - self.time).total_seconds() > self.lease_s
            engine.agent_state = agent_pb2.AGENT_STATE_DEGRADED if expired else agent_pb2.AGENT_STATE_STALE
        return engine


class Departed:
    """The engines whose stream has ended, by id, in the order in which their streams ended."""

    def __init__(self) -> None:
        self._gone: dict[str, _Gone] = {}
        self._bytes = 0

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._gone

    def __len__(self) -> int:
        return len(self._gone)

    def add_engine(self, engine: fleet_pb2.Engine, lease_s: float, now: datetime) -> None:
        """Keep an engine, unless a newer stream of it has ended already: a large session closes late. engine: its last
        state. lease_s: seconds for which its agent still obeys its decisions."""
        kept, began_ns = self._gone.get(engine.engine_id), engine.connect_time.ToNanoseconds()
        if kept is not None and kept.began_ns > began_ns:
            return
        self.remove(engine.engine_id)
        gone = _Gone(now, engine.SerializeToString(), lease_s, engine.lost, began_ns)
        self._gone[engine.engine_id] = gone
        self._bytes += len(gone.engine)

    def remove(self, engine_id: str) -> None:
        """Drop an engine that has connected again."""
        if (gone := self._gone.pop(engine_id, None)) is not None:
            self._bytes -= len(gone.engine)

    def forget(self, now: datetime) -> list[str]:
        """Drop the oldest engines while the bounds are exceeded, and return their ids."""
        forgotten = []
        while self._gone:
            engine_id, first = next(iter(self._gone.items()))
            too_many = len(self._gone) > MAX_ENGINES or self._bytes > MAX_BYTES
            if not too_many and first.is_recent(now):
                break
            self.remove(engine_id)
            forgotten.append(engine_id)
        return forgotten

    def views(self, now: datetime) -> Iterator[fleet_pb2.Engine]:
        """Yield each engine that left at most FORGET_AFTER_S ago, with the state that it is in now if its process still
        runs."""
        return (gone.view(now) for gone in self._gone.values() if gone.is_recent(now))

    def lost(self) -> Iterator[tuple[datetime, fleet_pb2.Engine]]:
        """Yield each engine whose stream broke off, with the time at which it did."""
        for gone in self._gone.values():
            if gone.lost:
                yield gone.time, fleet_pb2.Engine.FromString(gone.engine)
