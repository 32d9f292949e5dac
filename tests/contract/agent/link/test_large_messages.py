"""Messages that grow with the number of live requests, on a real stream: they reach the control plane in parts, and one
that was refused for its size is never sent again as it was."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_agent.core.request_info import MAX_ID
from meridian_agent.link.message_sizes import PART_BYTES, REPORT_BYTES, WHOLE_BYTES
from tests.contract.streams import Control, Scripted, serving
from tests.fakes.fleets import requests_of
from tests.fakes.linked import LinkedEngine, until

# More bytes than gRPC lets through as one message: 9,000 requests with long texts of characters of four bytes.
MANY, LONG, WIDE = 9_000, 250, "\U0001f4a5"
TEXT = WIDE * 128
BIG_MESSAGE = 16 << 20
# Seconds within which a control plane on a busy machine takes in as many requests.
PATIENT_S = 120.0


def name_of(number: int) -> str:
    return f"request-{number}-".ljust(LONG, WIDE)


def wait_in_queue(engine: LinkedEngine, number: int, begin: int = 0) -> None:
    """Let requests arrive at an engine that runs none of them."""
    for index in range(begin, begin + number):
        engine.open(name_of(index), tenant=TEXT, effort=TEXT, queued_s=0.0)


def wait_since_before(engine: LinkedEngine, number: int) -> None:
    """Let requests wait that have arrived before the stream, so that no report brings them."""
    wait_in_queue(engine, number)
    engine.engine.take()


def known(control: Control) -> int:
    """Return the number of live requests that the control plane knows."""
    return sum(int(connection.session.table.live.sum()) for connection in control.fleet.connections)


@asynccontextmanager
async def server(most_bytes: int, **welcome: Any) -> AsyncIterator[tuple[Measuring, str]]:
    servicer = Measuring(**welcome)
    async with serving(servicer, max_receive_message_length=most_bytes) as target:
        yield servicer, target


class Measuring(Scripted):
    """A control plane that reads everything and decides nothing."""

    def __init__(self, **welcome: Any) -> None:
        super().__init__()
        self.welcome = welcome
        self.streams = 0

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ConnectResponse]:  # noqa: N802
        self.streams += 1
        self.welcomes = False
        yield agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s", **self.welcome))
        async for response in super().Connect(request_iterator, context):
            yield response


async def test_a_snapshot_of_any_size_reaches_the_fleet(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        wait_since_before(engine, MANY)
        await until(lambda: engine.link.lease.connected)
        engine.step()
        await until(lambda: known(control) == MANY, PATIENT_S)
        assert control.names() == sorted(map(name_of, range(MANY)))
        (connection,) = control.fleet.connections
        # Only now does the control plane decide, and all decisions reach the engine.
        await engine.steps_until(lambda: len(engine.caps()) >= MANY)
        assert control.fleet.stream_ends == {}
        assert engine.link.outbox.bounds.most == WHOLE_BYTES
        await until(lambda: connection.session.totals.reports > 0)


async def test_an_older_control_plane_gets_as_many_requests_as_fit(caplog: pytest.LogCaptureFixture) -> None:
    async with server(BIG_MESSAGE) as (servicer, target):
        with LinkedEngine([target]) as engine:
            wait_since_before(engine, MANY)
            await until(lambda: engine.link.lease.connected)
            engine.step()
            await until(lambda: "step" in servicer.kinds(), PATIENT_S)
        (snapshot,) = servicer.heard("snapshot")
        assert not snapshot.continues
        assert servicer.streams == 1
        sent = len(snapshot.requests)
        assert WHOLE_BYTES * 0.9 < snapshot.ByteSize() <= WHOLE_BYTES
        assert [r.request_id for r in snapshot.requests] == [name_of(n) for n in range(sent)], "the oldest are sent"
        assert f"{MANY - sent} live requests are not reported" in caplog.text


@pytest.mark.parametrize("welcome", [{"reads_snapshot_parts": True}, {}], ids=["parts", "no parts"])
async def test_a_message_that_was_refused_for_its_size_is_not_sent_again(
    welcome: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    async with server(PART_BYTES // 5, **welcome) as (servicer, target):
        with LinkedEngine([target]) as engine:
            wait_in_queue(engine, 1500)
            await engine.steps_until(lambda: servicer.kinds().count("step") > 3)
            streams = servicer.streams
            # The stream that works stays.
            await engine.steps_until(lambda: servicer.kinds().count("step") > 9)
            assert servicer.streams == streams
        sizes = re.findall(r"a message was too large.*\((\d+) vs", caplog.text)
        assert len(sizes) == len(set(sizes)) == streams - 1 > 0


class Refusing(agent_pb2_grpc.AgentServiceServicer):
    """A control plane that refuses the first report of the first stream with this text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.streams = 0

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ConnectResponse]:  # noqa: N802
        self.streams += 1
        yield agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s", reads_snapshot_parts=True))
        async for message in request_iterator:
            if message.HasField("step") and self.streams == 1:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.text)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("Received message larger than max (40000 vs. 20000)", 20_000),
        # The text does not say how large the message was, so it counts as the largest report.
        ("Received message exceeds the maximum configured message size.", REPORT_BYTES // 2),
        # The control plane's own message was refused, by the agent or by a proxy.
        ("CLIENT: Received message larger than max (40000 vs. 20000)", WHOLE_BYTES),
        ("too many streams", WHOLE_BYTES),
    ],
)
async def test_a_bound_falls_with_the_size_of_the_message_that_was_refused(text: str, most: int) -> None:
    servicer = Refusing(text)
    async with serving(servicer) as target:
        with LinkedEngine([target]) as engine:
            engine.open("a")
            await engine.steps_until(lambda: servicer.streams == 2)
            assert engine.link.outbox.bounds.most == most


async def test_a_report_after_a_large_step_has_all_its_parts(control: Control, engine: LinkedEngine) -> None:
    """Every gauge and count of the step is in one of the reports, and nothing is counted twice."""
    engine.open("first")
    await engine.steps_until(lambda: control.names() == ["first"])
    for index in range(4000):
        engine.open(name_of(index), tenant="t" * 128)
    assert 4000 * (LONG + 128) > REPORT_BYTES
    engine.step()
    counted = {name: live.think_tokens for name, live in engine.engine.live.items()}
    await until(lambda: known(control) == len(counted))
    await until(lambda: {r.request_id: r.think_tokens for r in requests_of(control.fleet, "engine")} == counted)
    assert control.engine().running == 4001


async def test_the_largest_texts_fit_into_a_part() -> None:
    """Clients choose ids and texts, and four bytes may stand for one character."""
    async with server(BIG_MESSAGE, reads_snapshot_parts=True) as (servicer, target):
        with LinkedEngine([target]) as engine:
            for index in range(200):
                engine.open(f"{index}" + WIDE * 100_000, tenant=WIDE * 128, effort=WIDE * 128, queued_s=0.0)
            engine.engine.take()
            await until(lambda: engine.link.lease.connected)
            engine.step()
            await until(lambda: "step" in servicer.kinds())
        assert sum(len(part.requests) for part in servicer.heard("snapshot")) == 200
        assert max(message.ByteSize() for message in servicer.received) <= PART_BYTES + 16
        assert max(len(r.request_id) for part in servicer.heard("snapshot") for r in part.requests) == MAX_ID
