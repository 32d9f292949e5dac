"""Streams whose messages make much work, on a real server: the others go on being answered, whatever the order in which
one caller sends large messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc, fleet_pb2, fleet_pb2_grpc

from tests.fakes.agent import hello
from tests.fakes.control import utc_now
from tests.fakes.linked import until
from tests.fakes.tables import policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.contract.streams import Control

# Requests of a very large message, and of a large one; and reports of another engine that must be answered before
# such a message is taken in. With a fair share some hundred are; one piece of work lets none of them through, or a few
# that came between its parts.
MOST, MANY, ANSWERED = 24_000, 12_000, 8


class Raw:
    """An engine whose stream has only the messages that a test sends."""

    def __init__(self, channel: grpc.aio.Channel, engine_id: str) -> None:
        self.call: Any = agent_pb2_grpc.AgentServiceStub(channel).Connect()
        self.engine_id, self.step = engine_id, 0
        self.answered = 0

    async def connect(self) -> None:
        """Open the stream and apply the policy."""
        await self.send(hello=hello(self.engine_id, max_num_seqs=1024))
        await self.send(snapshot=agent_pb2.Snapshot())
        while not (said := await self.call.read()).HasField("settings"):
            pass
        await self.send(
            settings_status=agent_pb2.SettingsStatus(nonce=said.settings.nonce, revision=said.settings.revision)
        )

    async def send(self, **message: Any) -> None:
        await self.call.write(agent_pb2.ConnectRequest(**message))

    async def answer(self, step: int) -> None:
        """Wait for the answer to a step."""
        while (await self.call.read()).directives.step < step:
            pass

    async def asks_and_is_answered(self) -> None:
        """Report a new request, which gets a cap, and end it."""
        self.step += 1
        opened = [agent_pb2.RequestOpened(slot=0, request_id=f"{self.engine_id}-{self.step}", model="m")]
        closed = [agent_pb2.RequestClosed(slot=0)] if self.step > 1 else []
        await self.send(step=agent_pb2.StepReport(step=2 * self.step, steps=1, closed=closed))
        await self.send(step=agent_pb2.StepReport(step=2 * self.step + 1, steps=1, opened=opened))
        await self.answer(2 * self.step + 1)
        self.answered += 1


def requests(number: int = MANY, **fields: Any) -> list[agent_pb2.RequestOpened]:
    return [
        agent_pb2.RequestOpened(slot=slot, request_id=f"r{slot}", model="m", tenant=f"t{slot % 9}", **fields)
        for slot in range(number)
    ]


@pytest.fixture
async def channel(control: Control) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(control.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield channel


async def answered_until(other: Raw, done: Callable[[], Any]) -> int:
    """Let another engine report until something is done; return how many of its reports were answered meanwhile."""
    before = other.answered
    while not done():
        await other.asks_and_is_answered()
    return other.answered - before


async def test_a_snapshot_leaves_the_loop_to_the_others(control: Control, channel: grpc.aio.Channel) -> None:
    large, other = Raw(channel, "large"), Raw(channel, "other")
    await large.connect()
    await other.connect()
    await other.asks_and_is_answered()
    # An agent that reads no parts, or does not care, sends one message.
    await large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests(MOST)))
    answer = asyncio.create_task(large.answer(9))
    assert await answered_until(other, answer.done) >= 10 * ANSWERED
    assert len(control.fleet.views.requests("large")) == MOST


async def test_the_streams_of_one_caller_share_its_turns(control: Control, channel: grpc.aio.Channel) -> None:
    other, several = Raw(channel, "other"), [Raw(channel, f"large-{number}") for number in range(8)]
    snapshot = agent_pb2.Snapshot(step=9, requests=requests(2000))
    for engine in (other, *several):
        await engine.connect()
    await other.asks_and_is_answered()
    for engine in several:
        await engine.send(snapshot=snapshot)
    answers = [asyncio.create_task(engine.answer(9)) for engine in several]
    assert await answered_until(other, lambda: all(answer.done() for answer in answers)) >= ANSWERED


@pytest.mark.parametrize("part", ["opened", "closed"])
async def test_so_does_a_report_of_many_requests(control: Control, channel: grpc.aio.Channel, part: str) -> None:
    large, other = Raw(channel, "large"), Raw(channel, "other")
    await large.connect()
    await other.connect()
    await other.asks_and_is_answered()
    await large.send(step=agent_pb2.StepReport(step=9, steps=1, opened=requests()))
    answer = asyncio.create_task(large.answer(9))
    count = await answered_until(other, answer.done)
    if part == "closed":
        closed = [agent_pb2.RequestClosed(slot=slot) for slot in range(MANY)]
        await large.send(step=agent_pb2.StepReport(step=10, steps=1, closed=closed))
        table = next(c.session.table for c in control.fleet.connections if c.session.hello.engine_id == "large")
        count = await answered_until(other, lambda: not table.live.any())
    assert count >= ANSWERED


async def test_so_does_a_new_policy_for_many_requests(control: Control, channel: grpc.aio.Channel) -> None:
    large, other = Raw(channel, "large"), Raw(channel, "other")
    await large.connect()
    await other.connect()
    await large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests()))
    await large.answer(9)
    override = {"tenant": "t1", "scheduler": {"max_think_tokens": 100}}
    # Nothing would shorten a control group.
    limits = {"scheduler": {"max_think_tokens": 500}, "entropy": {"holdout_share": 0.0}}
    await control.set_policy(policy(**limits, override=[override]))
    while not (said := await large.call.read()).HasField("settings"):
        pass
    status = agent_pb2.SettingsStatus(nonce=said.settings.nonce, revision=said.settings.revision)
    await large.send(settings_status=status)

    async def capped() -> None:
        caps = 0
        while caps < MANY:
            caps += len((await large.call.read()).directives.caps)

    assert await answered_until(other, asyncio.create_task(capped()).done) >= ANSWERED


async def test_so_does_a_stream_that_leaves_many_requests(control: Control, channel: grpc.aio.Channel) -> None:
    large, other = Raw(channel, "large"), Raw(channel, "other")
    await large.connect()
    await other.connect()
    await large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests(MOST)))
    await large.answer(9)
    large.call.cancel()
    # The other goes on asking, because a test that only looks from time to time might look when all is over.
    await answered_until(other, lambda: "large" not in {c.session.hello.engine_id for c in control.fleet.connections})
    assert await answered_until(other, lambda: len(control.fleet.counted_sessions()) == 1) >= ANSWERED


async def test_so_does_a_list_of_many_requests(control: Control, channel: grpc.aio.Channel) -> None:
    large, other = Raw(channel, "large"), Raw(channel, "other")
    await large.connect()
    await other.connect()
    await large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests()))
    await large.answer(9)
    listing = asyncio.ensure_future(
        fleet_pb2_grpc.FleetServiceStub(channel).ListRequests(fleet_pb2.ListRequestsRequest(page_size=1))
    )
    assert await answered_until(other, listing.done) >= ANSWERED
    assert listing.result().next_page_token


async def test_events_wait_until_a_message_is_taken_in(control: Control, channel: grpc.aio.Channel) -> None:
    """A session takes in one thing after another: a policy that comes during a snapshot follows its answer."""
    large = Raw(channel, "large")
    await large.connect()
    new = policy(scheduler={"max_think_tokens": 500})
    stored = await control.store.append(new, etag="", author="test", reason="", now=utc_now())
    await large.send(snapshot=agent_pb2.Snapshot(step=9, requests=requests()))
    (connection,) = control.fleet.connections
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
