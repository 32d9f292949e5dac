"""What may answer at a control plane's address without being one: `python -m tests.chaos.foreign KIND HOST:PORT`.

Each kind is a server of its own. Those that speak the protocol follow it up to what they are there for.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Requests = Any
# No engine of these tests has it.
UNKNOWN_SLOT = 1000
CONNECT = "/meridian.v1.AgentService/Connect"


def welcome() -> agent_pb2.ConnectResponse:
    return agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="foreign", server_version="99.0"))


def settings(**fields: Any) -> agent_pb2.ConnectResponse:
    return agent_pb2.ConnectResponse(settings=agent_pb2.Settings(**{"nonce": 1, "revision": 1, **fields}))


def newer(requests: Requests) -> Iterator[bytes]:
    """Messages with fields, kinds and enum values of a later version."""
    unknown = b"\xfa\x3e\x05later"
    yield welcome().SerializeToString() + unknown
    yield unknown
    yield settings(lease_ms=30_000).SerializeToString() + unknown
    for _ in requests:
        yield (
            agent_pb2.ConnectResponse(
                directives=agent_pb2.Directives(
                    step=1,
                    tiers=[agent_pb2.TierChange(decision_id=1, slot=UNKNOWN_SLOT, tier=77)],  # type: ignore[arg-type]
                )
            ).SerializeToString()
            + unknown
        )


SPEAKING: dict[str, Callable[[Requests], Iterator[Any]]] = {f.__name__: f for f in (newer,)}


class Handler(grpc.GenericRpcHandler):
    """Answers Connect with what a kind says, as messages or as bytes."""

    def __init__(self, say: Callable[[Requests], Iterator[Any]]) -> None:
        self._say = say

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method != CONNECT:
            return None
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, _: self._say(requests),
            agent_pb2.ConnectRequest.FromString,
            lambda said: said if isinstance(said, bytes) else said.SerializeToString(),
        )


def speak(kind: str, address: str) -> None:
    """A gRPC server; of the kind `unknown`, one that does not have the service."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    if kind in SPEAKING:
        server.add_generic_rpc_handlers([Handler(SPEAKING[kind])])
    assert server.add_insecure_port(address)
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


def accept(kind: str, address: str) -> None:
    """A socket: `mute` never says anything, `noise` says what is not HTTP/2, and much of it."""
    host, _, port = address.rpartition(":")
    rng, kept = random.Random(0), []
    with socket.create_server((host, int(port))) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            kept.append(connection)
            if kind == "noise":
                threading.Thread(target=_noise, args=(connection, rng.randbytes(65536)), daemon=True).start()


def _noise(connection: socket.socket, data: bytes) -> None:
    try:
        while True:
            connection.sendall(data)
            time.sleep(0.01)
    except OSError:
        connection.close()


if __name__ == "__main__":
    (accept if sys.argv[1] in {"mute", "noise"} else speak)(sys.argv[1], sys.argv[2])
