"""Hands what an engine's stream leaves to the next stream of the same engine process: networks and proxies end
streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from meridian_control.engine.session import Session
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet

T = TypeVar("T")

# Seconds after the end of a stream for which it is kept what the stream has left.
KEPT_S = 60.0
# Most entries of all streams together that are kept.
MAX_ENTRIES = 100_000


class LeftBehind(Generic[T]):
    """Keeps what the newest stream of each engine process leaves to the process's next stream on the same replica.

    leave: takes from a session what its stream leaves, as entries by what tells them apart; the session has not closed
    yet. drop: is called with the entries that no stream takes in time.
    """

    def __init__(
        self,
        fleet: Fleet,
        leave: Callable[[Session], dict[Any, T]],
        drop: Callable[[Iterable[T]], None] = lambda entries: None,
    ) -> None:
        self._fleet, self._leave, self._drop = fleet, leave, drop
        # By engine id and incarnation, in the order in which streams ended: the time of that, and the entries.
        self._left: dict[tuple[str, str], tuple[datetime, dict[Any, T]]] = {}
        self._count = 0

    def taken_by(self, connection: Connection) -> dict[Any, T]:
        """Return what a stream that begins finds. A part calls it from `FleetPart.joined`."""
        self.forget()
        identity = connection.session.identity
        found = self._pop(identity)
        # The older stream may have ended without having been found to.
        for replaced in self._fleet.connections.of_process(identity):
            found = self._leave(replaced.session)
        return found

    def left_by(self, connection: Connection, replaced: bool) -> None:
        """Keep what a stream leaves that has ended. A part calls it from `FleetPart.left`. replaced: whether a newer
        stream has taken that."""
        session = connection.session
        if not replaced and (entries := self._leave(session)):
            self._left[session.identity] = self._fleet.clock(), entries
            self._count += len(entries)
        self.forget()

    def forget(self) -> None:
        """Drop what has been kept for KEPT_S, and the oldest entries of more than MAX_ENTRIES."""
        now = self._fleet.clock()
        while self._left:
            identity, (left_at, _) = next(iter(self._left.items()))
            if (now - left_at).total_seconds() <= KEPT_S and self._count <= MAX_ENTRIES:
                return
            self._drop(self._pop(identity).values())

    def _pop(self, identity: tuple[str, str]) -> dict[Any, T]:
        _, entries = self._left.pop(identity, (None, {}))
        self._count -= len(entries)
        return entries
