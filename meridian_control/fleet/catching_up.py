"""Lets engines that know more than this replica wait until the replica has read the store again.

While the store does not answer, an engine keeps what it has. One reading serves all engines that wait for it, because
thousands may. All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from meridian_control.common.errors import MeridianError
from meridian_control.fleet.turns import in_turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from meridian_control.common.complaints import Complaints
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.turns import Tasks

# Seconds between two attempts to read from the store.
RETRY_S = 1.0


class CatchingUp:
    """The engines that wait.

    connections: the fleet's own set. serve: is called with each engine that is still connected once the store was read
    after it began to wait. complaints: logs the id of the engine that has waited longest, and the error.
    """

    def __init__(
        self,
        connections: Collection[Connection],
        tasks: Tasks,
        serve: Callable[[Connection], None],
        complaints: Complaints,
    ) -> None:
        self._connections, self._tasks, self._serve, self._complaints = connections, tasks, serve, complaints
        self._waiting: list[Connection] = []
        self._reading: asyncio.Task[None] | None = None

    def wait(self, connection: Connection, read: Callable[[], Awaitable[object]]) -> None:
        """Let an engine wait that connects. read: brings the newest state of the store to this replica, and raises
        MeridianError."""
        self._waiting.append(connection)
        if self._reading is None or self._reading.done():
            self._reading = self._tasks.start(self._read(read))

    async def _read(self, read: Callable[[], Awaitable[object]]) -> None:
        # An engine that connects is among the connections once this task runs.
        while waiting := [connection for connection in self._waiting if connection in self._connections]:
            self._waiting = list(waiting)
            try:
                await read()
            except MeridianError as error:
                self._complaints.log(error, waiting[0].session.hello.engine_id)
                await asyncio.sleep(RETRY_S)
                continue
            self._complaints.over()
            # Who came during the reading waits for the next one.
            del self._waiting[: len(waiting)]
            async for connection in in_turns(waiting):
                if connection in self._connections:
                    connection.when_free(partial(self._serve, connection))
        self._waiting = []
