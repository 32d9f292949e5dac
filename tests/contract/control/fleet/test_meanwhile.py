"""Each test changes something on a real server while the work on a stream waits for its turn: the tests hold the turns
of all streams, and give them one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.capabilities.handover.fleet import FleetHandovers
from meridian_control.capabilities.handover.results import WAIT
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.decision_ledger import SETTLED_AT_ONCE
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.model import Policy
from tests.contract.clients import calling
from tests.contract.control.fleet.test_end_thinking import end
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control, refusal
from tests.fakes.fleets import engines_of
from tests.fakes.linked import until
from tests.fakes.tables import policy, tokens
from tests.unit.control.capabilities.handover.engines import ANSWERING, disagg, pending
from tests.unit.control.capabilities.handover.engines import hello as pooled

STOP = agent_pb2.FINISH_REASON_STOP
# Requests of a stream that closes with several pauses.
MANY = 3 * SLICE_ROWS


class Turns:
    """The turns for which streams of a fleet wait, in the order in which they began to wait."""

    def __init__(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fleet, self._waiting = fleet, list[asyncio.Future[None]]()
        self._next, self._holds = fleet.turns.next, False
        monkeypatch.setattr(fleet.turns, "next", self._wait)

    async def hold(self) -> None:
        """Let streams wait from now on, once what they have begun to take in is done."""
        await until(lambda: not (self._fleet.turns._waiting or any(c.busy for c in self._fleet.connections)))
        self._holds = True

    async def _wait(self, who: str) -> None:
        if self._holds:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        else:
            await self._next(who)

    async def waiting(self, number: int) -> None:
        """Wait until streams have waited for so many turns."""
        await until(lambda: len(self._waiting) == number)

    def number(self) -> int:
        return len(self._waiting)

    def give(self, index: int) -> None:
        self._waiting[index].set_result(None)

    async def take_in(self, connection: Connection, index: int) -> None:
        """Give a stream its turns, of which it waits for this one, until its message is taken in; nobody else may begin
        to wait."""
        while connection.busy:
            self.give(index)
            index = len(self._waiting)
            await until(lambda number=index: not connection.busy or len(self._waiting) > number)  # type: ignore[misc]

    def give_all(self) -> None:
        self._holds = False
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


@pytest.fixture
def turns(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    turns = Turns(control.fleet, monkeypatch)
    yield turns
    turns.give_all()


def thinking(number: int, first: int = 0, name: str = "r") -> list[agent_pb2.RequestOpened]:
    """Return requests that think; more than SLICE_ROWS of them are taken in with pauses."""
    return [
        agent_pb2.RequestOpened(slot=slot, request_id=f"{name}{slot}", model="m", phase=agent_pb2.PHASE_THINK)
        for slot in range(first, first + number)
    ]


async def test_no_request_is_ended_in_a_report_that_is_half_taken_in(control: Control, turns: Turns) -> None:
    """Two engines have one name. While the call waits for the second one, the first one reports that the request has
    finished."""
    async with calling(control.target) as clients:
        first, second = [
            await RawEngine(clients.channel, "engine", incarnation=incarnation, max_num_seqs=128).connect()
            for incarnation in ("1", "2")
        ]
        await first.report(opened=thinking(1))
        await until(lambda: control.names() == ["r0"] and all(c.session.gauges for c in control.fleet.connections))
        await turns.hold()
        await second.report(opened=thinking(SLICE_ROWS, name="other"))
        await turns.waiting(1)
        ending = asyncio.create_task(refusal(end(control.target, "r0")))
        await turns.waiting(2)
        await first.report(opened=thinking(SLICE_ROWS, 1), closed=[agent_pb2.RequestClosed(slot=0, reason=STOP)])
        await turns.waiting(3)
        await turns.take_in(list(control.fleet.connections)[1], 0)
        before = turns.number()
        turns.give(1)
        await until(lambda: ending.done() or turns.number() > before)
        turns.give_all()
        assert await ending == (grpc.StatusCode.NOT_FOUND, 'no live request "r0" on engine "engine"')


async def leaving(control: Control, engine: RawEngine, turns: Turns) -> None:
    """Let an engine's stream break off, and wait until its session is half closed."""
    engine.call.cancel()
    await until(lambda: turns.number() and len(control.fleet.connections) < len(control.fleet.counted_sessions()))
    assert control.fleet.stream_ends == {"disconnected": 1}


async def left(control: Control, channel: grpc.aio.Channel, turns: Turns) -> None:
    """Let an engine with many requests connect and leave, and wait until its session is half closed."""
    engine = await RawEngine(channel, "engine", max_num_seqs=128).connect()
    await engine.report(opened=thinking(MANY))
    await engine.answer(engine.step)
    await turns.hold()
    await leaving(control, engine, turns)


