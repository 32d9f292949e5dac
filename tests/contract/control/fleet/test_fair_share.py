"""Streams whose messages make much work, on a real server: the others go on being answered, whatever the order in which
one caller sends large messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.fleet import turns
from meridian_control.fleet.fleet import Fleet
from tests.contract.clients import Clients
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control
from tests.fakes.control import utc_now
from tests.fakes.fleets import requests_of
from tests.fakes.linked import until
from tests.fakes.tables import policy

# Requests of a very large message, and of a large one; and how often the work on such a message must give way.
# With a fair share it does so a hundred times and more; one piece of work never does, or a few times between its parts.
MOST, MANY, OFTEN = 16_000, 6_000, 100


def requests(number: int = MANY, **fields: Any) -> list[agent_pb2.RequestOpened]:
    return [
        agent_pb2.RequestOpened(slot=slot, request_id=f"r{slot}", model="m", tenant=f"t{slot % 9}", **fields)
        for slot in range(number)
    ]


class Streams:
    """A stream of large messages, and one of another engine, which reports requests all the time; more engines on the
    same channel."""

    def __init__(self, channel: grpc.aio.Channel, fleet: Fleet) -> None:
        self.channel, self._fleet = channel, fleet
        self.large, self._other = self.engine("large"), self.engine("other")
        self._answered = 0

    async def asks(self) -> None:
        """Report a new request, which gets a cap, and end the one before, again and again."""
        other = self._other
        while True:
            await other.report(closed=[agent_pb2.RequestClosed(slot=0)] if self._answered else [])
            await other.report(opened=[agent_pb2.RequestOpened(slot=0, request_id=f"other-{other.step}", model="m")])
            await other.answer(other.step)
            self._answered += 1

    def is_busy(self) -> bool:
        """Return whether the control plane takes in a message of another stream than that of the other engine."""
        return any(c.busy and c.session.hello.engine_id != "other" for c in self._fleet.connections)

    async def given_way(self, is_busy: Callable[[], bool], done: Callable[[], Any]) -> int:
        """Return in how many rounds of the event loop others were served while work was under way, until it is done."""
        rounds, before = 0, self._answered
        while not done():
            rounds += is_busy()
            await asyncio.sleep(0)
        await until(lambda: self._answered > before)
        return rounds

    def engine(self, engine_id: str) -> RawEngine:
        return RawEngine(self.channel, engine_id, max_num_seqs=1024)

    async def takes_in(self, number: int = MANY) -> None:
        """Let the control plane take in a snapshot of many requests."""
        await self.large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests(number)))
        await self.large.answer(9)


@pytest.fixture
async def streams(control: Control) -> AsyncIterator[Streams]:
    async with grpc.aio.insecure_channel(control.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        streams = Streams(channel, control.fleet)
        await streams.large.connect()
        await streams._other.connect()
        asking = asyncio.create_task(streams.asks())
        yield streams
        assert not asking.done()
        asking.cancel()


async def test_a_snapshot_leaves_the_loop_to_the_others(control: Control, streams: Streams) -> None:
    # An agent that reads no parts, or does not care, sends one message.
    taken_in = asyncio.create_task(streams.takes_in(MOST))
    assert await streams.given_way(streams.is_busy, taken_in.done) >= OFTEN
    assert len(requests_of(control.fleet, "large")) == MOST


async def test_the_streams_of_one_caller_share_its_turns(streams: Streams) -> None:
    several = [await streams.engine(f"large-{number}").connect() for number in range(8)]
    for engine in several:
        await engine.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests(2000)))
    answers = [asyncio.create_task(engine.answer(9)) for engine in several]
    assert await streams.given_way(streams.is_busy, lambda: all(answer.done() for answer in answers)) >= OFTEN


async def test_so_does_a_report_of_many_requests(control: Control, streams: Streams) -> None:
    large = streams.large
    await large.report(opened=requests())
    answered = asyncio.create_task(large.answer(large.step))
    assert await streams.given_way(streams.is_busy, answered.done) >= OFTEN
    await large.report(closed=[agent_pb2.RequestClosed(slot=slot) for slot in range(MANY)])
    table = next(c.session.table for c in control.fleet.connections if c.session.hello.engine_id == "large")
    assert await streams.given_way(streams.is_busy, lambda: not table.live.any()) >= OFTEN


async def test_so_does_a_new_policy_for_many_requests(control: Control, streams: Streams) -> None:
    large = streams.large
    await streams.takes_in()
    override = {"tenant": "t1", "scheduler": {"max_think_tokens": 100}}
    # Nothing would shorten a control group.
    limits = {"scheduler": {"max_think_tokens": 500}, "entropy": {"holdout_share": 0.0}}
    await control.set_policy(policy(**limits, override=[override]))
    while not (said := await large.call.read()).HasField("settings"):
        pass
    await large.apply(said.settings)

    async def capped() -> None:
        caps = 0
        while caps < MANY:
            caps += len((await large.call.read()).directives.caps)

    assert await streams.given_way(streams.is_busy, asyncio.create_task(capped()).done) >= OFTEN


async def test_so_does_a_stream_that_leaves_many_requests(control: Control, streams: Streams) -> None:
    await streams.takes_in(MOST)
    streams.large.call.cancel()

    def closes() -> bool:
        return len(control.fleet.connections) < len(control.fleet.counted_sessions())

    assert await streams.given_way(closes, lambda: len(control.fleet.counted_sessions()) == 1) >= OFTEN


async def test_so_does_a_list_of_many_requests(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> None:
    # On a busy machine turns would be longer, and fewer.
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    monkeypatch.setattr(turns, "TURN_SHARE", 0.0)
    await streams.takes_in()
    request = fleet_pb2.ListRequestsRequest(page_size=1)
    listing = asyncio.ensure_future(Clients(streams.channel).fleet.ListRequests(request))
    assert await streams.given_way(lambda: turns._Turn.pausing > 0, listing.done) >= OFTEN
    assert listing.result().next_page_token


async def test_events_wait_until_a_message_is_taken_in(control: Control, streams: Streams) -> None:
    """A session takes in one thing after another: a policy that comes during a snapshot follows its answer."""
    large = streams.large
    new = policy(scheduler={"max_think_tokens": 500})
    stored = await control.store.append(new, etag="", author="test", reason="", now=utc_now())
    await large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests()))
    (connection,) = [c for c in control.fleet.connections if c.session.hello.engine_id == "large"]
    await until(lambda: connection.busy)
    # Nothing is waited for, so the snapshot cannot be taken in meanwhile.
    control.fleet.set_policy(stored)
    control.fleet._policies.send()
    assert connection.busy
    assert connection.session.revision < stored.revision
    said = [await large.call.read()]
    while not said[-1].HasField("settings"):
        said.append(await large.call.read())
    assert 9 in [response.directives.step for response in said]
    assert said[-1].settings.revision == stored.revision
