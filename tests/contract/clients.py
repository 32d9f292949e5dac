"""Clients of a control plane's services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]
from meridian.v1 import (
    agent_pb2_grpc,
    audit_pb2_grpc,
    fleet_pb2_grpc,
    freeze_pb2_grpc,
    policy_pb2_grpc,
    rollout_pb2_grpc,
)

# Without this option channels share connections, and a control plane that is killed fails the calls of other channels
# too.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


class Clients:
    """The stubs of the control plane's services over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.agent: Any = agent_pb2_grpc.AgentServiceStub(channel)
        self.audit: Any = audit_pb2_grpc.AuditServiceStub(channel)
        self.fleet: Any = fleet_pb2_grpc.FleetServiceStub(channel)
        self.freeze: Any = freeze_pb2_grpc.FreezeServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.policy: Any = policy_pb2_grpc.PolicyServiceStub(channel)
        self.rollout: Any = rollout_pb2_grpc.RolloutServiceStub(channel)


@asynccontextmanager
async def calling(target: str, options: list[tuple[str, Any]] | None = None) -> AsyncIterator[Clients]:
    """Yield the clients of a server without TLS."""
    async with grpc.aio.insecure_channel(target, options) as channel:
        yield Clients(channel)
