"""Serves all gRPC services behind one gate, and gRPC health. All methods run on the control plane's event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1._async import HealthServicer  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]
from meridian.v1 import (
    agent_pb2_grpc,
    audit_pb2_grpc,
    fleet_pb2_grpc,
    freeze_pb2_grpc,
    policy_pb2_grpc,
    rollout_pb2_grpc,
)

from meridian_control.server import grpc_server
from meridian_control.server.agent_service import CONNECT_METHOD, AgentService, parse
from meridian_control.server.audit_log import AuditLog
from meridian_control.server.audit_service import AuditService
from meridian_control.server.client_faults import ClientFaults
from meridian_control.server.fleet_service import FleetService
from meridian_control.server.freeze_service import FreezeService
from meridian_control.server.interceptor import Gate
from meridian_control.server.policy_service import PolicyService
from meridian_control.server.rate_limits import CallLimits, Limiter
from meridian_control.server.roles import Access
from meridian_control.server.rollout_service import RolloutService

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    import grpc

    from meridian_control.fleet.freeze_store import FreezeStore
    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.policy.store import PolicyStore
    from meridian_control.rollout.driver import Rollouts

SERVER_OPTIONS = [
    # Agents ping every 30 s without calls; a stricter server drops them with ENHANCE_YOUR_CALM.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    # Connections without a handshake, or without a call for a while, are closed.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 5 * 60_000),
    # A handshake checks what the gate does not check again, such as whether the CA of a certificate is still trusted.
    # The limit is long, because an engine whose stream ends may go to another replica, where nothing is known of its
    # requests. gRPC adds jitter to the limit.
    ("grpc.max_connection_age_ms", 24 * 3_600_000),
    ("grpc.max_connection_age_grace_ms", 30_000),
    ("grpc.max_receive_message_length", 16 << 20),
    # Without this, gRPC pings the agent for each report, to learn how large its window should be.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
]
SERVICES = tuple(f"meridian.v1.{name}Service" for name in ("Agent", "Policy", "Fleet", "Audit", "Freeze", "Rollout"))


class ControlServer:
    """The gRPC server with all services behind a gate. `start` binds the address and `stop` drains the server.

    clock: gives the time of day. access and limits: the defaults of their classes if None. interceptors: interceptors
    that run before the gate.
    """

    def __init__(
        self,
        store: PolicyStore,
        whole: WholeFleet,
        rollouts: Rollouts,
        freezes: FreezeStore,
        clock: Callable[[], datetime],
        *,
        access: Access | None,
        limits: CallLimits | None,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        self._fleet, faults = whole.fleet, ClientFaults()
        audit, limiter = AuditLog(store.database, clock), Limiter(limits or CallLimits())
        parsers = {CONNECT_METHOD: parse}
        self.gate = Gate(access or Access(), limiter, audit, faults, parsers=parsers)
        self._watching, self._health = FleetService(whole), HealthServicer()
        self._probed: grpc.aio.Server | None = None
        self._server = server = grpc_server.server(SERVER_OPTIONS, [*interceptors, self.gate])
        agent = AgentService(whole.fleet, faults, rollouts.look, whole.engines, limiter.seat)
        policy = PolicyService(store, clock, whole.fleet.set_policy, whole.fleet.views.subject, whole.explain)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(agent, server)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(policy, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self._watching, server)
        audit_pb2_grpc.add_AuditServiceServicer_to_server(AuditService(audit), server)
        freeze_pb2_grpc.add_FreezeServiceServicer_to_server(FreezeService(freezes, whole.fleet.clock), server)
        rollout = RolloutService(rollouts, whole.engines)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def start(self, listen: str, tls: grpc.ServerCredentials | None = None, health: str = "") -> int:
        """Serve on the address `listen` and return the port. Raises OSError if an address cannot be bound.

        health: address that serves gRPC health alone and without TLS, for probes that do not support TLS; none if
        empty.
        """
        if health:
            self._probed = grpc_server.server([("grpc.so_reuseport", 0)], [self.gate])
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
            _bind(self._probed, health)
            await self._probed.start()
        port = _bind(self._server, listen, tls)
        await self._server.start()
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace_s: float) -> None:
        """Set health to NOT_SERVING, send a GoingAway to each stream, and close the server within the grace period."""
        await self._health.enter_graceful_shutdown()
        self._watching.end_watches()
        self._fleet.close("the control plane is shutting down")
        await self._server.stop(grace_s)
        await self.gate.settle()
        await self._fleet.tasks.settle()
        self.gate.faults.summarise()
        if self._probed is not None:
            await self._probed.stop(None)


def _bind(server: grpc.aio.Server, listen: str, tls: grpc.ServerCredentials | None = None) -> int:
    """Let a server listen on an address and return the port. Raises OSError."""
    try:
        return server.add_secure_port(listen, tls) if tls else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {str(error).partition(';')[0]}") from error
