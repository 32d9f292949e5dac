"""Servers that are not a control plane and answer at its address.

`python -m tests.chaos.foreign KIND HOST:PORT [TARGET]`. Each kind is a server of its own. The kinds that speak the
protocol follow it up to the fault that they test. `older` and `newer` stand between an engine and the real control
plane at TARGET, and change each message to that of another version.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import Message
from meridian.v1 import agent_pb2

from tests.chaos import versions

Requests = Any
Context = Any
# Slot that no engine of these tests uses.
UNKNOWN_SLOT = 1000
# Revision of made-up settings, which no control plane stored.
FOREIGN_REVISION = 4_000_000
# Decisions in one message of a flood, number of slots that they address, and a cap that no request reaches.
FLOOD, FLOOD_SLOTS, FAR_CAP = 1000, 8, 100_000
CONNECT = "/meridian.v1.AgentService/Connect"


def welcome() -> agent_pb2.ConnectResponse:
    return agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="foreign", server_version="99.0"))


def settings(**fields: Any) -> agent_pb2.ConnectResponse:
    default = {"nonce": 1, "revision": FOREIGN_REVISION, "lease_ms": 30_000, "supports_think_disable": True}
    return agent_pb2.ConnectResponse(settings=agent_pb2.Settings(**{**default, **fields}))


class Decisions:
    """Numbers decisions and counts their outcomes. Each report with outcomes prints the counts as a line of JSON."""

    def __init__(self) -> None:
        self.made = 0
        self.outcomes: Counter[str] = Counter()

    def id(self) -> int:
        self.made += 1
        return self.made

    def hear(self, request: agent_pb2.ConnectRequest) -> None:
        self.outcomes.update(agent_pb2.Outcome.Name(o.outcome) for o in request.step.outcomes)
        if request.step.outcomes:
            print(json.dumps({"made": self.made, **self.outcomes}), flush=True)

    def of_each_kind(self, slot: int, step: int) -> agent_pb2.Directives:
        """Return a decision of each kind for `slot`; each would change the request's output if the agent applied it."""
        return agent_pb2.Directives(
            step=step,
            forces=[agent_pb2.ForceEnd(decision_id=self.id(), slot=slot)],
            caps=[agent_pb2.ThinkCap(decision_id=self.id(), slot=slot, max_think_tokens=0)],
            tiers=[agent_pb2.TierChange(decision_id=self.id(), slot=slot, tier=agent_pb2.EVICTION_TIER_UNREACHABLE)],
            probes=[agent_pb2.EatProbe(decision_id=self.id(), slot=slot)],
        )


def stray(requests: Requests, _: Context) -> Iterator[agent_pb2.ConnectResponse]:
    """Send decisions for unused slots and for requests that have ended, and a message of an unknown kind.

    The slot of an ended request may belong to another request by then.
    """
    decisions = Decisions()
    yield welcome()
    yield agent_pb2.ConnectResponse.FromString(versions.UNKNOWN_FIELD)
    yield settings()
    for request in requests:
        decisions.hear(request)
        report = request.step
        if report.steps:
            for slot in (UNKNOWN_SLOT, *(closed.slot for closed in report.closed)):
                yield agent_pb2.ConnectResponse(directives=decisions.of_each_kind(slot, report.step))


def flood(requests: Requests, _: Context) -> Iterator[agent_pb2.ConnectResponse]:
    """Send decisions as fast as the agent reads them; each supersedes the decision before it for the same slot."""
    decisions, caps = Decisions(), agent_pb2.Directives(step=1 << 40)
    for number in range(FLOOD):
        caps.caps.add(slot=number % FLOOD_SLOTS, max_think_tokens=FAR_CAP)
    yield welcome()
    yield settings()
    for request in requests:
        if request.HasField("snapshot"):
            break
    while True:
        for cap in caps.caps:
            cap.decision_id = decisions.id()
        yield agent_pb2.ConnectResponse(directives=caps)


def between(change: Callable[[Message], None], target: str) -> Callable[[Requests, Context], Iterator[Any]]:
    """Relay a stream to a control plane and back with each message changed; messages that become empty are left out."""

    def changed(message: Message) -> Message | None:
        change(message)
        return message if message.ByteSize() else None

    def say(requests: Requests, context: Context) -> Iterator[Any]:
        with grpc.insecure_channel(target) as channel:
            connect = channel.stream_stream(
                CONNECT,
                agent_pb2.ConnectRequest.SerializeToString,
                agent_pb2.ConnectResponse.FromString,
            )
            call = connect(filter(None, map(changed, requests)))
            context.add_callback(call.cancel)
            try:
                yield from filter(None, map(changed, call))
            except grpc.RpcError:
                context.abort(call.code(), call.details())

    return say


SPEAKING: dict[str, Callable[[Requests, Context], Iterator[Any]]] = {f.__name__: f for f in (stray, flood)}
VERSIONS = {f.__name__: f for f in (versions.older, versions.newer)}


class Handler(grpc.GenericRpcHandler):
    """Answers Connect with the messages of one kind."""

    def __init__(self, say: Callable[[Requests, Context], Iterator[Any]]) -> None:
        self._say = say

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method != CONNECT:
            return None
        return grpc.stream_stream_rpc_method_handler(
            self._say, agent_pb2.ConnectRequest.FromString, agent_pb2.ConnectResponse.SerializeToString
        )


def speak(kind: str, address: str, target: str) -> None:
    """Run a gRPC server of this kind; for the kind `unknown` it lacks the agent service."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    say = between(VERSIONS[kind], target) if kind in VERSIONS else SPEAKING.get(kind)
    if say is not None:
        server.add_generic_rpc_handlers([Handler(say)])
    assert server.add_insecure_port(address)
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


def accept(kind: str, address: str) -> None:
    """Accept connections: `mute` never sends anything, `noise` sends a lot of data that is not HTTP/2."""
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
    if sys.argv[1] in {"mute", "noise"}:
        accept(sys.argv[1], sys.argv[2])
    else:
        speak(sys.argv[1], sys.argv[2], "".join(sys.argv[3:]))
