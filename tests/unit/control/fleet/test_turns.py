"""Work for all engines of a large fleet leaves room for other work in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from meridian_control.capabilities.budgets.charges import Charges
from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.part import Capability
from meridian_control.engine.totals import Totals
from meridian_control.fleet import fleet as module
from meridian_control.fleet import turns
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.part import FleetPart
from meridian_control.fleet.turns import TURN_S, TURN_SHARE, in_parts, in_turns, with_pauses
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.telemetry import fleet_metrics
from meridian_control.telemetry.fleet_metrics import FleetCollector
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of
from tests.unit.control.capabilities.handover.engines import hello

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from meridian_control.common.slices import Sliced
    from meridian_control.fleet.connection import Connection

ENGINES, ITEMS = 49, 1000


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


async def most_at_once(work: Coroutine[Any, Any, Any], calls: list[None]) -> int:
    """Return the largest number of calls that the work makes in one go of the event loop."""
    task, most = asyncio.create_task(work), 0
    while not task.done():
        before = len(calls)
        await asyncio.sleep(0)
        most = max(most, len(calls) - before)
    await task
    return most


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
@pytest.mark.parametrize("asked", ["engines", "state", "led_engines"])
async def test_messages_of_engines(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    fleet, _ = fleet_of(ENGINES)
    whole, calls = WholeFleet(fleet, "one", None, lambda: True), counting(monkeypatch, module, "engine_view")
    assert await most_at_once(getattr(whole, asked)(), calls) <= 1
    assert len(calls) == ENGINES


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


@pytest.mark.usefixtures("short")
async def test_tokens_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = fleet_of(ENGINES)
    calls = counting(monkeypatch, Charges, "take_by_tenant")
    assert await most_at_once(fleet.part(BudgetSharing).tick(), calls) <= 1
    assert len(calls) == ENGINES


@pytest.mark.usefixtures("short")
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
            assert await most_at_once(collector._read(), calls) <= 2
            assert len(calls) in (ENGINES, ENGINES + 1)
    assert (len(sums), len(messages)) == (3, 0)
    assert fleet.views.agent_states() == [(engine.engine_id, engine.agent_state) for engine in engines_of(fleet)]


async def test_a_scrape_whose_work_is_short_does_not_pause() -> None:
    fleet, _ = fleet_of(ENGINES)
    collector = FleetCollector(fleet, lambda: False, lambda: None, {}, asyncio.get_running_loop())
    assert await rounds_of(collector._read()) == 1


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
