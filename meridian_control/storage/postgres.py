"""PostgreSQL connections, and notifications of changes that other replicas stored.

A notification says only that some data changed, and readers query for the change itself. A lost notification therefore
delays a change by at most POLL_S. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SCHEMES = ("postgresql://", "postgres://")
CHANNEL = "meridian_policy"
NOTIFY = f"SELECT pg_notify('{CHANNEL}', '')"
# Name in pg_stat_activity of the connection that receives notifications.
FOLLOWER = "meridian-control listens"
# Seconds for which a connection, a statement, or a free connection of the pool is waited for.
CALL_TIMEOUT_S = 10.0
# Seconds without a notification after which readers query anyway; the query also shows whether the server still runs.
POLL_S = 10.0
POOL_SIZE = 2


def create_engine(url: str) -> AsyncEngine:
    """Create an engine for `url`, which is read as libpq does, with sslmode, several hosts and PG* variables."""

    async def connect() -> Any:
        opening = asyncio.ensure_future(asyncpg.connect(url, timeout=CALL_TIMEOUT_S, command_timeout=CALL_TIMEOUT_S))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Cancelled itself, asyncpg leaves an error that nobody reads, which asyncio logs for each such caller.
            opening.add_done_callback(_drop)
            raise

    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connect,
        pool_pre_ping=True,
        pool_size=POOL_SIZE,
        pool_timeout=CALL_TIMEOUT_S,
        hide_parameters=True,
    )


def _drop(opening: asyncio.Future[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().terminate()


async def changes(url: str) -> AsyncGenerator[None, None]:
    """Yield now and whenever another replica may have changed something; raise if the connection is lost."""
    name = {"application_name": FOLLOWER}
    connection = await asyncpg.connect(
        url, timeout=CALL_TIMEOUT_S, command_timeout=CALL_TIMEOUT_S, server_settings=name
    )
    changed = asyncio.Event()
    try:
        await connection.add_listener(CHANNEL, lambda *_: changed.set())
        connection.add_termination_listener(lambda _: changed.set())
        while True:
            changed.clear()
            await connection.execute("SELECT 1")
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await changed.wait()
    finally:
        connection.terminate()
