"""Work for all engines of a large fleet leaves room for other work in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.slices import SLICE_ROWS, Sliced
from meridian_control.engine.part import Capability
from meridian_control.fleet import turns
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.part import FleetPart
from meridian_control.fleet.turns import TURN_S, TURN_SHARE, in_parts, in_turns, with_pauses
from meridian_control.telemetry import fleet_metrics
from meridian_control.telemetry.fleet_metrics import FleetCollector
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of
from tests.unit.control.capabilities.handover.engines import hello

ENGINES, ITEMS = 49, 1000


def fleet_of(number: int) -> tuple[Fleet, list[Connection]]:
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    return fleet, [fleet.join(hello(f"engine-{n:03}", {})) for n in range(number)]


@pytest.fixture(autouse=True)
async def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the event loop's time, by which turns end, which stands still until a test sets it."""
    now = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    return now


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each turn end at once."""
    monkeypatch.setattr(turns, "TURN_S", 0.0)


async def rounds_of(work: Coroutine[Any, Any, Any], between: Callable[[], None] = lambda: None) -> int:
    """Do the work, and return the number of rounds of the event loop that it takes; `between` is other work."""
    task, rounds = asyncio.create_task(work), 0
    while not task.done():
        await asyncio.sleep(0)
        between()
        rounds += 1
    await task
    return rounds


@pytest.mark.parametrize("pausing", ["in_parts", "in_turns", "with_pauses"])
@pytest.mark.parametrize(
    ("item_s", "others_s", "pauses"),
    [
        # Short work does not pause.
        (0.0, 0.1, range(1)),
        (2 * TURN_S, 0.0, range(ITEMS - 1, ITEMS + 1)),
        # On a full core the work still gets its share.
        (TURN_S, 0.1, range(1, round(ITEMS * TURN_S / (TURN_SHARE * 0.1)) + 2)),
    ],
)
async def test_long_work_pauses_by_the_time_that_it_takes(
    clock: list[float], pausing: str, item_s: float, others_s: float, pauses: range
) -> None:
    """others_s: what all other work takes in a round of the event loop."""

    def others() -> None:
        clock[0] += others_s

    def item() -> None:
        clock[0] += item_s

    def sliced() -> Sliced[None]:
        for _ in range(ITEMS):
            item()
            yield

    async def work() -> None:
        if pausing == "with_pauses":
            await with_pauses(sliced())
        elif pausing == "in_turns":
            async for _ in in_turns(range(ITEMS)):
                item()
        else:
            async for part in in_parts(range(ITEMS * SLICE_ROWS)):
                assert len(part) == SLICE_ROWS
                item()

    assert await rounds_of(work(), others) - 1 in pauses


@pytest.mark.parametrize("others_s", [0.0, 0.1])
async def test_long_works_share_a_round(clock: list[float], others_s: float) -> None:
    """Each work's pause holds the turns of all others, and must not lengthen its own next turn."""
    works, item_s = 15, TURN_S / 2

    async def work() -> None:
        async for _ in in_turns(range(ITEMS)):
            clock[0] += item_s

    tasks, rounds_s = [asyncio.create_task(work()) for _ in range(works)], list[float]()
    while not all(task.done() for task in tasks):
        began_s = clock[0]
        clock[0] += others_s
        await asyncio.sleep(0)
        rounds_s.append(clock[0] - began_s)
    # The works get their share of a long round, or a turn each.
    assert max(rounds_s) <= others_s / (1 - TURN_SHARE) + works * (TURN_S + item_s)


@pytest.mark.usefixtures("short")
async def test_engines_that_come_and_go_meanwhile() -> None:
    fleet, connections = fleet_of(ENGINES)
    listing = asyncio.create_task(fleet.views.engines_in_turns())
    await asyncio.sleep(0)
    for connection in connections[::2]:
        fleet.leave(connection, "disconnected")
    fleet.join(hello("engine-new", {}))
    fleet.join(connections[1].session.hello)
    assert await listing == engines_of(fleet)


@pytest.mark.usefixtures("short")
async def test_an_engine_that_leaves_while_the_counters_are_added_up_counts_once() -> None:
    fleet, connections = fleet_of(ENGINES)
    for connection in connections:
        connection.session.totals.reports = 1
    adding = asyncio.create_task(fleet.totals())
    await asyncio.sleep(0)
    for connection in connections:
        fleet.leave(connection, "disconnected")
    assert (await adding).reports == (await fleet.totals()).reports == ENGINES


async def test_nothing_is_left_of_a_scrape_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(FleetPart):
        async def before_metrics(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(fleet_metrics, "SCRAPE_TIMEOUT_S", 0.01)
    fleet = Fleet(utc_now, capabilities=[Capability("waiting", None, lambda fleet: Waiting())])
    collector = FleetCollector(fleet, lambda: False, lambda: None, {}, asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(collector.collect)
    async with asyncio.timeout(10.0):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0)
