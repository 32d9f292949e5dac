"""PolicyService on a real grpc.aio server over a real store."""

import asyncio
import base64
import sqlite3
from collections.abc import AsyncIterator, Callable
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

from meridian_control.common.errors import MAX_MESSAGE_CHARS, NotFound
from meridian_control.policy.diff import Subject
from meridian_control.policy.formats import parse_toml, to_proto
from meridian_control.policy.model import Policy, Who
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.server.policy_service import PolicyService
from meridian_control.storage.database import Database
from tests.contract.gated import gated
from tests.contract.lost_store import lost_after
from tests.contract.streams import refusal
from tests.fakes.migrated import migrated
from tests.processes import ROOT

DATA = ROOT / "tests" / "data" / "policies"
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@dataclass
class Service:
    stub: "policy_pb2_grpc.PolicyServiceAsyncStub"
    changes: list[StoredRevision] = field(default_factory=list)

    async def get(self) -> policy_pb2.PolicyRevision:
        return (await self.stub.GetPolicy(policy_pb2.GetPolicyRequest())).revision

    async def answer(self, **fields: Any) -> policy_pb2.UpdatePolicyResponse:
        request = policy_pb2.UpdatePolicyRequest(**{"policy": policy_pb2.Policy(), **fields})
        return await self.stub.UpdatePolicy(request)

    async def update(self, **fields: Any) -> policy_pb2.PolicyRevision:
        return (await self.answer(**fields)).revision

    async def refusal(self, **fields: Any) -> Any:
        """Return the google.rpc.Status of an update that fails."""
        request = policy_pb2.UpdatePolicyRequest(**{"policy": policy_pb2.Policy(), **fields})
        return await rpc_status.aio.from_call(self.stub.UpdatePolicy(request))


def subject(engine_id: str, request_id: str) -> Subject:
    """Return the one engine, or its one request, which has a cap of its own. Raises NotFound for other ids."""
    if engine_id not in ("", "e") or request_id not in ("", "r"):
        raise NotFound(f"no {engine_id} {request_id}")
    own = (None, 50) if request_id else ()
    return Subject(Who("lora", "acme" if request_id else "", engine_labels={"zone": "a"}), "m", *own)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Service]:
    store = PolicyStore(await Database.open(migrated(path)))
    changes: list[StoredRevision] = []
    try:
        async with stub(store, changes.append) as served:
            yield Service(served, changes)
    finally:
        await store.database.close()


@asynccontextmanager
async def stub(
    store: PolicyStore, on_change: Callable[[StoredRevision], None]
) -> AsyncIterator["policy_pb2_grpc.PolicyServiceAsyncStub"]:
    async with gated(store.database) as (server, target):
        servicer = PolicyService(store, lambda: NOW, on_change, subject)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, server)
        await server.start()
        async with grpc.aio.insecure_channel(target) as channel:
            yield policy_pb2_grpc.PolicyServiceStub(channel)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path / "policy.db") as running:
        yield running


def detail(status: Any, kind: Any) -> Any:
    """Return the status's only detail of this kind."""
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


async def test_etag_moves_on(service: Service) -> None:
    first = await service.update()
    second = await service.update(etag=first.etag)
    status = await service.refusal(etag=first.etag)
    assert status.code == grpc.StatusCode.ABORTED.value[0]
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("ETAG_MISMATCH", "meridian")
    (broken,) = detail(status, error_details_pb2.PreconditionFailure).violations
    assert (broken.type, broken.subject, broken.description) == ("ETAG", "policy", status.message)
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
    for index in range(250):
        policy.model[f"模型-{index}"].think_end_token_ids.extend([-1] * 20)
    status = await service.refusal(policy=policy)
    found = detail(status, error_details_pb2.BadRequest).field_violations
    assert found[0].description == "must be in [0, 2147483647]; got -1"
    assert found[-1].description == f"{5000 - len(found) + 1} more not listed"
    assert len(status.message) == MAX_MESSAGE_CHARS


REFUSED: list[dict[str, Any]] = [
    {"policy": bad_policy()},
    {"etag": "stale"},
    {"policy": bad_policy(), "etag": "stale"},
    {"policy": None},
    {"author": "a\0b"},
    {"reason": "\0"},
    {"request_id": "x" * 129},
    {"request_id": "\0"},
    {"policy": to_proto(parse_toml("fallback.lease_ms = 100")), "request_id": "first"},
]


async def test_validate_only_fails_alike(service: Service) -> None:
    await service.update(request_id="first")
    for fields in REFUSED:
        assert await service.refusal(**fields, validate_only=True) == await service.refusal(**fields)


async def test_an_older_client_may_send_removed_fields_only_with_their_defaults(service: Service) -> None:
    """It sends every field that it knows: what version 0.3.0 sends for an empty file is the default policy but for the
    answer reserve, which it does not have by default."""
    policy = policy_pb2.Policy.FromString(base64.b64decode((DATA / "default-0.3.0.b64").read_text()))
    await service.update(policy=policy)
    expected = to_proto(Policy())
    expected.scheduler.answer_reserve_tokens = 0
    assert (await service.get()).policy == expected
    policy.loop.MergeFromString(b"\x30\xd0\x05")  # near_repeated_tokens = 720
    (violation,) = detail(await service.refusal(policy=policy), error_details_pb2.BadRequest).field_violations
    assert violation.field == "loop.near_repeated_tokens"
    assert violation.description.startswith("was removed after version 0.3.0: loop.min_rounds and loop.min_tokens end ")
    assert (await service.get()).revision == 1


