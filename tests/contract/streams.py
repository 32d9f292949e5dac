"""A control plane in this process, a scripted server, and calls of a client that misbehaves, for tests of the
stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.policy.model import Policy
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.storage.database import Database
from tests.fakes.control import control_plane, kill, running, utc_now
from tests.fakes.fleets import engines_of, requests_of
from tests.fakes.migrated import migrated
from tests.fakes.tables import policy


class Control:
    """A control plane in this process; a `start` after a `kill` keeps port and store."""

    def __init__(self, store: PolicyStore) -> None:
        self.store = store
        self.port = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.parts = control_plane(self.store)
        self.fleet, self.server = self.parts.whole.fleet, self.parts.server
        if (current := await self.store.current()) is None:
            await self.set_policy(policy(scheduler={"max_think_tokens": 600}))
        else:
            self.fleet.set_policy(current)
        await self.parts.look()
        self.port = await self.server.start(f"127.0.0.1:{self.port}")

    async def set_policy(self, new: Policy) -> StoredRevision:
        stored = await self.store.append(new, etag="", author="test", reason="", now=utc_now())
        self.fleet.set_policy(stored)
        return stored

    async def kill(self) -> None:
        await kill(self.parts)

    def connected(self, engine_id: str = "engine") -> bool:
        """Return whether this engine is connected, whatever other engines are."""
        return any(c.session.hello.engine_id == engine_id for c in self.fleet.connections)

    def engine(self, engine_id: str = "engine") -> Any:
        (found,) = [e for e in engines_of(self.fleet) if e.engine_id == engine_id]
        return found

    def names(self) -> list[str]:
        return [r.request_id for r in requests_of(self.fleet)]


@asynccontextmanager
async def controlling(path: Path) -> AsyncIterator[Control]:
    store = PolicyStore(await Database.open(migrated(path)))
    control = Control(store)
    async with running(control):
        yield control


class Scripted(agent_pb2_grpc.AgentServiceServicer):
    """A server that says what a test lets it say, and reads requests only while `reading` is set."""

    def __init__(self) -> None:
        self.target = ""
        self.received: list[agent_pb2.ConnectRequest] = []
        self._to_say: asyncio.Queue[agent_pb2.ConnectResponse] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self.welcomes = True
        self.reads_sparse_columns = False
        # The tasks of the newest stream: the one that answers, and the one that reads.
        self._newest: list[asyncio.Task[Any]] = []

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        self.received.append(await anext(request_iterator))
        # gRPC may end a stream late on this side. The old stream must neither take what the next stream is to be said
        # nor add what it still brings to the messages of the next stream.
        for task in self._newest:
            task.cancel()
        answering = asyncio.current_task()
        assert answering is not None
        self._newest = [answering]
        if self.welcomes:
            welcome = agent_pb2.Welcome(session_id="s", reads_sparse_columns=self.reads_sparse_columns)
            yield agent_pb2.ConnectResponse(welcome=welcome)
        reader = asyncio.create_task(self._read(request_iterator))
        self._newest = [answering, reader]
        said = asyncio.ensure_future(self._to_say.get())
        try:
            while reader in (await asyncio.wait({said, reader}, return_when=asyncio.FIRST_COMPLETED))[1] or said.done():
                yield said.result()
                said = asyncio.ensure_future(self._to_say.get())
        finally:
            said.cancel()
            reader.cancel()

    async def _read(self, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        await self.reading.wait()
        async for request in requests:
            self.received.append(request)
            await self.reading.wait()

    def say(self, **message: Any) -> None:
        """Send this response on the newest stream, or on the next one."""
        self._to_say.put_nowait(agent_pb2.ConnectResponse(**message))

    def heard(self, kind: str) -> list[Any]:
        """Return all that was received of one kind."""
        return [getattr(message, kind) for message in self.received if message.HasField(kind)]  # type: ignore[arg-type]

    def kinds(self) -> list[str | None]:
        return [m.WhichOneof("message") for m in self.received]


@asynccontextmanager
async def serving(servicer: agent_pb2_grpc.AgentServiceServicer, **options: int) -> AsyncIterator[str]:
    """Serve the agent's service on loopback, and yield the target. options: gRPC's, by the part behind the dot."""
    server = grpc.aio.server(options=[(f"grpc.{name}", value) for name, value in options.items()])
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def call_to(target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield agent_pb2_grpc.AgentServiceStub(channel).Connect()


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status code and the text with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    return await refusal(to_the_end(call))


def bad_slot() -> agent_pb2.ConnectRequest:
    opened = agent_pb2.RequestOpened(slot=MAX_SLOTS, request_id="a")
    return agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=1, steps=1, opened=[opened]))
