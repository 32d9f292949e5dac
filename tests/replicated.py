"""Control-plane processes on one PostgreSQL, and clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import grpc
from meridian.v1 import fleet_pb2

from tests.contract.clients import Clients
from tests.contract.control.app.test_server import Process
from tests.fakes.linked import until
from tests.postgres import PASSES, Postgres, keep_time
from tests.processes import BUSY

CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED


class Client(Clients):
    """The clients of one replica."""

    async def engines(self, **fields: Any) -> fleet_pb2.ListEnginesResponse:
        answer: fleet_pb2.ListEnginesResponse = await self.fleet.ListEngines(fleet_pb2.ListEnginesRequest(**fields))
        return answer

    async def connected(self) -> dict[str, str]:
        """Return the engines by id, with their replicas."""
        return {e.engine_id: e.replica for e in (await self.engines()).engines if e.state == CONNECTED}

    async def requests(self, **fields: Any) -> list[str]:
        answer = await self.fleet.ListRequests(fleet_pb2.ListRequestsRequest(**fields))
        return [live.request_id for live in answer.requests]


@asynccontextmanager
async def client(process: Process) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(process.target) as channel:
        yield Client(channel)


async def until_answer(question: Any, wanted: Any, timeout_s: float = 20.0) -> None:
    """Repeat the question until its answer is the wanted one."""
    answer = None
    try:
        async with asyncio.timeout(timeout_s * BUSY):
            while (answer := await question()) != wanted:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"in the end the answer was {answer}, not {wanted}") from None


class Replicated:
    """Replicas on one database.

    still: the database's now() stands still, so that no busy replica counts as dead; `passes` moves it.
    """

    def __init__(self, folder: Path, postgres: Postgres, *, still: bool = False) -> None:
        self.folder, self.database = folder, postgres.database()
        if still:
            asyncio.run(keep_time(self.database))
        self.numbers = count()
        self.processes: list[Process] = []

    async def started(self) -> Process:
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        process = Process(folder, "--store", self.database)
        process.module = "tests.patient"
        self.processes.append(process)
        await process.started()
        return process

    async def pair(self) -> tuple[Process, Process]:
        """Start two replicas that know each other."""
        pair = await asyncio.gather(self.started(), self.started())
        for process in pair:
            await until(lambda process=process: "appeared" in process.log())  # type: ignore[misc]
        return pair

    async def passes(self, seconds: float) -> None:
        """Move the time of a database whose time stands still."""
        connection = await asyncpg.connect(self.database)
        try:
            await connection.execute(PASSES, seconds)
        finally:
            await connection.close()

    async def leader(self) -> tuple[str, int]:
        """Return address and token of the leading replica, or an empty string and 0 if none leads."""
        connection = await asyncpg.connect(self.database)
        try:
            row = await connection.fetchrow(
                "SELECT address, token FROM leader JOIN replicas USING (replica_id) WHERE expires_at > now()"
            )
        finally:
            await connection.close()
        return (str(row["address"]), int(row["token"])) if row else ("", 0)
