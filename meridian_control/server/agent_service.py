"""Implements AgentService: each agent holds one call of Connect. All methods run on the gRPC server's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_control.access.client_faults import CONNECTIONS, ClientFaults
from meridian_control.access.interceptor import host_of
from meridian_control.access.rate_limits import Rate
from meridian_control.access.roles import caller
from meridian_control.common.errors import InvalidRequest, MeridianError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc

    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

CONNECT_METHOD = "meridian.v1.AgentService/Connect"
# Snapshots that a stream may send: per second in the long run, and at once. Further ones wait.
SNAPSHOTS = (1.0, 4)
# Seconds after which a message counts as one that took long.
SLICE_S = 0.002
# Seconds within which an agent must send its Hello on a new stream.
HELLO_S = 10.0


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The servicer. `refresh` brings the newest state of the store to the fleet; `Fleet.join` may call it. `seat` takes
    a place among all engines, and raises TooMany."""

    def __init__(
        self,
        fleet: Fleet,
        faults: ClientFaults,
        refresh: Callable[[], Awaitable[None]],
        seat: Callable[[], ExitStack],
    ) -> None:
        self._fleet, self._faults, self._refresh, self._seat = fleet, faults, refresh, seat

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        who, place = caller.get().name or host_of(context.peer()), ExitStack()
        try:
            first = await _first(request_iterator)
            if first is None or first.WhichOneof("message") != "hello":
                raise InvalidRequest("message", "must begin with hello")
            caller.get().check_engine(first.hello.engine_id)
            place = self._seat()
            connection = self._fleet.join(first.hello, self._refresh, who)
        except MeridianError as error:
            place.close()
            self._fleet.count_end(error.code)
            raise
        reader = asyncio.create_task(self._read(connection, request_iterator))
        # Callers choose engine ids, so their number is unbounded and the log lines are rate-limited.
        told = self._faults.may_log(host_of(context.peer()), "connections", CONNECTIONS)
        if told:
            logger.info("engine %s connected (%s)", first.hello.engine_id, first.hello.incarnation)
        reason = "agent_closed"
        try:
            while (response := await connection.outgoing.get()) is not None:
                yield response
                if connection.overflowed and connection.outgoing.empty():
                    # Responses were left out, so the agent must come back with a snapshot.
                    break
            if reader.done() and (failed := reader.exception()) is not None:
                reason = failed.code if isinstance(failed, MeridianError) else MeridianError.code
                raise failed
            reason = connection.closing or ("overflow" if connection.overflowed else "agent_closed")
        except (asyncio.CancelledError, GeneratorExit):
            reason = "disconnected"
            raise
        finally:
            reader.cancel()
            place.close()
            self._fleet.leave(connection, reason)
            if told:
                logger.info("engine %s left: %s", first.hello.engine_id, reason)

    async def _read(self, connection: Connection, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        clock, turns, who = time.perf_counter, self._fleet.turns, connection.who
        snapshots = Rate(*SNAPSHOTS, time.monotonic())
        try:
            async for request in requests:
                if request.HasField("snapshot"):
                    while wait_s := snapshots.wait_s(time.monotonic()):
                        await asyncio.sleep(wait_s)
                if connection.busy:
                    await connection.free(turns)
                began_s = clock()
                for _ in self._fleet.receiving(connection, request):
                    await turns.next(who)
                # A message may have megabytes, and the next one may be long in coming.
                del request
                if connection.overflowed:
                    return
                if clock() - began_s > SLICE_S:
                    # Who takes long must not take in the next message before the others have had their turns.
                    await turns.next(who)
        except Exception as error:
            error.add_note(f"engine {connection.session.hello.engine_id}")
            raise
        finally:
            await connection.outgoing.put(None)


async def _first(requests: AsyncIterator[agent_pb2.ConnectRequest]) -> agent_pb2.ConnectRequest | None:
    """Return the first message of a stream, None if the stream ends or HELLO_S pass without one.

    The timeout keeps a silent caller from occupying the place of an engine.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            return await anext(aiter(requests), None)
    return None
