"""PolicyService on a real grpc.aio server over a real store."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from meridian.v1 import policy_pb2, policy_pb2_grpc

from meridian_control.errors import MAX_MESSAGE_CHARS
from meridian_control.policy import Policy, to_proto
from meridian_control.policy_service import PolicyService
from meridian_control.store import PolicyStore, StoredRevision

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@dataclass
class Service:
    stub: "policy_pb2_grpc.PolicyServiceAsyncStub"
    changes: list[StoredRevision] = field(default_factory=list)

    async def get(self) -> policy_pb2.PolicyRevision:
        return (await self.stub.GetPolicy(policy_pb2.GetPolicyRequest())).revision

    async def update(self, **fields: Any) -> policy_pb2.PolicyRevision:
        request = policy_pb2.UpdatePolicyRequest(**{"policy": policy_pb2.Policy(), **fields})
        return (await self.stub.UpdatePolicy(request)).revision

    async def refusal(self, **fields: Any) -> Any:
        """The google.rpc.Status of an update that fails."""
        request = policy_pb2.UpdatePolicyRequest(**{"policy": policy_pb2.Policy(), **fields})
        return await rpc_status.aio.from_call(self.stub.UpdatePolicy(request))


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Service]:
    store = await PolicyStore.open(f"sqlite+aiosqlite:///{path}")
    changes: list[StoredRevision] = []
    server = grpc.aio.server()
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyService(store, lambda: NOW, changes.append), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Service(policy_pb2_grpc.PolicyServiceStub(channel), changes)
    finally:
        await server.stop(0)
        await store.close()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path / "policy.db") as running:
        yield running


def detail(status: Any, kind: Any) -> Any:
    """The one detail of that kind."""
    (found,) = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    message = kind()
    found.Unpack(message)
    return message


def bad_policy() -> policy_pb2.Policy:
    policy = policy_pb2.Policy()
    policy.entropy.ema_alpha = 1.5
    policy.fallback.lease_ms = 1
    policy.model["a.b"].think_end_token_ids.append(-1)
    return policy


async def test_nothing_stored_yet(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.get()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_update_then_get(service: Service) -> None:
    policy = policy_pb2.Policy(fallback=policy_pb2.FallbackPolicy(lease_ms=500))
    updated = await service.update(policy=policy, author="ann", reason="why")
    assert await service.get() == updated
    assert (updated.revision, updated.author, updated.reason) == (1, "ann", "why")
    assert updated.create_time.ToDatetime(tzinfo=UTC) == NOW
    assert updated.policy.fallback.lease_ms == 500
    assert updated.policy.scheduler == to_proto(Policy()).scheduler
    assert [(change.revision, change.etag) for change in service.changes] == [(1, updated.etag)]


async def test_etag_moves_on(service: Service) -> None:
    first = await service.update()
    second = await service.update(etag=first.etag)
    status = await service.refusal(etag=first.etag)
    assert status.code == grpc.StatusCode.ABORTED.value[0]
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("ETAG_MISMATCH", "meridian")
    assert info.metadata == {"expected": first.etag, "actual": second.etag}
    assert await service.get() == second
    assert len(service.changes) == 2


async def test_every_bad_field_is_listed(service: Service) -> None:
    status = await service.refusal(policy=bad_policy())
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert detail(status, error_details_pb2.ErrorInfo).reason == "POLICY_INVALID"
    found = detail(status, error_details_pb2.BadRequest).field_violations
    assert [(v.field, v.description) for v in found] == [
        ("entropy.ema_alpha", "must be in (0, 1]; got 1.5"),
        ("fallback.lease_ms", "must be in [100, 86400000]; got 1"),
        ('model."a.b".think_end_token_ids[0]', "must be in [0, 2147483647]; got -1"),
    ]
    assert service.changes == []


async def test_a_flood_of_bad_fields_still_arrives(service: Service) -> None:
    policy = policy_pb2.Policy()
    for index in range(5000):
        policy.model[f"模型-{index}"].think_end_token_ids.append(-1)
    status = await service.refusal(policy=policy)
    found = detail(status, error_details_pb2.BadRequest).field_violations
    assert found[0].description == "must be in [0, 2147483647]; got -1"
    assert found[-1].description == f"{5000 - len(found) + 1} more not listed"
    assert len(status.message) == MAX_MESSAGE_CHARS


async def test_a_policy_is_required(service: Service) -> None:
    status = await service.refusal(policy=None)
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("policy", "must be set")


async def test_validate_only_stores_nothing(service: Service) -> None:
    first = await service.update()
    policy = policy_pb2.Policy(telemetry=policy_pb2.TelemetryPolicy(report_interval_steps=9))
    checked = await service.update(policy=policy, etag=first.etag, validate_only=True)
    assert (checked.revision, checked.policy.telemetry.report_interval_steps) == (0, 9)
    assert await service.get() == first
    assert len(service.changes) == 1


@pytest.mark.parametrize(
    "fields", [{"policy": bad_policy()}, {"etag": "stale"}, {"policy": bad_policy(), "etag": "stale"}, {"policy": None}]
)
async def test_validate_only_fails_alike(service: Service, fields: dict[str, Any]) -> None:
    await service.update()
    assert await service.refusal(**fields, validate_only=True) == await service.refusal(**fields)


async def test_updates_at_once_have_one_winner(service: Service) -> None:
    first = await service.update()
    results = await asyncio.gather(*(service.update(etag=first.etag) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(result, policy_pb2.PolicyRevision) for result in results) == 1
    assert [change.revision for change in service.changes] == [1, 2]


class PausingStore(PolicyStore):
    """Lets a test act between the commit and its acknowledgement."""

    committed: asyncio.Event
    go_on: asyncio.Event

    async def append(self, policy: Policy, **rest: Any) -> StoredRevision:
        stored = await super().append(policy, **rest)
        self.committed.set()
        await self.go_on.wait()
        return stored


async def test_a_caller_that_hangs_up_does_not_hide_the_change(tmp_path: Path) -> None:
    store = await PausingStore.open(f"sqlite+aiosqlite:///{tmp_path / 'policy.db'}")
    store.committed, store.go_on = asyncio.Event(), asyncio.Event()
    changed: asyncio.Future[StoredRevision] = asyncio.Future()
    service = PolicyService(store, lambda: NOW, changed.set_result)
    # grpc.aio cancels the handler when the caller hangs up.
    handler = asyncio.create_task(service._update(policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy())))
    await store.committed.wait()
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    store.go_on.set()
    async with asyncio.timeout(10):
        assert await changed == await store.current()
    await store.close()


async def test_restart_keeps_the_policy(tmp_path: Path) -> None:
    async with serving(tmp_path / "policy.db") as before:
        stored = await before.update(author="ann")
    async with serving(tmp_path / "policy.db") as after:
        assert await after.get() == stored
        assert (await after.update(etag=stored.etag)).revision == 2


async def test_lost_database_is_unavailable(tmp_path: Path) -> None:
    async with serving(tmp_path / "policy.db") as service:
        await service.update()
        with closing(sqlite3.connect(tmp_path / "policy.db")) as connection, connection:
            connection.execute("DROP TABLE policy_revisions")
        status = await service.refusal()
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert detail(status, error_details_pb2.ErrorInfo).reason == "STORE_UNAVAILABLE"
