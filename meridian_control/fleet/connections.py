"""Holds the open connections of one replica, also by engine id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.fleet.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Collection

    from meridian_control.engine.session import Session


class Connections(set[Connection]):
    """The open connections, except those that a newer stream of the same process has replaced.

    counted: the open connections and the replaced ones, until they end, so that sums of counters never fall.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_engine: dict[str, set[Connection]] = {}
        self.counted: set[Connection] = set()

    def connect(self, connection: Connection) -> None:
        self.add(connection)
        self._by_engine.setdefault(connection.session.hello.engine_id, set()).add(connection)
        self.counted.add(connection)

    def disconnect(self, connection: Connection) -> None:
        """Remove a connection, which still counts."""
        engine_id = connection.session.hello.engine_id
        self.discard(connection)
        others = self._by_engine.get(engine_id, set())
        others.discard(connection)
        if not others:
            self._by_engine.pop(engine_id, None)

    @property
    def sessions(self) -> list[Session]:
        return [connection.session for connection in self]

    def of_engine(self, engine_id: str) -> Collection[Connection]:
        """Return the connections of all processes that have this engine id."""
        return self._by_engine.get(engine_id, ())

    def of_process(self, identity: tuple[str, str]) -> list[Connection]:
        """Return the connections of an engine's process. identity: engine id and incarnation."""
        return [c for c in self.of_engine(identity[0]) if c.session.identity == identity]

    def namesake(self, session: Session) -> str:
        """Return the incarnation of another process that has a stream under the session's engine id; empty for none."""
        others = (c.session.hello.incarnation for c in self.of_engine(session.hello.engine_id))
        return next((other for other in others if other != session.hello.incarnation), "")

    def sharing_name(self) -> int:
        """Return the number of connected engines that have the name of another connected engine."""
        named = [{c.session.hello.incarnation for c in same} for same in self._by_engine.values()]
        return sum(len(incarnations) for incarnations in named if len(incarnations) > 1)
