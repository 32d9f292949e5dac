"""A changed policy goes to a few engines at a time, so that reports of a large fleet do not wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.errors import StoreUnavailable
from meridian_control.fleet import catching_up, policy_delivery, trace_records
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.turns import ENGINES_AT_ONCE
from meridian_control.policy.store import StoredRevision
from tests.fakes.control import utc_now
from tests.fakes.tables import policy
from tests.unit.control.capabilities.handover.engines import hello

if TYPE_CHECKING:
    import pytest
    from meridian.v1 import fleet_pb2

    from meridian_control.engine.session import Session

ENGINES, NEVER_S = 3 * ENGINES_AT_ONCE + 1, 3600.0


def stored(revision: int) -> StoredRevision:
    return StoredRevision(revision, "", "", "", utc_now(), policy())


async def test_other_work_comes_between_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the test sends, so the timer must not run on a slow machine.
    monkeypatch.setattr(policy_delivery, "QUIET_S", NEVER_S)
    monkeypatch.setattr(policy_delivery, "MAX_WAIT_S", NEVER_S)
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    connections = [fleet.join(hello(f"engine-{n}", {})) for n in range(ENGINES)]

    def given(revision: int) -> int:
        return sum(connection.session.revision == revision for connection in connections)

    fleet.set_policy(stored(1))
    fleet._policies.send()
    assert given(1) == ENGINES_AT_ONCE
    # A newer policy, and an engine that leaves, while the older policy is still on its way.
    fleet.set_policy(stored(2))
    gone = next(connection for connection in connections if not connection.session.revision)
    fleet.leave(gone, "disconnected")
    goes = [given(1) + given(2)]
    while goes[-1] < ENGINES - 1:
        await asyncio.sleep(0)
        goes.append(given(1) + given(2))
        assert goes[-1] - goes[-2] <= ENGINES_AT_ONCE
    assert (given(1), gone.session.revision) == (ENGINES_AT_ONCE, 0)
    fleet._policies.send()
    while given(2) < ENGINES - 1:
        await asyncio.sleep(0)
    assert (given(1), gone.session.revision) == (0, 0)


async def test_a_policy_is_recorded_only_for_a_recording_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a policy with many overrides takes milliseconds, for each engine."""
    made, real = [], trace_records.policy_record

    def record(session: Session, *args: Any) -> fleet_pb2.TraceRecord:
        made.append(session.hello.engine_id)
        return real(session, *args)

    monkeypatch.setattr(policy_delivery, "policy_record", record)
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    for name in ("a", "b"):
        fleet.join(hello(name, {}))
    fleet.record("b")
    fleet.set_policy(stored(1))
    fleet._policies.send()
    assert made == ["b"]


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
