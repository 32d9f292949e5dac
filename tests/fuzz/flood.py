"""A flood of nonsense at a real control plane: calls that cannot be parsed, streams that hang up, half-open HTTP/2.

Each kind of caller is a coroutine that makes one call and returns its status, or None if it did not wait for one.
`python -m tests.fuzz.flood HOST:PORT` floods a control plane that is already running.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
from meridian.v1 import agent_pb2

from tests.fakes.agent import hello

CONNECT = "/meridian.v1.AgentService/Connect"
GET_POLICY = "/meridian.v1.PolicyService/GetPolicy"
WATCH = "/meridian.v1.FleetService/WatchFleet"
CHECK, WATCH_HEALTH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
# A field number of 0, which no protobuf message may have.
UNPARSEABLE = b"\x00" * 12
INVALID = grpc.StatusCode.INVALID_ARGUMENT
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]

# ------------------------------------------------------------------------------------------------- HTTP/2, by hand

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0x0, 0x1, 0x4
END_STREAM, END_HEADERS = 0x1, 0x4


def frame(kind: int, payload: bytes, stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Return an HPACK field that enters no table; both parts are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(path: bytes, stream: int = 1, **further: bytes) -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        **{name.replace("_", "-").encode(): value for name, value in further.items()},
    }
    return frame(HEADERS, b"".join(header(*field) for field in fields.items()), stream, END_HEADERS)


def half_open(rng: random.Random) -> bytes:
    """Return the beginning of a connection that goes no further."""
    begun = PREFACE + frame(SETTINGS, b"")
    return rng.choice(
        (
            b"",
            rng.randbytes(200),
            PREFACE[:10],
            begun,
            begun + frame(DATA, b"", 7)[:5],
            begun + frame(HEADERS, rng.randbytes(60), 1, END_HEADERS),
            begun + call_headers(CONNECT.encode()),
            begun + call_headers(CONNECT.encode()) + frame(DATA, b"\x00\x00\x00\xff\xff" + b"\x08" * 100, 1),
            begun + call_headers(b"/\xff\xfe/\xff") + frame(DATA, b"", 1),
            begun + b"".join(call_headers(CONNECT.encode(), stream) for stream in range(1, 21, 2)),
            begun + call_headers(GET_POLICY.encode(), note=b"\xff" * 99) + frame(DATA, b"\x00" * 5, 1, END_STREAM),
            begun + call_headers(CONNECT.encode(), grpc_timeout=b"-1S"),
        )
    )


# ------------------------------------------------------------------------------------------------------- the callers


class Flood:
    """Callers of one control plane. Their engine ids and messages come from one seed."""

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target, self.rng = target, random.Random(seed)
        self.kinds: dict[str, Callable[[grpc.aio.Channel], Awaitable[grpc.StatusCode | None]]] = {
            "stream of garbage": self._garbage,
            "garbage after hello": self._garbage_after_hello,
            "no hello": self._no_hello,
            "absurd snapshot": self._absurd_snapshot,
            "garbage, gone at once": self._garbage_and_gone,
            "hello, gone at once": self._hello_and_gone,
            "no method": self._no_method,
            "garbage in a call": self._garbage_in_a_call,
            "garbage in a watch": self._garbage_in_a_watch,
            "garbage in a health check": self._garbage_in_a_health_check,
            "garbage in a health watch": self._garbage_in_a_health_watch,
        }
        self.answers: Counter[tuple[str, grpc.StatusCode | None]] = Counter()

    async def run(self, calls: int, *, side_by_side: int = 4) -> None:
        """Make `calls` calls of each kind."""
        await asyncio.gather(*(self._calls(kind, calls // side_by_side) for kind in [*self.kinds] * side_by_side))

    async def half_open(self, connections: int, *, side_by_side: int = 8) -> None:
        """Open connections that send only the beginning of one, and reset them."""
        await asyncio.gather(*(self._half_open(connections // side_by_side) for _ in range(side_by_side)))

    async def _calls(self, kind: str, calls: int) -> None:
        async with grpc.aio.insecure_channel(self.target, OPTIONS) as channel:
            for _ in range(calls):
                self.answers[kind, await self.kinds[kind](channel)] += 1

    async def _half_open(self, connections: int) -> None:
        host, _, port = self.target.rpartition(":")
        for _ in range(connections):
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(half_open(self.rng))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.02):
                            await reader.read(1024)
                    linger: socket.socket = writer.get_extra_info("socket")
                    linger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                finally:
                    # The connection is also reset if the server was the first to end it.
                    writer.transport.abort()
        self.answers["half-open", None] += connections

    # The kinds of callers.

    def _hello(self) -> bytes:
        """Return the Hello of an unknown engine, with a fault that is nearly as long as allowed.

        The control plane goes on showing the fault after the stream has ended.
        """
        said = hello(f"engine-{self.rng.getrandbits(64):x}", fault="x" * self.rng.randrange(60_000))
        return agent_pb2.ConnectRequest(hello=said).SerializeToString()

    async def _said(self, channel: grpc.aio.Channel, *messages: bytes) -> grpc.StatusCode:
        """Return the status with which a stream of these messages ends."""
        call: Any = channel.stream_stream(CONNECT)()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()  # type: ignore[no-any-return]

    async def _garbage(self, channel: grpc.aio.Channel) -> grpc.StatusCode:
        return await self._said(channel, UNPARSEABLE)

    async def _garbage_after_hello(self, channel: grpc.aio.Channel) -> grpc.StatusCode:
        return await self._said(channel, self._hello(), UNPARSEABLE)

    async def _no_hello(self, channel: grpc.aio.Channel) -> grpc.StatusCode:
        return await self._said(channel, b"")

    async def _absurd_snapshot(self, channel: grpc.aio.Channel) -> grpc.StatusCode:
        absurd = agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=[agent_pb2.RequestOpened(slot=1 << 31)]))
        return await self._said(channel, self._hello(), absurd.SerializeToString())

    async def _garbage_and_gone(self, channel: grpc.aio.Channel) -> None:
        call: Any = channel.stream_stream(CONNECT)()
        with suppress(grpc.aio.AioRpcError):
            await call.write(UNPARSEABLE)
        call.cancel()

    async def _hello_and_gone(self, channel: grpc.aio.Channel) -> None:
        call: Any = channel.stream_stream(CONNECT)()
        with suppress(grpc.aio.AioRpcError):
            await call.write(self._hello())
            await call.read()
        call.cancel()

    async def _one(self, call: Any) -> grpc.StatusCode:
        with suppress(grpc.aio.AioRpcError):
            await call
        return await call.code()  # type: ignore[no-any-return]

    async def _no_method(self, channel: Any) -> grpc.StatusCode:
        return await self._one(channel.unary_unary(f"/no.Such/{self.rng.getrandbits(32)}")(UNPARSEABLE))

    async def _garbage_in_a_call(self, channel: Any) -> grpc.StatusCode:
        return await self._one(channel.unary_unary(GET_POLICY)(UNPARSEABLE))

    async def _garbage_in_a_watch(self, channel: Any, method: str = WATCH) -> grpc.StatusCode:
        call: Any = channel.unary_stream(method)(UNPARSEABLE)
        with suppress(grpc.aio.AioRpcError):
            await call.read()
        return await call.code()  # type: ignore[no-any-return]

    async def _garbage_in_a_health_check(self, channel: Any) -> grpc.StatusCode:
        return await self._one(channel.unary_unary(CHECK)(UNPARSEABLE))

    async def _garbage_in_a_health_watch(self, channel: Any) -> grpc.StatusCode:
        return await self._garbage_in_a_watch(channel, WATCH_HEALTH)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    flood, end = Flood(args.target), time.monotonic() + args.seconds
    while time.monotonic() < end:
        await asyncio.gather(flood.run(40), flood.half_open(400, side_by_side=40))
    for (kind, code), count in sorted(flood.answers.items(), key=str):
        print(f"{count:7} {kind}: {code.name if code else 'not waited for'}")
    print(f"{flood.answers.total():7} in all")


if __name__ == "__main__":
    asyncio.run(main())
