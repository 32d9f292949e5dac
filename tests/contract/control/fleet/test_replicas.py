"""Control planes as processes: nothing acknowledged is lost when one is killed, and a directory may have the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import grpc
import pytest
from meridian.v1 import policy_pb2

from tests.contract.clients import OWN_CONNECTION, calling
from tests.contract.control.app.test_server import Process
from tests.contract.streams import Control
from tests.fakes.linked import LinkedEngine, until

WRITERS, UPDATES = 4, 12


def leased(lease_ms: int) -> policy_pb2.Policy:
    return policy_pb2.Policy(fallback=policy_pb2.FallbackPolicy(lease_ms=lease_ms))


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
                    async with calling(process.target, OWN_CONNECTION) as clients:
                        answer = await clients.policy.UpdatePolicy(message, wait_for_ready=True, timeout=60)
                        acknowledged[name] = answer.revision

    total = WRITERS * UPDATES
    async with asyncio.TaskGroup() as writing:
        for writer in range(WRITERS):
            writing.create_task(write(writer))
        await until(lambda: len(acknowledged) >= total // 2, 60)
        process.kill()
        await process.started()
    async with calling(process.target) as clients:
        listed = await clients.policy.ListRevisions(policy_pb2.ListRevisionsRequest(page_size=1000))
    stored = listed.revisions
    assert not listed.next_page_token
    assert [revision.revision for revision in stored] == list(range(total + 1, 0, -1))
    by_author = {revision.author: revision for revision in stored[:-1]}
    assert by_author.keys() == acknowledged.keys()
    for name, revision in acknowledged.items():
        assert (by_author[name].revision, by_author[name].etag) == (revision.revision, revision.etag)


async def test_an_update_reaches_the_engines_after_the_store_has_lost_revisions(
    postgres_address: str, tmp_path: Path
) -> None:
    """As after a failover to a copy of the database that was behind, or when a backup is restored."""
    process = Process(tmp_path, "--store", postgres_address)
    try:
        await process.started()
        with LinkedEngine([process.target]) as engine:

            async def update(lease_ms: int) -> Any:
                async with calling(process.target, OWN_CONNECTION) as clients:
                    message = policy_pb2.UpdatePolicyRequest(policy=leased(lease_ms))
                    stored = await clients.policy.UpdatePolicy(message, timeout=60)
                await until(lambda: engine.link.lease.lease_s == lease_ms / 1000)
                return stored.revision.revision

            assert [await update(lease_ms) for lease_ms in (1000, 2000, 3000)] == [2, 3, 4]
            connection = await asyncpg.connect(postgres_address)
            await connection.execute("DELETE FROM policy_revisions WHERE revision > 2")
            await connection.close()
            assert [await update(lease_ms) for lease_ms in (4000, 5000, 6000)] == [3, 4, 5]
    finally:
        process.kill()
    assert process.log().count("the store has lost revision 4; revision 3 replaces it") == 1


async def test_a_revision_that_the_store_loses_between_two_reads_ends_no_control_plane(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the test above, if a replica looks at the very moment."""
    rollouts = control.parts.rollouts
    policies, database = rollouts.store.policies, rollouts.store.database
    lost = int(await policies.number()) + 1

    async def number() -> int:
        return lost

    monkeypatch.setattr(database, "follow", lambda look: look())
    monkeypatch.setattr(policies, "number", number)
    await rollouts.follow()
    assert f"policy revision {lost} is not stored" in caplog.text


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
