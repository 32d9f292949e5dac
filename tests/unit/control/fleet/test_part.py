"""The parts of capabilities over a fleet: what calls them, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2
from pydantic import create_model

from meridian_control.capabilities import listed
from meridian_control.common.errors import NotFound
from meridian_control.common.slices import at_once
from meridian_control.engine.part import Capability, Part
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.part import FleetPart, keep_ticking
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.page.contents import Collector, engine_row
from meridian_control.policy.model import Policy
from meridian_control.policy.section import Section
from meridian_control.policy.store import StoredRevision
from meridian_control.server.fleet_service import FleetService
from meridian_control.telemetry.fleet_metrics import FleetCollector
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of
from tests.unit.control.capabilities.handover.engines import hello

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.engine.part import Stream
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.part import Metric


class Ticking(FleetPart):
    failure = "the clock is wrong"
    tick_s = 0.0

    def __init__(self, errors: list[Exception | None]) -> None:
        self.errors, self.over = errors, asyncio.Event()

    async def tick(self) -> None:
        if not self.errors:
            self.over.set()
        elif (error := self.errors.pop(0)) is not None:
            raise error


async def test_an_error_of_a_part_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    part = Ticking([ValueError("one"), ValueError("one"), NotFound("two"), None, NotFound("two")])
    ticking = asyncio.create_task(keep_ticking(part))
    with caplog.at_level(logging.WARNING):
        await part.over.wait()
    ticking.cancel()
    told = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    assert told == [
        ("the clock is wrong: one", True),
        ("the clock is wrong: two", False),
        ("the clock is wrong: two", False),
    ]


async def test_a_tick_goes_on_when_its_job_is_cancelled() -> None:
    begun, goes_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(FleetPart):
        async def tick(self) -> None:
            begun.set()
            await goes_on.wait()
            done.set()

    job = asyncio.create_task(keep_ticking(Slow()))
    await begun.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    goes_on.set()
    await done.wait()


async def test_a_part_over_the_fleet_makes_the_parts_of_streams() -> None:
    class Shared(Part):
        def __init__(self, stream: Stream, number: int = 0) -> None:
            self.number = number

    class Counting(FleetPart):
        def __init__(self, fleet: Fleet) -> None:
            self.made = 0

        def stream(self, stream: Stream) -> Shared:
            self.made += 1
            return Shared(stream, self.made)

    fleet = Fleet(utc_now, capabilities=[Capability("counting", Shared, Counting)])
    first, second = (fleet.join(hello(name)).session for name in ("one", "two"))
    assert [session.part(Shared).number for session in (first, second)] == [1, 2]
    assert fleet.part(Counting).made == 2
    plain = Fleet(utc_now, capabilities=[Capability("plain", Shared, lambda fleet: FleetPart())])
    assert plain.join(hello("one")).session.part(Shared).number == 0


async def test_a_method_whose_capability_is_missing_says_so() -> None:
    context: Any = None
    service = FleetService(WholeFleet(Fleet(utc_now, capabilities=[]), "one", None, lambda: True))
    with pytest.raises(NotFound, match="no capability of this control plane answers ListBudgets"):
        await service.ListBudgets(fleet_pb2.ListBudgetsRequest(), context)


FAILING = ("left", "forgot", "policy_came", "froze", "show_engine", "answer_replica", "before_metrics", "metrics")


async def test_an_error_of_a_part_takes_no_other_part_down(caplog: pytest.LogCaptureFixture) -> None:
    def fails(name: str) -> Any:
        def fail(*_: object) -> None:
            raise ValueError(name)

        async def fail_later(*_: object) -> None:
            raise ValueError(name)

        return fail_later if name == "before_metrics" else fail

    asked: list[str] = []

    def notes(name: str) -> Any:
        async def note_later(_: FleetPart) -> None:
            asked.append(name)

        def note(*_: object) -> list[object]:
            asked.append(name)
            return []

        return note_later if name == "before_metrics" else note

    bad = type("Bad", (FleetPart,), {name: fails(name) for name in (*FAILING, "cause", "show_row")})
    good = type("Good", (FleetPart,), {name: notes(name) for name in FAILING})
    parts = [Capability("bad", None, lambda fleet: bad()), Capability("good", None, lambda fleet: good())]
    fleet = Fleet(utc_now, capabilities=parts)
    fleet.set_policy(StoredRevision(1, "", "", "", utc_now(), Policy()))
    connection = fleet.join(hello("one"))
    context: Any = None
    service = FleetService(WholeFleet(fleet, "one", None, lambda: True))
    (engine,) = (await service.ListEngines(fleet_pb2.ListEnginesRequest(local_only=True), context)).engines
    assert engine.engine_id == "one"
    assert engine_row(engine, {}, utc_now(), fleet.parts.values())["id"] == "one"
    collector = FleetCollector(fleet, lambda: True, lambda: None, {}, asyncio.get_running_loop())
    assert await asyncio.to_thread(lambda: list(collector.collect()))
    fleet.freezes.renew(())
    fleet.leave(connection, "agent_closed")
    assert not fleet.connections.counted
    assert [gone.engine_id for gone in engines_of(fleet)] == ["one"]
    assert {*asked} >= {*FAILING} - {"forgot"}
    assert {record.getMessage() for record in caplog.records} >= {f"Bad: {name}" for name in {*FAILING} - {"forgot"}}


async def test_an_error_of_a_capability_hides_only_its_own_rows_and_metrics(caplog: pytest.LogCaptureFixture) -> None:
    class Unlisted(FleetPart):
        def metrics(self, totals: Totals) -> Iterator[Metric]:
            yield "meridian_unlisted_total", [((), 1)]

    def fails(totals: Totals) -> list[tuple[str, str]]:
        raise ValueError("no rows")

    capabilities = [
        Capability("bad", None, lambda fleet: Unlisted(), shown=fails),
        Capability("good", shown=lambda totals: [("row", "text")]),
    ]
    fleet = Fleet(utc_now, capabilities=capabilities)
    nothing: Any = None
    rows = await Collector(WholeFleet(fleet, "one", None, lambda: True), nothing, nothing)._capability_rows()
    assert rows == [("good", "row", "text")]
    collector = FleetCollector(fleet, lambda: True, lambda: None, {}, asyncio.get_running_loop())
    found = {family.name for family in await asyncio.to_thread(lambda: list(collector.collect()))}
    assert "meridian_engines" in found
    assert caplog.messages == [
        "the rows of bad cannot be shown: no rows",
        "Unlisted: Capability.metrics lists no meridian_unlisted_total",
    ]


@pytest.mark.parametrize("field", ["enabled", "shadow"])
def test_a_section_says_itself_whether_it_is_in_force(field: str) -> None:
    asked: dict[str, Any] = {field: (bool, ...)}
    Capability("own", section=create_model("Own", __base__=Section, **asked))
    asked[field] = (bool, False)
    with pytest.raises(ValueError, match=rf"^the section of own must have no default for {field}$"):
        Capability("own", section=create_model("Own", __base__=Section, **asked))


async def test_a_stream_that_ends_leaves_no_garbage() -> None:
    """Full looks for garbage are rare, so what a session holds must be free without one."""
    fleet = Fleet(utc_now, capabilities=listed.CAPABILITIES)
    fleet.set_policy(StoredRevision(1, "", "", "", utc_now(), Policy()))
    connection = fleet.join(hello("one"))
    nonce = connection.session.delivery.nonce
    opened = [agent_pb2.RequestOpened(slot=slot, request_id=str(slot), prompt_tokens=4) for slot in range(3)]
    for message in (
        agent_pb2.ConnectRequest(settings_status=agent_pb2.SettingsStatus(nonce=nonce, revision=1)),
        agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=opened[:2])),
        agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=1, steps=1, opened=opened[2:])),
    ):
        at_once(fleet.receiving(connection, message))
    assert connection.session.policy is not None
    held: list[object] = [connection.session.table, *connection.session._parts.all]
    left = weakref.WeakSet(held)
    del held
    gc.collect()
    gc.disable()
    try:
        fleet.leave(connection, "agent_closed")
        del connection
        assert list(left) == []
    finally:
        gc.enable()
