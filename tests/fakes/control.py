"""A control plane of one replica in the test's process: the parts that `meridian-control` has, without its flags."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from meridian_control.app.assembly import Parts, build
from meridian_control.cluster.cluster_fleet import WholeFleet
from meridian_control.fleet.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_control.access.rate_limits import CallLimits
    from meridian_control.access.roles import Access
    from meridian_control.policy.store import PolicyStore


def utc_now() -> datetime:
    return datetime.now(UTC)


def control_plane(
    store: PolicyStore,
    clock: Callable[[], datetime] = utc_now,
    *,
    replica_id: str = "alone",
    leads: Callable[[], bool] = lambda: True,
    access: Access | None = None,
    limits: CallLimits | None = None,
) -> Parts:
    """A control plane that has not started: `look` and `server.start` start it."""
    fleet = Fleet(clock, revision=store.get)
    return build(store, WholeFleet(fleet, replica_id, None, leads), clock, access, limits)


async def kill(parts: Parts) -> None:
    """End the server without a word to anybody; no database connection in use is left behind."""
    await parts.server._server.stop(None)
    await parts.gate.settle()
    await parts.whole.fleet.settle()
