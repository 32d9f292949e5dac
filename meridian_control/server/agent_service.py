"""Implements AgentService: each agent holds one call of Connect. All methods run on the gRPC server's event loop."""

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

# Seconds within which an agent must send its Hello on a new stream.
HELLO_S = 10.0


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The servicer. `refresh` brings the newest state of the store to the fleet; `Fleet.join` may call it."""

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
            if connection.failure is not None:
                reason = MeridianError.code
                raise connection.failure
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
    """Return the first message of a stream, None if the stream ends or HELLO_S pass without one.

    The timeout keeps a silent caller from occupying the place of an engine.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            return await anext(aiter(requests), None)
    return None
