"""Work for all engines of a large fleet leaves room for other work in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from meridian_control.capabilities.budgets.charges import Charges
from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.engine.totals import Totals
from meridian_control.fleet import fleet as module
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.turns import ENGINES_AT_ONCE
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.telemetry import fleet_metrics
from meridian_control.telemetry.fleet_metrics import FleetCollector
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of
from tests.unit.control.capabilities.handover.engines import hello

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from meridian_control.fleet.connection import Connection

ENGINES = 3 * ENGINES_AT_ONCE + 1


def fleet_of(number: int) -> tuple[Fleet, list[Connection]]:
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    return fleet, [fleet.join(hello(f"engine-{n:03}", {})) for n in range(number)]


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Return a list that grows with each call of the owner's function, which does the same as before."""
    calls: list[None] = []
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


async def most_at_once(work: Coroutine[Any, Any, Any], calls: list[None]) -> int:
    """Return the largest number of calls that the work makes in one go of the event loop."""
    task, most = asyncio.create_task(work), 0
    while not task.done():
        before = len(calls)
        await asyncio.sleep(0)
        most = max(most, len(calls) - before)
    await task
    return most


@pytest.mark.parametrize("asked", ["engines", "state", "led_engines"])
async def test_messages_of_engines(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    fleet, _ = fleet_of(ENGINES)
    whole, calls = WholeFleet(fleet, "one", None, lambda: True), counting(monkeypatch, module, "engine_view")
    assert await most_at_once(getattr(whole, asked)(), calls) <= ENGINES_AT_ONCE
    assert len(calls) == ENGINES


async def test_engines_that_come_and_go_meanwhile() -> None:
    fleet, connections = fleet_of(ENGINES)
    listing = asyncio.create_task(fleet.views.engines_in_turns())
    await asyncio.sleep(0)
    for connection in connections[::2]:
        fleet.leave(connection, "disconnected")
    fleet.join(hello("engine-new", {}))
    fleet.join(connections[1].session.hello)
    assert await listing == engines_of(fleet)


async def test_an_engine_that_leaves_while_the_counters_are_added_up_counts_once() -> None:
    fleet, connections = fleet_of(ENGINES)
    for connection in connections:
        connection.session.totals.reports = 1
    adding = asyncio.create_task(fleet.totals())
    await asyncio.sleep(0)
    for connection in connections:
        fleet.leave(connection, "disconnected")
    assert (await adding).reports == (await fleet.totals()).reports == ENGINES


async def test_tokens_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = fleet_of(ENGINES)
    calls = counting(monkeypatch, Charges, "take_by_tenant")
    assert await most_at_once(fleet.part(BudgetSharing).tick(), calls) <= ENGINES_AT_ONCE
    assert len(calls) == ENGINES


async def test_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape adds up the counters once, and makes no messages of engines."""
    fleet, _ = fleet_of(ENGINES)
    loop = asyncio.get_running_loop()
    collector = FleetCollector(fleet, lambda: False, lambda: None, {}, loop)
    sums, messages = counting(monkeypatch, Fleet, "totals"), counting(monkeypatch, module, "engine_view")
    for owner, name in ((Charges, "take_by_tenant"), (Totals, "add"), (fleet_metrics, "engine_limits")):
        with monkeypatch.context() as counted:
            calls = counting(counted, owner, name)
            # The counters of all sessions that have ended are added, too.
            assert await most_at_once(collector._read(), calls) <= ENGINES_AT_ONCE + 1
            assert len(calls) in (ENGINES, ENGINES + 1)
    assert (len(sums), len(messages)) == (3, 0)
    assert fleet.views.agent_states() == [(engine.engine_id, engine.agent_state) for engine in engines_of(fleet)]
