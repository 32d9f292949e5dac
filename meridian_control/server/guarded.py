"""Makes the gRPC server with all services and the gate before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meridian_control.server import agent_messages
from meridian_control.server.agent_service import CONNECT_METHOD, AgentService
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
from meridian_control.server.server import ControlServer, Services

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    import grpc

    from meridian_control.fleet.freeze_store import FreezeStore
    from meridian_control.fleet.whole_fleet import WholeFleet
    from meridian_control.policy.store import PolicyStore
    from meridian_control.rollout.driver import Rollouts


class Guarded(NamedTuple):
    """A server and its gate."""

    gate: Gate
    server: ControlServer


def guarded(
    store: PolicyStore,
    whole: WholeFleet,
    rollouts: Rollouts,
    freezes: FreezeStore,
    clock: Callable[[], datetime],
    *,
    access: Access | None,
    limits: CallLimits | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> Guarded:
    """Make the server. `clock` gives the time of day. access and limits: the defaults of their classes if None."""
    fleet, faults = whole.fleet, ClientFaults()
    audit, limiter = AuditLog(store.database, clock), Limiter(limits or CallLimits())
    services = Services(
        agent=AgentService(fleet, faults, rollouts.look, whole.engines, limiter.seat),
        policy=PolicyService(store, clock, fleet.set_policy, fleet.views.subject, whole.explain),
        fleet=FleetService(whole),
        audit=AuditService(audit),
        freeze=FreezeService(freezes, fleet.clock),
        rollout=RolloutService(rollouts, fleet.clock, whole.engines),
    )
    gate = Gate(access or Access(), limiter, audit, faults, parsers={CONNECT_METHOD: agent_messages.parse})
    return Guarded(gate, ControlServer(services, fleet, gate, interceptors))