async def test_an_engine_that_leaves_is_listed_at_any_time(control: Control, turns: Turns) -> None:
    """A rollout waits for an engine whose stream broke off, so it must not miss the engine in any look."""
    async with calling(control.target) as clients:
        await left(control, clients.channel, turns)
        (shown,) = (await clients.fleet.ListEngines(fleet_pb2.ListEnginesRequest())).engines
        assert (shown.state, shown.lost) == (fleet_pb2.CONNECTION_STATE_DISCONNECTED, True)
        turns.give_all()
        await until(lambda: not control.fleet.counted_sessions())
        (shown,) = (await clients.fleet.ListEngines(fleet_pb2.ListEnginesRequest())).engines
        assert (shown.state, shown.lost, shown.open_decisions) == (fleet_pb2.CONNECTION_STATE_DISCONNECTED, True, 0)


async def test_a_stream_that_closes_late_does_not_speak_for_its_engine(control: Control, turns: Turns) -> None:
    """While the first stream closes, a second one of the engine begins and ends."""
    async with calling(control.target) as clients:
        await left(control, clients.channel, turns)
        again = await RawEngine(clients.channel, "engine", incarnation="2").welcomed()
        await again.call.done_writing()
        await until(lambda: control.fleet.stream_ends.get("agent_closed"))
        turns.give_all()
        await until(lambda: not control.fleet.counted_sessions())
        shown = control.engine()
        assert (shown.incarnation, shown.lost) == ("2", False)


async def test_a_stream_that_closes_late_takes_no_request_from_its_engine_s_next_one(
    control: Control, turns: Turns
) -> None:
    """A request that is to be handed over lives on after its engine's stream broke off: the next stream lists it, while
    the first one still closes its many decisions."""
    await control.set_policy(disagg().model_copy(update={"scheduler": Policy().scheduler}))
    results = control.fleet.part(FleetHandovers).results
    thinks = agent_pb2.RequestOpened(
        request_id="moves", model="m", prompt_tokens=160, phase=agent_pb2.PHASE_THINK, hand_over_candidate=True
    )
    async with calling(control.target) as clients:
        a = await RawEngine(clients.channel, pooled("a", max_num_seqs=1024)).connect()
        await RawEngine(clients.channel, pooled("b", ANSWERING)).connect()
        await until(lambda: [e.acked_revision for e in engines_of(control.fleet)] == [control.fleet.revision] * 2)
        await until(lambda: all(c.session.gauges is not None for c in control.fleet.connections))
        control.fleet.part(FleetHandovers).share()
        await a.report(opened=[thinks, *thinking(3 * SETTLED_AT_ONCE, 1)], kv_used=0.95)
        await a.hand_over()
        await until(lambda: control.engine("a").open_decisions > 3 * SETTLED_AT_ONCE)
        await turns.hold()
        await leaving(control, a, turns)
        again = await RawEngine(clients.channel, pooled("a", max_num_seqs=1024)).welcomed()
        await again.send(snapshot=agent_pb2.Snapshot(step=9, requests=[thinks]))
        await until(lambda: control.names() == ["moves"])
        turns.give_all()
        await until(lambda: len(control.fleet.counted_sessions()) == 2)
        results.expire(control.fleet.clock() + WAIT)
        assert (results.total(), pending(results)) == ({}, 1)


async def test_a_stream_that_another_one_has_replaced_takes_nothing_in(control: Control, turns: Turns) -> None:
    """The agent reads nothing on its first stream any more, so that stream ends late. Its last report, of which a part
    is taken in, is in the snapshot of the second stream, too."""
    await control.set_policy(policy(budget=[{"name": "all", "tokens_per_day": 10**9}]))
    sharing, live, reads = control.fleet.part(BudgetSharing), thinking(1), asyncio.Event()
    async with calling(control.target) as clients:
        engine = await RawEngine(clients.channel, "engine", max_num_seqs=128).connect(control.fleet.revision)
        await engine.report(opened=live)
        await engine.answer(engine.step)
        (first,) = control.fleet.connections
        get = first.outgoing.get

        async def get_late() -> agent_pb2.ConnectResponse | None:
            await reads.wait()
            return await get()

        first.outgoing.get = get_late  # type: ignore[method-assign]
        # The stream may already wait for a response, which then is this one.
        first.put([agent_pb2.ConnectResponse()])
        await turns.hold()
        await engine.report(opened=thinking(SLICE_ROWS, 1), tokens=tokens([(0, agent_pb2.PHASE_THINK, 0, 0.0)] * 5))
        await until(lambda: first.busy)
        again = await RawEngine(clients.channel, "engine", max_num_seqs=128).welcomed()
        live[0].think_tokens = 5
        await again.send(snapshot=agent_pb2.Snapshot(step=9, requests=live))
        await until(lambda: control.names() == ["r0"])
        turns.give_all()
        await until(lambda: not first.busy)
        await sharing.tick()
        assert first in control.fleet.connections.counted
        assert sharing.budgets.counted["all"] == sharing.tenants.counted["", "m"] == 5
        reads.set()
        await until(lambda: control.fleet.stream_ends == {"replaced": 1})
