"""Engines whose stream has ended: shown for a while, few enough and small enough that a flood of them costs little.

Owns how many are kept, how long, and the state that each is in if it lives. Knows nothing of streams or sessions. Time
is passed in; belongs to the server's event loop.
"""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import agent_pb2, fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

# An engine that went away is shown for this long, unless so many went after it.
FORGET_AFTER_S = 600.0
MAX_ENGINES, MAX_BYTES = 1024, 2 << 20


class _Gone(NamedTuple):
    """An engine as a message in bytes, which are a sixth of its size in memory, when its stream ended, and for how long
    it then goes on with what was decided."""

    time: datetime
    engine: bytes
    lease_s: float

    def view(self, now: datetime) -> fleet_pb2.Engine:
        """The engine as it is now, if it lives."""
        engine = fleet_pb2.Engine.FromString(self.engine)
        comes_back = engine.HasField("recover_time") and now >= engine.recover_time.ToDatetime(UTC)
        if engine.agent_state != agent_pb2.AGENT_STATE_OFF or comes_back:
            expired = (now - self.time).total_seconds() > self.lease_s
            engine.agent_state = agent_pb2.AGENT_STATE_DEGRADED if expired else agent_pb2.AGENT_STATE_STALE
        return engine


class Departed:
    """Engines by id, in the order in which they went."""

    def __init__(self) -> None:
        self._gone: dict[str, _Gone] = {}
        self._bytes = 0

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._gone

    def __len__(self) -> int:
        return len(self._gone)

    def add(self, engine: fleet_pb2.Engine, lease_s: float, now: datetime) -> None:
        """`engine` as it was last seen; `lease_s` is how long it goes on with what was decided."""
        self.remove(engine.engine_id)
        gone = self._gone[engine.engine_id] = _Gone(now, engine.SerializeToString(), lease_s)
        self._bytes += len(gone.engine)

    def remove(self, engine_id: str) -> None:
        """The engine is back, if it was gone."""
        if (gone := self._gone.pop(engine_id, None)) is not None:
            self._bytes -= len(gone.engine)

    def forget(self, now: datetime) -> list[str]:
        """Drop the engines that went first, while there are too many or the first went too long ago.

        Returns their ids.
        """
        forgotten = []
        while self._gone:
            engine_id, first = next(iter(self._gone.items()))
            too_many = len(self._gone) > MAX_ENGINES or self._bytes > MAX_BYTES
            if not too_many and (now - first.time).total_seconds() <= FORGET_AFTER_S:
                break
            self.remove(engine_id)
            forgotten.append(engine_id)
        return forgotten

    def views(self, now: datetime) -> Iterator[fleet_pb2.Engine]:
        """Each engine as it is now, if it lives."""
        return (gone.view(now) for gone in self._gone.values())
