"""A changed policy goes to a few engines at a time, so that reports of a large fleet do not wait for it."""

from __future__ import annotations

import asyncio

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.errors import StoreUnavailable
from meridian_control.common.slices import at_once
from meridian_control.fleet import catching_up
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.turns import ENGINES_AT_ONCE
from meridian_control.policy.store import StoredRevision
from tests.fakes.control import utc_now
from tests.fakes.tables import policy
from tests.unit.control.capabilities.handover.engines import hello

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


async def test_each_refused_revision_leads_to_the_last_good_one() -> None:
    """Also if the engine refuses two revisions while the store is slow: without a policy, its requests are governed by
    nobody until it connects again."""
    readings, answers = asyncio.Queue[int](), asyncio.Event()

    async def read(revision: int) -> StoredRevision:
        readings.put_nowait(revision)
        await answers.wait()
        return stored(revision)

    fleet = Fleet(utc_now, capabilities=CAPABILITIES, revision=read)
    fleet.set_policy(stored(2))
    first = hello("engine", {})
    first.revision = 1
    connection = fleet.join(first)
    session = connection.session

    def answer(error: str) -> None:
        status = agent_pb2.SettingsStatus(nonce=session.delivery.nonce, revision=1, error=error)
        at_once(fleet.receiving(connection, agent_pb2.ConnectRequest(settings_status=status)))

    answer("the engine cannot obey it")
    assert await readings.get() == 1
    fleet.set_policy(stored(3))
    fleet._policies.send()
    assert session.delivery.pending is not None
    answers.set()
    await fleet.tasks.settle()
    answer("nor this one")
    await fleet.tasks.settle()
    assert readings.get_nowait() == 1
    answer("")
    assert (session.acked_revision, session.revision, session.nack_error) == (1, 3, "nor this one")
