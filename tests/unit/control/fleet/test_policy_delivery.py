"""A changed policy goes to a few engines at a time, so that reports of a large fleet do not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.errors import StoreUnavailable
from meridian_control.fleet import catching_up
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.turns import ENGINES_AT_ONCE
from meridian_control.policy.store import StoredRevision
from tests.fakes.control import utc_now
from tests.fakes.tables import policy
from tests.unit.control.capabilities.handover.engines import hello

if TYPE_CHECKING:
    import pytest


ENGINES, NEVER_S = 3 * ENGINES_AT_ONCE + 1, 3600.0


def stored(revision: int) -> StoredRevision:
    return StoredRevision(revision, "", "", "", utc_now(), policy())


async def test_a_store_that_is_away_is_logged_once_for_all_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catching_up, "RETRY_S", 0.0)
    fleet, readings = Fleet(utc_now, capabilities=CAPABILITIES), 0
    fleet.set_policy(stored(1))

    async def refresh() -> None:
        nonlocal readings
        readings += 1
        if readings <= 20:
            raise StoreUnavailable("policy store: away")

    for number in range(3):
        first = hello(f"engine-{number}", {})
        first.revision = 2
        fleet.join(first, refresh)
    await fleet.tasks.settle()
    assert caplog.messages == ["engine engine-0 has a newer policy than this replica: policy store: away"]
    assert readings == 21, "the engines do not read the store each for itself"
    assert [connection.session.revision for connection in fleet.connections] == [1, 1, 1]
