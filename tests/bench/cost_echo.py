"""Echo recorded reports over bare gRPC, for `cost_control`.

Usage: `python -m tests.bench.cost_echo serve TARGET` and `python -m tests.bench.cost_echo send TARGET FILE`. `serve`
answers each message of each stream with an empty one and parses nothing. `send` opens a stream for each engine of a
recording of `cost_load` and sends each message at its recorded time. Both print a line of JSON when they are ready;
`send` begins at a line on its standard input, and prints the number of answers when all have arrived.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

METHOD = "/bench.Echo/Connect"
# Each stream has a connection of its own, as the streams of engines have.
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class Handler(grpc.GenericRpcHandler):
    """Serves the one method, on bytes."""

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._echo) if details.method == METHOD else None

    async def _echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""


async def serve(target: str) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(target)
    await server.start()
    print(json.dumps({"ready": True}), flush=True)
    await server.wait_for_termination()


async def send(target: str, recording: str) -> None:
    messages: dict[int, list[tuple[float, bytes]]] = defaultdict(list)
    for engine, at_s, message in pickle.loads(Path(recording).read_bytes()):
        messages[engine].append((at_s, message))
    channels = [grpc.aio.insecure_channel(target, OPTIONS) for _ in messages]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    print(json.dumps({"ready": True}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began_s = time.monotonic()
    streams = (_stream(*pair, began_s) for pair in zip(channels, messages.values(), strict=True))
    print(json.dumps({"answers": sum(await asyncio.gather(*streams))}), flush=True)
    await asyncio.gather(*(channel.close() for channel in channels))


async def _stream(channel: Any, messages: list[tuple[float, bytes]], began_s: float) -> int:
    """Send the messages of one engine; return the number of answers."""
    call = channel.stream_stream(METHOD)()

    async def sending() -> None:
        for at_s, message in messages:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            await call.write(message)
        await call.done_writing()

    sender, answers = asyncio.create_task(sending()), 0
    while await call.read() is not grpc.aio.EOF:
        answers += 1
    await sender
    return answers


if __name__ == "__main__":
    programs: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"serve": serve, "send": send}
    asyncio.run(programs[sys.argv[1]](*sys.argv[2:]))
