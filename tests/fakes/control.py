"""A control plane of one replica in the test's process: the parts that `meridian-control` has, without its flags."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Protocol

from meridian_control.app.assembly import Parts, build
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.peers import Peers
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.policy.store import PolicyStore
from meridian_control.server.rate_limits import CallLimits
from meridian_control.server.roles import Access


def utc_now() -> datetime:
    return datetime.now(UTC)


def control_plane(
    store: PolicyStore,
    clock: Callable[[], datetime] = utc_now,
    *,
    time_of_day: Callable[[], datetime] | None = None,
    replica_id: str = "alone",
    leads: Callable[[], bool] = lambda: True,
    access: Access | None = None,
    limits: CallLimits | None = None,
) -> Parts:
    """Return a control plane that has not started; `look` and `server.start` start it. time_of_day: as `clock` by
    default."""
    fleet = Fleet(clock, revision=store.get, capabilities=CAPABILITIES)
    return build(store, WholeFleet(fleet, replica_id, None, leads), time_of_day or clock, access, limits)


async def kill(parts: Parts) -> None:
    """End the server without a GoingAway, and wait for calls that still use a database connection."""
    await parts.server._server.stop(None)
    await parts.gate.settle()
    await parts.whole.fleet.tasks.settle()


@asynccontextmanager
async def asking(live: list[Replica]) -> AsyncIterator[WholeFleet]:
    """Yield the fleet as a replica without engines knows it, which leads and asks the replicas in `live`."""
    peers = Peers(lambda: live, ClientCredentials())
    try:
        yield WholeFleet(Fleet(utc_now, capabilities=CAPABILITIES), "asking", peers, lambda: True)
    finally:
        await peers.close()


class Startable(Protocol):
    """A control plane of a test, which can be started and killed."""

    @property
    def store(self) -> PolicyStore: ...

    async def start(self) -> None: ...

    async def kill(self) -> None: ...


@asynccontextmanager
async def running(control: Startable) -> AsyncIterator[None]:
    """Start a control plane, and at the end kill it and close its store."""
    await control.start()
    try:
        yield
    finally:
        await control.kill()
        await control.store.database.close()
