"""Streams on which nothing happens: they carry heartbeats, so that no proxy cuts them, and the log gives the reason of
every end that the agent itself has caused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from meridian.v1 import agent_pb2

from tests.contract.streams import Control, Scripted
from tests.fakes.linked import LinkedEngine, until
from tests.processes import BUSY

# Seconds without a byte after which the proxy cuts a connection, and between two heartbeats: many times less, because a
# busy machine may delay each of them.
CUT_S, SHORT_S = 1.0 * BUSY, 0.2


@asynccontextmanager
async def cutting_proxy(port: int) -> AsyncIterator[tuple[str, list[str]]]:
    """Pass connections on to a port; cut each that carries no bytes in a direction for CUT_S. Yield the target and a
    list of the cuts."""
    cuts: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        both = writer, up_writer

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, name: str) -> None:
            try:
                while data := await asyncio.wait_for(source.read(1 << 16), CUT_S):
                    sink.write(data)
                    await sink.drain()
            except TimeoutError:
                cuts.append(name)
            finally:
                for end in both:
                    end.close()

        with suppress(ConnectionError):
            await asyncio.gather(copy(reader, up_writer, "up"), copy(up_reader, writer, "down"))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cuts
    finally:
        server.close()


async def heartbeats(control: Control, number: int) -> None:
    """Wait until the control plane has received this many heartbeats from now on."""
    recording, heard = control.fleet.record("engine"), 0
    async for record in recording.records():
        heard += record.up.HasField("heartbeat")
        if heard >= number:
            control.fleet.recordings.discard(recording)
            return


async def test_an_idle_stream_outlives_a_proxy_that_cuts_idle_ones(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.meridian")
    control.fleet._heartbeat_ms = round(SHORT_S * 1e3)
    async with cutting_proxy(control.port) as (target, cuts):
        with LinkedEngine([target]) as engine:
            await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
            await heartbeats(control, round(1.2 * CUT_S / SHORT_S))
            # The engine works again and stops in between, as when vLLM is paused.
            engine.open("a")
            await engine.steps_until(lambda: control.names() == ["a"])
            await heartbeats(control, round(1.2 * CUT_S / SHORT_S))
            assert (cuts, engine.streams) == ([], 1)
            assert control.fleet.stream_ends == {}
    states = [r.message for r in caplog.records if "READY" in r.message or "STALE" in r.message]
    assert len(states) <= 2, "STALE before the first stream, then READY"
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_an_engine_that_pauses_gets_the_answer_to_its_last_report(control: Control, engine: LinkedEngine) -> None:
    """The control plane answers at most one report a second, and no other report follows."""
    engine.open("a")
    await engine.steps_until(lambda: engine.caps() == [(0, 600)])
    for _ in range(3):
        engine.step()
    await until(lambda: engine.link.lease.unheard_since is None)
    assert not engine.link.lease.idle


async def test_an_older_control_plane_gets_no_heartbeat(scripted: Scripted) -> None:
    clock = [0.0]
    with LinkedEngine([scripted.target], clock=lambda: clock[0]) as engine:
        await until(lambda: engine.link.lease.connected)
        engine.open("a")
        await engine.steps_until(lambda: "step" in scripted.kinds())
        clock[0] += 5.0
        await engine.steps_until(lambda: scripted.kinds().count("step") > 5)
        assert "heartbeat" not in scripted.kinds()


async def test_ends_of_the_agents_own_are_told_in_its_words(
    control: Control, engine: LinkedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.meridian")
    first = next(iter(control.fleet.connections))
    engine.link.restart("the markers have changed")
    await until(lambda: control.fleet.connections and first not in control.fleet.connections)
    await until(lambda: engine.link.lease.connected)
    going = agent_pb2.GoingAway(reason="the control plane moves")
    engine.link._receive(agent_pb2.ConnectResponse(going_away=going))
    await until(lambda: "ended: the control plane is going away" in caplog.text)
    ends = [r for r in caplog.records if f"stream to {control.target} ended" in r.message]
    assert [r.levelno for r in ends] == [logging.INFO] * 2
    assert ends[0].message.endswith("ended: the markers have changed")
    assert "Locally cancelled" not in caplog.text
