"""AgentService over the fleet: one call of Connect for each engine. Runs on the event loop of the gRPC server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_control.access.client_faults import CONNECTIONS, ClientFaults
from meridian_control.access.interceptor import host_of
from meridian_control.access.roles import caller
from meridian_control.common.errors import InvalidRequest, MeridianError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc

    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

# A stream must begin within this time.
HELLO_S = 10.0


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """One call of Connect per engine. `refresh` brings what the store holds to the fleet, for `Fleet.join`."""

    def __init__(self, fleet: Fleet, faults: ClientFaults, refresh: Callable[[], Awaitable[None]]) -> None:
        self._fleet, self._faults, self._refresh = fleet, faults, refresh

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        try:
            first = await _first(request_iterator)
            if first is None or first.WhichOneof("message") != "hello":
                raise InvalidRequest("message", "must begin with hello")
            caller.get().check_engine(first.hello.engine_id)
            connection = self._fleet.join(first.hello, self._refresh)
        except MeridianError as error:
            self._fleet.count_end(error.code)
            raise
        reader = asyncio.create_task(self._read(connection, request_iterator))
        # Engine ids are the caller's to choose: there may be no end of them.
        told = self._faults.may_log(host_of(context.peer()), "connections", CONNECTIONS)
        if told:
            logger.info("engine %s connected (%s)", first.hello.engine_id, first.hello.incarnation)
        reason = "agent_closed"
        try:
            while (response := await connection.outgoing.get()) is not None:
                yield response
            if reader.done() and (failed := reader.exception()) is not None:
                reason = failed.code if isinstance(failed, MeridianError) else MeridianError.code
                raise failed
            reason = connection.closing or ("overflow" if connection.overflowed else "agent_closed")
        except (asyncio.CancelledError, GeneratorExit):
            reason = "disconnected"
            raise
        finally:
            reader.cancel()
            self._fleet.leave(connection, reason)
            if told:
                logger.info("engine %s left: %s", first.hello.engine_id, reason)

    async def _read(self, connection: Connection, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        try:
            async for request in requests:
                self._fleet.receive(connection, request)
                if connection.overflowed:
                    return
        except Exception as error:
            error.add_note(f"engine {connection.session.hello.engine_id}")
            raise
        finally:
            await connection.outgoing.put(None)


async def _first(requests: AsyncIterator[agent_pb2.ConnectRequest]) -> agent_pb2.ConnectRequest | None:
    """Raises for a caller that says nothing: it must not keep an engine's place."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            return await anext(aiter(requests), None)
    return None