# ---------------------------------------------------------------------------------------------------------- history

LEASED = parse_toml("fallback.lease_ms = 500")


async def test_pages_of_history_stay_as_they_are_while_revisions_come(service: Service) -> None:
    stored = [await service.update(author=f"a{n}") for n in range(5)]
    request = policy_pb2.ListRevisionsRequest(page_size=2)
    found: list[policy_pb2.PolicyRevision] = []
    while True:
        page = await service.stub.ListRevisions(request)
        found += page.revisions
        await service.update()
        if not (token := page.next_page_token):
            break
        request.page_token = token
    for revision in stored:
        revision.ClearField("policy")
    assert found == stored[::-1]


async def test_rollback_is_a_new_revision(service: Service) -> None:
    first, second = await service.update(policy=to_proto(LEASED)), await service.update()

    def rollback(**fields: Any) -> Any:
        return service.stub.RollbackPolicy(policy_pb2.RollbackPolicyRequest(revision=1, **fields))

    checked = await rollback(validate_only=True)
    done = await rollback(etag=second.etag, author="bob", request_id="a")
    assert checked.changes == done.changes
    assert [(c.path, c.before, c.after) for c in done.changes] == [("fallback.lease_ms", "30000", "500")]
    new = done.revision
    assert (new.revision, new.policy, new.author) == (3, first.policy, "bob")
    assert new.reason == "rollback to revision 1"
    assert await service.get() == new
    assert [change.revision for change in service.changes] == [1, 2, 3]
    assert await rollback(request_id="a") == done
    assert (await refusal(rollback(etag=second.etag)))[0] is grpc.StatusCode.ABORTED
    assert (await refusal(rollback(etag=second.etag, validate_only=True)))[0] is grpc.StatusCode.ABORTED


async def test_an_unreadable_revision_does_not_hide_the_others(service: Service, tmp_path: Path) -> None:
    await service.update()
    with closing(sqlite3.connect(tmp_path / "policy.db")) as connection, connection:
        connection.execute("UPDATE policy_revisions SET policy = 'later = 1'")
    listed = await service.stub.ListRevisions(policy_pb2.ListRevisionsRequest())
    assert [revision.revision for revision in listed.revisions] == [1]
    answer = await service.answer(policy=to_proto(LEASED))
    assert [(c.path, c.before, c.after) for c in answer.changes] == [("fallback.lease_ms", "30000", "500")]
    diff = service.stub.DiffPolicies(policy_pb2.DiffPoliciesRequest())
    assert (await refusal(diff))[0] is grpc.StatusCode.FAILED_PRECONDITION


class PausingStore(PolicyStore):
    """A policy store that lets a test act between a commit and its acknowledgement."""

    committed: asyncio.Event
    go_on: asyncio.Event

    async def append_and_compare(self, policy: Policy, **rest: Any) -> tuple[StoredRevision, StoredRevision | None]:
        appended = await super().append_and_compare(policy, **rest)
        self.committed.set()
        await self.go_on.wait()
        return appended


async def test_a_caller_that_hangs_up_does_not_hide_the_change(tmp_path: Path) -> None:
    store = PausingStore(await Database.open(migrated(tmp_path / "policy.db")))
    store.committed, store.go_on = asyncio.Event(), asyncio.Event()
    changed: asyncio.Future[StoredRevision] = asyncio.Future()
    async with stub(store, changed.set_result) as served, asyncio.timeout(120):
        call = served.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy()))
        await store.committed.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        store.go_on.set()
        assert await changed == await store.current()
    await store.database.close()


async def test_a_stored_change_is_acknowledged_though_the_store_is_lost_then(tmp_path: Path) -> None:
    store, changed = PolicyStore(await Database.open(migrated(tmp_path / "policy.db"))), list[StoredRevision]()
    async with stub(store, changed.append) as served:
        service = Service(served, changed)
        await service.update(policy=to_proto(LEASED))
        with lost_after(store.database, "INSERT INTO policy_revisions"):
            answer = await service.answer()
        with lost_after(store.database, "INSERT INTO policy_revisions"):
            rolled_back = await served.RollbackPolicy(policy_pb2.RollbackPolicyRequest(revision=1))
        assert [change.revision for change in changed] == [1, 2, 3]
        assert rolled_back.revision == await service.get()
        assert [(c.path, c.before, c.after) for c in answer.changes] == [("fallback.lease_ms", "500", "30000")]
        assert [(c.path, c.before, c.after) for c in rolled_back.changes] == [("fallback.lease_ms", "30000", "500")]
    await store.database.close()


async def test_lost_database_is_unavailable(tmp_path: Path) -> None:
    async with serving(tmp_path / "policy.db") as service:
        await service.update()
        with closing(sqlite3.connect(tmp_path / "policy.db")) as connection, connection:
            connection.execute("DROP TABLE policy_revisions")
        status = await service.refusal()
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert detail(status, error_details_pb2.ErrorInfo).reason == "STORE_UNAVAILABLE"
