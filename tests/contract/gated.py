"""A gRPC server behind the control plane's gate, open to everybody, for tests of single services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import grpc

from meridian_control.server.audit_log import AuditLog
from meridian_control.server.interceptor import Gate
from meridian_control.server.rate_limits import CallLimits, Limiter
from meridian_control.server.roles import Access
from meridian_control.storage.database import Database


@asynccontextmanager
async def gated(database: Database) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """Yield a server, to which the caller adds services before starting it, and its address; stop the server at the
    end."""
    gate = Gate(Access(), Limiter(CallLimits()), AuditLog(database, lambda: datetime.now(UTC)))
    server = grpc.aio.server(interceptors=[gate])
    port = server.add_insecure_port("127.0.0.1:0")
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await gate.settle()
