"""Control planes as processes over one store: a change at one reaches the engines of all, and nothing acknowledged is
lost when one is killed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import pytest
from meridian.v1 import policy_pb2, policy_pb2_grpc

from tests.contract.control.app.test_server import Process
from tests.fakes.linked import LinkedEngine, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import Postgres

WRITERS, UPDATES = 4, 12
# Without this option channels share connections, and a control plane that is killed fails the calls of other channels
# too.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture
def replicas(tmp_path: Path, postgres: Postgres) -> Iterator[list[Process]]:
    """Yield three control planes on one PostgreSQL, none of which has started yet."""
    address, folders = postgres.database(), [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    processes = [Process(folder, "--store", address) for folder in folders]
    yield processes
    for process in processes:
        process.kill()


def leased(lease_ms: int) -> policy_pb2.Policy:
    return policy_pb2.Policy(fallback=policy_pb2.FallbackPolicy(lease_ms=lease_ms))


async def history(target: str) -> list[policy_pb2.PolicyRevision]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        answer = await stub.ListRevisions(policy_pb2.ListRevisionsRequest(page_size=1000), wait_for_ready=True)
        assert not answer.next_page_token
        return list(answer.revisions)


async def test_a_change_reaches_the_engines_of_every_replica(replicas: list[Process]) -> None:
    await asyncio.gather(*(process.started() for process in replicas))
    assert [len(await history(process.target)) for process in replicas] == [1, 1, 1], "one replica stores the policy"
    one, two, three = replicas
    with LinkedEngine([two.target], "second") as second, LinkedEngine([three.target], "third") as third:
        await until(lambda: second.link.lease.revision == third.link.lease.revision == 1)
        for process, lease_ms, revision in ((one, 500, 2), (two, 600, 3)):
            async with grpc.aio.insecure_channel(process.target) as channel:
                stub = policy_pb2_grpc.PolicyServiceStub(channel)
                await stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=leased(lease_ms)))
            await until(lambda wanted=revision: second.link.lease.revision == third.link.lease.revision == wanted)  # type: ignore[misc]
            assert (second.link.lease.lease_s, third.link.lease.lease_s) == (lease_ms / 1000, lease_ms / 1000)
    for process in replicas:
        assert await process.terminate() == 0
        assert "Traceback" not in process.log()


@pytest.fixture(params=["sqlite", "postgresql"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    options = () if request.param == "sqlite" else ("--store", request.getfixturevalue("postgres").database())
    made = Process(tmp_path, *options)
    yield made
    made.kill()


async def test_every_update_is_stored_once_although_the_server_is_killed(process: Process) -> None:
    await process.started()
    acknowledged: dict[str, policy_pb2.PolicyRevision] = {}

    async def write(writer: int) -> None:
        for number in range(UPDATES):
            name = f"{writer}-{number}"
            message = policy_pb2.UpdatePolicyRequest(policy=leased(1000 + number), author=name, request_id=name)
            while name not in acknowledged:
                with suppress(grpc.aio.AioRpcError):
                    async with grpc.aio.insecure_channel(process.target, OWN_CONNECTION) as channel:
                        stub = policy_pb2_grpc.PolicyServiceStub(channel)
                        answer = await stub.UpdatePolicy(message, wait_for_ready=True, timeout=60)
                        acknowledged[name] = answer.revision

    total = WRITERS * UPDATES
    async with asyncio.TaskGroup() as writing:
        for writer in range(WRITERS):
            writing.create_task(write(writer))
        for killed_after in (total // 4, total // 2):
            await until(lambda wanted=killed_after: len(acknowledged) >= wanted, 60)  # type: ignore[misc]
            process.kill()
            await process.started()
    stored = await history(process.target)
    assert [revision.revision for revision in stored] == list(range(total + 1, 0, -1))
    by_author = {revision.author: revision for revision in stored[:-1]}
    assert by_author.keys() == acknowledged.keys()
    for name, revision in acknowledged.items():
        assert (by_author[name].revision, by_author[name].etag) == (revision.revision, revision.etag)


async def test_a_directory_governs_the_engines(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "meridian.toml").write_text("fallback.lease_ms = 500")
    process = Process(tmp_path, "--policy-dir", str(folder))
    try:
        await process.started()
        with LinkedEngine([process.target]) as engine:
            await until(lambda: engine.link.lease.lease_s == 0.5)
            (folder / "meridian.toml").write_text("fallback.lease_ms = 5")
            await until(lambda: "fallback.lease_ms must be in [100, 86400000]; got 5" in process.log())
            (folder / "meridian.toml").write_text("fallback.lease_ms = 600")
            await until(lambda: engine.link.lease.lease_s == 0.6)
            assert engine.link.lease.revision == 2
        assert await process.terminate() == 0
    finally:
        process.kill()
    assert "Traceback" not in process.log()
