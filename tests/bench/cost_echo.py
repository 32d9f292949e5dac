"""Serve the agents' method without a control plane, for `cost_control`: `python -m tests.bench.cost_echo TARGET`.

The server parses nothing. It answers the first message of each stream with settings, so that an engine begins, and each
other message with an empty one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from meridian.v1 import agent_pb2

from tests.bench.fleet_engines import METHOD

SETTINGS = agent_pb2.ConnectResponse(settings=agent_pb2.Settings(revision=1, nonce=1)).SerializeToString()


class Handler(grpc.GenericRpcHandler):
    """Serves the one method, on bytes."""

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._echo) if details.method == METHOD else None

    async def _echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        answer = SETTINGS
        async for _ in requests:
            yield answer
            answer = b""


async def serve(target: str) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(target)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
