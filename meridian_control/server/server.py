"""grpc.aio adapters: each turns RPCs into calls of the fleet and back. One event loop runs everything here."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1._async import HealthServicer  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]
from meridian.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    audit_pb2,
    audit_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    freeze_pb2,
    freeze_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
)

from meridian_control.access.audit_log import AuditLog
from meridian_control.access.client_faults import CONNECTIONS, ClientFaults
from meridian_control.access.interceptor import Gate, host_of
from meridian_control.access.rate_limits import CallLimits, Limiter
from meridian_control.access.roles import Access, caller
from meridian_control.cluster import decision_queries
from meridian_control.common.errors import InvalidRequest, MeridianError
from meridian_control.common.paging import page
from meridian_control.fleet.freeze_store import FreezeStore
from meridian_control.rollout.driver import Rollouts
from meridian_control.rollout.store import RolloutStore
from meridian_control.server import grpc_server
from meridian_control.server.audit_service import AuditService
from meridian_control.server.freeze_service import FreezeService
from meridian_control.server.policy_service import PolicyService
from meridian_control.server.rollout_service import RolloutService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import datetime

    import grpc

    from meridian_control.cluster.cluster_fleet import WholeFleet
    from meridian_control.fleet.fleet import Connection, Fleet
    from meridian_control.policy.store import PolicyStore

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

Shown = TypeVar("Shown")
Paged: TypeAlias = fleet_pb2.ListEnginesRequest | fleet_pb2.ListRequestsRequest

WATCH_MS, MIN_WATCH_MS = 1000, 50
SERVER_OPTIONS = [
    # Agents ping every 30 s without calls; a stricter server drops them with ENHANCE_YOUR_CALM.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    # A caller that opens a connection and says nothing, or makes no call for a while, does not keep it.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 5 * 60_000),
    # Streams move to other replicas now and then; gRPC adds its own jitter.
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 30_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.so_reuseport", 0),
]
# A stream must begin within this time.
HELLO_S = 10.0
SERVICES = (
    agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name,
    policy_pb2.DESCRIPTOR.services_by_name["PolicyService"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name,
    audit_pb2.DESCRIPTOR.services_by_name["AuditService"].full_name,
    freeze_pb2.DESCRIPTOR.services_by_name["FreezeService"].full_name,
    rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,
)


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """One call of Connect per engine."""

    def __init__(self, fleet: Fleet, faults: ClientFaults) -> None:
        self._fleet, self._faults = fleet, faults

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        try:
            first = await _first(request_iterator)
            if first is None or first.WhichOneof("message") != "hello":
                raise InvalidRequest("message", "must begin with hello")
            caller.get().check_engine(first.hello.engine_id)
            connection = self._fleet.join(first.hello)
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


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    def __init__(self, whole: WholeFleet, stopped: asyncio.Event) -> None:
        self._whole, self._stopped = whole, stopped

    async def ListEngines(  # noqa: N802
        self, request: fleet_pb2.ListEnginesRequest, context: Context
    ) -> fleet_pb2.ListEnginesResponse:
        engines, unreachable = await self._whole.engines(request.local_only)
        shown, token = self._page(engines, request)
        return fleet_pb2.ListEnginesResponse(engines=shown, next_page_token=token, unreachable_replicas=unreachable)

    async def ListRequests(  # noqa: N802
        self, request: fleet_pb2.ListRequestsRequest, context: Context
    ) -> fleet_pb2.ListRequestsResponse:
        found, unreachable = await self._whole.requests(request.engine_id, request.local_only)
        shown, token = self._page(found, request)
        return fleet_pb2.ListRequestsResponse(requests=shown, next_page_token=token, unreachable_replicas=unreachable)

    @staticmethod
    def _page(found: list[Shown], request: Paged) -> tuple[list[Shown], str]:
        """The part that was asked for, and the next page's token; all of it where a replica asks."""
        if request.local_only:
            return found, ""
        begin, end, token = page(len(found), request.page_size, request.page_token)
        return found[begin:end], token

    async def WatchFleet(  # noqa: N802
        self, request: fleet_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        if request.interval_ms < 0:
            raise InvalidRequest("interval_ms", f"must be at least 0; got {request.interval_ms}")
        interval_s = max(MIN_WATCH_MS, request.interval_ms or WATCH_MS) / 1000
        clock = asyncio.get_running_loop().time
        while not self._stopped.is_set() and not context.cancelled():
            yield await (self._whole.state(local_only=True) if request.local_only else self._whole.watched())
            # At times that are the same for all: they share a look.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), interval_s - clock() % interval_s)

    async def ExplainRequest(  # noqa: N802
        self, request: fleet_pb2.ExplainRequestRequest, context: Context
    ) -> fleet_pb2.ExplainRequestResponse:
        return await decision_queries.explain(self._whole, request)

    async def ListDecisions(  # noqa: N802
        self, request: fleet_pb2.ListDecisionsRequest, context: Context
    ) -> fleet_pb2.ListDecisionsResponse:
        return await decision_queries.decisions(self._whole, request)

    async def RecordTrace(  # noqa: N802
        self, request: fleet_pb2.RecordTraceRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.RecordTraceResponse]:
        logger.info("recording begins: %s", request.engine_id or "all engines")
        try:
            async with self._whole.recording(request.engine_id, request.local_only) as recording:
                # Headers first: a client knows from them that the recording has begun.
                await context.send_initial_metadata(())
                async for record in recording.records():
                    yield fleet_pb2.RecordTraceResponse(record=record, unreachable_replicas=recording.unreachable)
        finally:
            logger.info("recording ended: %s", request.engine_id or "all engines")


class ControlServer:
    """The gRPC server with all services. `start` binds, `stop` drains."""

    def __init__(
        self,
        store: PolicyStore,
        whole: WholeFleet,
        clock: Callable[[], datetime],
        access: Access | None = None,
        limits: CallLimits | None = None,
        *,
        rollouts: Rollouts | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._fleet = fleet = whole.fleet
        self.freezes = FreezeStore(store.database, clock, fleet.set_freezes)
        self._stopped = asyncio.Event()
        self._health = HealthServicer()
        audit = AuditLog(store.database, clock)
        self.faults = ClientFaults()
        self._gate = Gate(access or Access(), Limiter(limits or CallLimits()), audit, self.faults)
        self._server = grpc_server.server(SERVER_OPTIONS, [*interceptors, self._gate])
        self._probed: grpc.aio.Server | None = None
        agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(fleet, self.faults), self._server)
        policy_service = PolicyService(store, clock, fleet.set_policy, fleet.subject, whole.explain)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(policy_service, self._server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(whole, self._stopped), self._server)
        audit_pb2_grpc.add_AuditServiceServicer_to_server(AuditService(audit), self._server)
        freeze_pb2_grpc.add_FreezeServiceServicer_to_server(FreezeService(self.freezes, clock), self._server)
        rollouts = rollouts or Rollouts(RolloutStore(store), fleet, clock, whole.known_engines, whole.leads)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutService(rollouts, clock), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def _serve_health(self, listen: str) -> None:
        """Without TLS, for probes that do not speak it."""
        self._probed = grpc_server.server([("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
        try:
            self._probed.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {str(error).partition(';')[0]}") from error
        await self._probed.start()

    async def start(self, listen: str, tls: grpc.ServerCredentials | None = None, health: str = "") -> int:
        """Bind and serve, at `health` health alone; returns the port.

        Raises OSError when an address cannot be had, StoreUnavailable.
        """
        if health:
            await self._serve_health(health)
        await self.freezes.look()
        try:
            port: int = self._server.add_secure_port(listen, tls) if tls else self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {str(error).partition(';')[0]}") from error
        await self._server.start()
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace_s: float) -> None:
        """Health goes NOT_SERVING, streams get a GoingAway, then everything closes within the grace period."""
        await self._health.enter_graceful_shutdown()
        self._stopped.set()
        self._fleet.going_away("the control plane is shutting down")
        await self._server.stop(grace_s)
        await self._gate.settle()
        await self._fleet.settle()
        self.faults.summarise()
        if self._probed is not None:
            await self._probed.stop(None)
