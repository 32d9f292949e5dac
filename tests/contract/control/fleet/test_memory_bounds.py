"""What agents send takes a bounded number of bytes, on a real server: whoever sends more is refused with the name of
the bound, and what a stream took is given back when it ends."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2

from meridian_control.common.opened_request import MAX_SLOTS, MAX_TEXT
from meridian_control.fleet import recording
from meridian_control.fleet.connection import QUEUE_BYTES, Responses
from meridian_control.fleet.memory import Memory, MemoryLimits
from tests.contract.control.app.test_server import Process
from tests.contract.control.server.test_flood import resident_mb
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control, failure
from tests.fakes.linked import until

MIB = 1 << 20
NAMES = ("request_id", "model", "tenant", "slo_class", "effort", "traceparent")


def long_texts(first: int, number: int, tag: str = "") -> list[agent_pb2.RequestOpened]:
    """Return requests whose texts are as long as allowed and all different."""
    return [
        agent_pb2.RequestOpened(slot=slot, **{name: f"{tag}{slot}{name}".ljust(MAX_TEXT, "x") for name in NAMES})  # type: ignore[arg-type]
        for slot in range(first, first + number)
    ]


async def load(engine: RawEngine, number: int) -> Any:
    """Report requests with long texts until the stream is refused; return code and reason, None if it is not."""
    for first in range(0, number, 100):
        try:
            await engine.report(opened=long_texts(first, 100, engine.hello.engine_id))
            await engine.answer(engine.step)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
    return None


@pytest.mark.parametrize(
    ("limits", "streams", "reason"),
    [
        (
            MemoryLimits(4 * MIB, 99 * MIB, 99 * MIB),
            1,
            "requests of one stream take more than 4 MiB (--max-stream-mib)",
        ),
        (MemoryLimits(4 * MIB, 6 * MIB, 99 * MIB), 3, "requests of one caller take more than 6 MiB (--max-caller-mib)"),
        (
            MemoryLimits(4 * MIB, 99 * MIB, 6 * MIB),
            3,
            "requests of all engines together take more than 6 MiB (--max-engines-mib)",
        ),
    ],
)
async def test_a_stream_that_takes_too_much_is_refused(
    control: Control, limits: MemoryLimits, streams: int, reason: str
) -> None:
    control.fleet.memory = memory = Memory(limits)
    async with grpc.aio.insecure_channel(control.target) as channel:
        engines = [await RawEngine(channel, f"e{number}").connect() for number in range(streams)]
        # Each but the last stays below the bound of its stream.
        number = 5000 if streams == 1 else 300
        found = [await load(engine, number) for engine in engines]
        assert found[-1] == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        assert found[:-1] == [None] * (streams - 1)
        # A client may hear of the refusal before the server has given back what the stream took.
        await until(lambda: memory.bytes <= limits.all)
        for engine in engines:
            engine.call.cancel()
        await until(lambda: not control.fleet.counted_sessions())
        assert memory.bytes == 0


async def test_parts_of_a_snapshot_count(control: Control) -> None:
    """A snapshot that never ends takes memory although none of its requests is there yet."""
    control.fleet.memory = Memory(MemoryLimits(stream=4 * MIB))
    async with grpc.aio.insecure_channel(control.target) as channel:
        engine = await RawEngine(channel, "e").connect()
        for _ in range(2):
            await engine.send(snapshot=agent_pb2.Snapshot(step=9, requests=long_texts(0, 100), continues=True))
        reason = "requests of one stream take more than 4 MiB (--max-stream-mib)"
        assert await failure(engine.call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)


async def test_recordings_that_nobody_reads_are_dropped(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "ALL_QUEUES_BYTES", 8 * MIB)
    recordings = [control.fleet.record("") for _ in range(16)]
    async with grpc.aio.insecure_channel(control.target) as channel:
        engine = await RawEngine(channel, "e").connect()
        assert await load(engine, 1000) is None
        waiting = sum(each.waiting_bytes for each in recordings)
        assert 0 < waiting <= 8 * MIB
        assert any(each.overflowed for each in recordings)
        engine.call.cancel()


async def test_answers_that_nobody_reads_are_bounded() -> None:
    waiting, answer = Responses(1024), agent_pb2.ConnectResponse()
    answer.directives.caps.extend(agent_pb2.ThinkCap(decision_id=number, slot=number) for number in range(1 << 16))
    while not waiting.full():
        waiting.put_nowait(answer)
    assert waiting.waiting_bytes <= QUEUE_BYTES + answer.ByteSize()
    waiting.get_nowait()
    assert not waiting.full()


async def test_a_message_of_very_many_entries_is_not_parsed(control: Control) -> None:
    async with grpc.aio.insecure_channel(control.target) as channel:
        call: Any = channel.stream_stream("/meridian.v1.AgentService/Connect")()
        hello = agent_pb2.ConnectRequest(hello=agent_pb2.Hello(engine_id="e", incarnation="1"))
        await call.write(hello.SerializeToString())
        entries = b"\x12\x00" * 1_000_000
        head = b"\x12" + bytes([len(entries) & 127 | 128, len(entries) >> 7 & 127 | 128, len(entries) >> 14])
        await call.write(head + entries)
        reason = f"snapshot.requests must have at most {MAX_SLOTS} entries"
        assert await failure(call) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


async def test_a_hostile_stream_costs_a_process_little_memory(own: Process) -> None:
    """The bound is one of resident memory: what the estimate leaves out must be small."""
    own.options = ("--max-stream-mib", "16")
    await own.started()
    async with grpc.aio.insecure_channel(own.target) as channel:
        before_mb = resident_mb(own)
        for number in range(2):
            engine = await RawEngine(channel, f"e{number}").connect()
            found = await load(engine, 10_000)
            assert found is not None
            assert found[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The decision log keeps lives and decisions within a bound of its own.
        assert resident_mb(own) - before_mb < 120
