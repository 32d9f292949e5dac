"""Audit records of a real server on SQLite and PostgreSQL, as AuditService and `meridianctl audit` show them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from meridian.v1 import audit_pb2, fleet_pb2, freeze_pb2, policy_pb2, policy_pb2_grpc, rollout_pb2
from sqlalchemy import text
from typer.testing import CliRunner

from meridian_control.cli.main import app
from meridian_control.server import audit_log as audit_module
from meridian_control.server.audit_log import AuditLog, AuditOutcome, Call, wanted
from meridian_control.server.interceptor import MAX_DETAIL_CHARS, MAX_REQUEST_BYTES, _details
from meridian_control.storage.database import Database
from tests.contract.clients import Clients, calling
from tests.contract.gated import gated
from tests.contract.raw_engine import RawEngine
from tests.contract.secured import Secured, securing
from tests.contract.streams import refusal
from tests.fakes.control import utc_now

UPDATE = "meridian.v1.PolicyService/UpdatePolicy"
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@pytest.fixture
async def secured(tmp_path: Path, address: str) -> AsyncIterator[Secured]:
    async with securing(tmp_path, address) as running:
        yield running


def outcome_of(record: audit_pb2.AuditRecord) -> tuple[str, str, str, str]:
    return record.outcome, record.error, record.before_etag, record.after_etag


async def records(secured: Secured, **fields: Any) -> list[audit_pb2.AuditRecord]:
    async with secured.calling("admin") as admin:
        return list((await admin.audit.ListAudit(audit_pb2.ListAuditRequest(**fields))).records)


async def ended(call: Any) -> Any:
    """Return a call's answer, or its status code if the call fails."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error.code()


async def test_what_is_recorded(secured: Secured) -> None:
    """Changes are recorded, whether they succeed, fail, are refused by role, are only validated or are malformed;
    reads, also of audit records, are not recorded."""
    policy = policy_pb2.Policy()
    async with secured.calling("operator") as operator, secured.calling("viewer") as viewer:
        before = (await operator.policy.GetPolicy(policy_pb2.GetPolicyRequest())).revision

        async def update(client: Clients, **fields: Any) -> Any:
            return await ended(client.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy, **fields)))

        done = await update(operator, reason="why\0not", request_id="r1", author="x")
        assert done is grpc.StatusCode.INVALID_ARGUMENT
        done = await update(operator, reason="why", request_id="r1", author="x")
        assert await update(viewer, reason="mine") is grpc.StatusCode.PERMISSION_DENIED
        assert await update(operator, etag="stale") is grpc.StatusCode.ABORTED
        await update(operator, validate_only=True)
        rollback = policy_pb2.RollbackPolicyRequest(revision=1, etag=done.revision.etag)
        back = await operator.policy.RollbackPolicy(rollback)
        assert await update(operator, reason="x" * 1001) is grpc.StatusCode.INVALID_ARGUMENT
        await operator.fleet.ListEngines(fleet_pb2.ListEnginesRequest())

    found = await records(secured)
    rows = [(r.principal, r.role, r.method.rpartition("/")[2], r.outcome, r.before_etag, r.after_etag) for r in found]
    operator_is = ("operator", "operator")
    assert rows[::-1] == [
        (*operator_is, "UpdatePolicy", "INVALID_ARGUMENT", "", ""),
        (*operator_is, "UpdatePolicy", "OK", before.etag, done.revision.etag),
        ("viewer", "viewer", "UpdatePolicy", "PERMISSION_DENIED", "", ""),
        (*operator_is, "UpdatePolicy", "ABORTED", "stale", ""),
        (*operator_is, "UpdatePolicy", "OK", done.revision.etag, ""),
        (*operator_is, "RollbackPolicy", "OK", done.revision.etag, back.revision.etag),
        (*operator_is, "UpdatePolicy", "INVALID_ARGUMENT", "", ""),
    ]
    by_age = found[::-1]
    assert [r.reason for r in by_age[:2]] == ["why\ufffdnot", "why"]
    assert [r.request_id for r in by_age[:3]] == ["r1", "r1", ""]
    assert [dict(r.details) for r in by_age[4:6]] == [{"validate_only": "True"}, {"revision": "1"}]
    assert by_age[3].error.startswith('etag is "stale", but the policy in force has')
    assert by_age[6].error == "reason must have at most 1000 characters; got 1001"
    assert all(r.peer.startswith("ipv4:127.0.0.1:") for r in found)
    times = [r.time.ToDatetime(tzinfo=UTC) for r in by_age]
    assert times == sorted(times)
    assert times[0] > datetime.now(UTC) - timedelta(minutes=5)


@pytest.mark.parametrize(
    ("request_", "details"),
    [
        (
            freeze_pb2.FreezeRequest(
                match=freeze_pb2.FreezeMatch(engine_ids=["prod-*"], model="m"),
                duration=Duration(seconds=86400),
                reason="why",
            ),
            {"match": 'engine_ids: "prod-*" model: "m"', "duration": "seconds: 86400"},
        ),
        (freeze_pb2.FreezeRequest(duration=Duration(nanos=-(2**31))), {"duration": "nanos: -2147483648"}),
        (rollout_pb2.StartRolloutRequest(policy=policy_pb2.Policy(), validate_only=True), {"validate_only": "True"}),
        (freeze_pb2.FreezeRequest(match=freeze_pb2.FreezeMatch(model="m" * 5000)), {"match": "5003 bytes"}),
        (
            freeze_pb2.FreezeRequest(match=freeze_pb2.FreezeMatch(model="m" * 200)),
            {"match": 'model: "' + "m" * (MAX_DETAIL_CHARS - 9) + "…"},
        ),
    ],
)
def test_a_record_shows_what_a_call_was_for(request_: Message, details: dict[str, str]) -> None:
    assert _details(request_) == details


async def test_a_page_token_that_no_record_has_is_refused(secured: Secured) -> None:
    for token in ("x", str(2**63), "9" * 19):
        assert await ended(records(secured, page_token=token)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_streams_and_strangers_are_recorded(secured: Secured) -> None:
    async with secured.calling("operator") as operator:
        recording = operator.fleet.RecordTrace(fleet_pb2.RecordTraceRequest(engine_id="e"))
        await recording.initial_metadata()
        (begun,) = await records(secured)
        assert (begun.method, begun.outcome) == ("meridian.v1.FleetService/RecordTrace", "")
        assert dict(begun.details) == {"engine_id": "e"}
        recording.cancel()

    async def finished() -> list[audit_pb2.AuditRecord]:
        return await records(secured, outcome="CANCELLED")

    async with asyncio.timeout(120):
        while not (cancelled := await finished()):
            await asyncio.sleep(0.01)
    assert [r.id for r in cancelled] == [begun.id]

    async with secured.channel("agent") as channel:
        assert await ended(RawEngine(channel, "another").welcomed()) is grpc.StatusCode.PERMISSION_DENIED
    async with secured.calling("nobody") as nobody:
        reading = nobody.fleet.ListEngines(fleet_pb2.ListEnginesRequest())
        assert await ended(reading) is grpc.StatusCode.PERMISSION_DENIED
    refused = await records(secured, outcome="PERMISSION_DENIED")
    assert [(r.principal, r.role, r.error) for r in refused] == [
        ("nobody", "none", '"nobody" has no role; meridian.v1.FleetService/ListEngines needs viewer'),
        ("agent", "agent", '"agent" may not connect as engine "another"'),
    ]


@pytest.fixture
async def database(address: str) -> AsyncIterator[Database]:
    opened = await Database.open(address)
    yield opened
    await opened.close()


async def test_pages_and_filters(database: Database) -> None:
    times = iter(NOW + timedelta(seconds=n) for n in range(100))
    log = AuditLog(database, lambda: next(times))
    ids = [await log.begin_call(Call(f"p{n % 2}", "operator", "peer", UPDATE, f"r{n}")) for n in range(7)]
    assert ids == sorted(ids)
    await log.end_call(ids[3], AuditOutcome("OK", "", "a", "b"))
    await log.refuse(Call("p0", "none", "peer", "meridian.v1.X/Y"), AuditOutcome("PERMISSION_DENIED", "no"))
    blank: dict[str, Any] = dict.fromkeys(("principal", "method", "outcome", "request_id"), "")
    blank |= {"since": None, "until": None}

    async def found(**fields: Any) -> list[str]:
        return [r.request_id for r in await log.list(100, None, wanted(**{**blank, **fields}))]

    assert await found() == ["", "r6", "r5", "r4", "r3", "r2", "r1", "r0"]
    assert await found(principal="p1") == ["r5", "r3", "r1"]
    assert await found(outcome="OK") == ["r3"]
    assert await found(request_id="r2") == ["r2"]
    assert await found(method="X/Y") == [""]
    assert await found(method=UPDATE, principal="p0", since=NOW + timedelta(seconds=2)) == ["r6", "r4", "r2"]
    assert await found(until=NOW + timedelta(seconds=2)) == ["r1", "r0"]
    assert [r.request_id for r in await log.list(2, ids[5], [])] == ["r4", "r3"]
    (one,) = await log.list(1, None, wanted(**{**blank, "outcome": "OK"}))
    assert (one.time.ToDatetime(UTC), outcome_of(one)) == (NOW + timedelta(seconds=3), ("OK", "", "a", "b"))
    # PostgreSQL keeps no NUL in a text.
    await log.end_call(ids[4], AuditOutcome("NOT_FOUND", 'no live request "a\0b"'))
    (one,) = await log.list(9, None, wanted(**{**blank, "outcome": "NOT_FOUND"}))
    assert one.error == 'no live request "a\ufffdb"'
    assert await found(principal="\0") == []


@pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(hours=1)], ids=str)
async def test_records_are_in_the_order_of_the_calls_whatever_the_clocks_say(
    database: Database, jump: timedelta
) -> None:
    """Two replicas write to one log; the clock of one of them jumps, and differs from the other's from then on."""
    now, jumped = NOW, timedelta()
    steady, jumping = AuditLog(database, lambda: now), AuditLog(database, lambda: now + jumped)
    for n in range(12):
        now += timedelta(seconds=1)
        jumped = jump if n >= 4 else timedelta()
        await (jumping if n % 2 else steady).begin_call(Call("", "any", "peer", UPDATE, f"r{n}"))
    found = await steady.list(100, None, [])
    assert [r.request_id for r in found] == [f"r{n}" for n in reversed(range(12))]
    since, until = NOW + jump, NOW + jump + timedelta(seconds=8.5)
    own = wanted(principal="", method="", outcome="", request_id="", since=since, until=until)
    shown = [record.request_id for record in await steady.list(100, None, own)]
    assert shown == ["r7", "r5"], "since and until go by the times that the records show"


async def test_the_oldest_go_and_refusals_drive_out_nothing_else(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "MAX_RECORDS", 5)
    monkeypatch.setattr(audit_module, "MAX_REFUSALS", 3)
    monkeypatch.setattr(audit_module, "PRUNE_EVERY", 1)
    times = iter(NOW + timedelta(seconds=n) for n in range(100))
    log = AuditLog(database, lambda: next(times))
    for n in range(8):
        await log.end_call(await log.begin_call(Call("", "any", "peer", UPDATE, f"r{n}")), AuditOutcome("OK"))
    for n in range(20):
        await log.refuse(Call("", "none", "peer", UPDATE, f"no{n}"), AuditOutcome("UNAUTHENTICATED"))
    kept = [record.request_id for record in await log.list(100, None, [])]
    assert kept == ["no19", "no18", "no17", "r7", "r6", "r5", "r4", "r3"]


async def test_a_flood_of_refusals_is_cut_off(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "REFUSALS_PER_S", 1e-9)
    monkeypatch.setattr(audit_module, "REFUSALS_BURST", 3)
    log = AuditLog(database, utc_now)
    for _ in range(10):
        await log.refuse(Call("", "none", "peer", UPDATE), AuditOutcome("UNAUTHENTICATED"))
    assert len(await log.list(100, None, [])) == 3


# ------------------------------------------------------------------------------------------ failures of the audit log


class Slow(policy_pb2_grpc.PolicyServiceServicer):
    """A PolicyService whose updates wait for the test, and then succeed, fail or lose their outcome as the test
    wants."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.drop = False

    async def UpdatePolicy(self, request: Any, context: Any) -> policy_pb2.UpdatePolicyResponse:  # noqa: N802
        self.begun.set()
        await self.go.wait()
        if request.etag == "raise":
            raise RuntimeError("secret")
        if self.drop:
            async with self.database.writing() as connection:
                await connection.execute(text("DROP TABLE audit_records"))
        return policy_pb2.UpdatePolicyResponse(revision=policy_pb2.PolicyRevision(revision=7, etag="new"))


@pytest.fixture
async def slow(database: Database) -> AsyncIterator[tuple[Slow, AuditLog, Any]]:
    service = Slow(database)  # type: ignore[abstract]
    async with gated(database) as (server, target):
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server)
        await server.start()
        async with calling(target) as clients:
            yield service, AuditLog(database, utc_now), clients.policy


async def test_a_caller_that_hangs_up_does_not_end_the_record(slow: tuple[Slow, AuditLog, Any]) -> None:
    service, log, stub = slow
    call = stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(etag="old"))
    await service.begun.wait()
    call.cancel()
    (begun,) = await log.list(10, None, [])
    assert begun.outcome == ""
    service.go.set()
    async with asyncio.timeout(120):
        while not (record := (await log.list(10, None, []))[0]).outcome:
            await asyncio.sleep(0.01)
    assert outcome_of(record) == ("OK", "", "old", "new")


async def test_what_a_service_does_not_expect(slow: tuple[Slow, AuditLog, Any]) -> None:
    """The caller hears only that the server failed; the audit record has the type of the exception."""
    service, log, stub = slow
    service.go.set()
    assert await refusal(stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(etag="raise"))) == (
        grpc.StatusCode.INTERNAL,
        "internal error of the control plane (RuntimeError); its log has the traceback",
    )
    (record,) = await log.list(10, None, [])
    assert outcome_of(record) == ("INTERNAL", "RuntimeError", "raise", "")


async def test_an_outcome_that_cannot_be_recorded(
    slow: tuple[Slow, AuditLog, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """If an outcome cannot be recorded, the caller still gets the true answer, and the outcome goes to the log. The
    next call, which cannot be recorded either, is refused."""
    service, _, stub = slow
    service.go.set()
    service.drop = True
    answer = await stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest())
    assert answer.revision.revision == 7
    assert "lacks its outcome" in caplog.text
    service.begun.clear()
    code, _ = await refusal(stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert not service.begun.is_set()


async def test_a_request_that_is_too_large(slow: tuple[Slow, AuditLog, Any]) -> None:
    service, log, stub = slow
    policy = policy_pb2.Policy(model={"m": policy_pb2.ModelPolicy(closing_text="x" * MAX_REQUEST_BYTES)})
    code, said = await refusal(stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said.startswith(f"message must have at most {MAX_REQUEST_BYTES} bytes; got ")
    (record,) = await log.list(10, None, [])
    assert record.outcome == "INVALID_ARGUMENT"
    assert not service.begun.is_set()


# ------------------------------------------------------------------------------------------------------- meridianctl


async def ctl(secured: Secured, who: str, *arguments: str) -> Any:
    """Run meridianctl with the certificate of `who`, which a context file names."""
    issued = secured.authority.issue(who)
    contexts = secured.folder / "contexts.toml"
    fields = (
        f'server = "{secured.target}"\nca = "{issued.ca.name}"\ncert = "{issued.cert}"\nkey = "{issued.key.name}"\n'
    )
    contexts.write_text(f'current = "here"\n[contexts.here]\n{fields}')
    environment = {"MERIDIAN_CONTEXTS": str(contexts), "NO_COLOR": "1", "USER": "someone"}
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environment)


async def test_meridianctl(tmp_path: Path) -> None:
    async with securing(tmp_path) as secured:
        file = tmp_path / "meridian.toml"
        file.write_text("fallback.lease_ms = 500\n")
        applied = await ctl(secured, "operator", "policy", "apply", "-f", str(file), "--reason", "why", "--author", "x")
        assert applied.exit_code == 0, applied.output
        file.write_text("fallback.lease_ms = 600\n")
        refused = await ctl(secured, "viewer", "policy", "apply", "-f", str(file))
        assert refused.exit_code == 4
        assert refused.stderr.startswith('PERMISSION_DENIED: "viewer" is viewer; ')
        assert (await ctl(secured, "operator", "audit")).exit_code == 4
        table = await ctl(secured, "admin", "audit")
        # Cells that are too long continue on indented lines below.
        heading, *rows = [line.split() for line in table.stdout.splitlines() if not line.startswith("  ")]
        assert heading == ["time", "principal", "role", "peer", "method", "outcome", "before", "after", "what", "why"]
        assert [(row[1], row[4], row[5]) for row in rows] == [
            ("operator", "AuditService/ListAudit", "PERMISSION_DENIED"),
            ("viewer", "PolicyService/UpdatePolicy", "PERMISSION_DENIED"),
            ("operator", "PolicyService/UpdatePolicy", "OK"),
        ]
        options = ("--method", "PolicyService/UpdatePolicy", "--outcome", "OK", "--since", "2026-01-01", "-o", "json")
        (record,) = json.loads((await ctl(secured, "admin", "audit", *options)).stdout)
        assert (record["principal"], record["reason"], record["after_etag"]) == (
            "operator",
            "why",
            applied.stdout.split()[-1],
        )
        assert not json.loads((await ctl(secured, "admin", "audit", "--until", "2026-01-01", "-o", "json")).stdout)
        for option, name, known in (
            ("outcome", "permission_denied", "ABORTED, ALREADY_EXISTS, CANCELLED, "),
            ("method", "UpdatePolicy", "AgentService/Connect, AuditService/ListAudit, FleetService/EndThinking, "),
        ):
            unknown = await ctl(secured, "admin", "audit", f"--{option}", name)
            assert (unknown.exit_code, unknown.stdout) == (2, "")
            assert unknown.stderr.startswith(f"{option} must be one of {known}")
            assert unknown.stderr.endswith(f'; got "{name}"\n')
        none = await ctl(secured, "admin", "audit", "--method", "FreezeService/Thaw", "--outcome", "ABORTED")
        assert (none.exit_code, none.stdout) == (0, "no recorded call matches\n")
        nothing = await ctl(secured, "admin", "--server", secured.target, "engines")
        assert (nothing.exit_code, nothing.stderr[:12]) == (3, "UNAVAILABLE:")
        missing = await ctl(secured, "admin", "--ca", str(tmp_path / "no.pem"), "engines")
        assert missing.exit_code == 2
        why = "cannot be read: No such file or directory; named by --ca, MERIDIAN_TLS_CA or the context"
        assert missing.stderr == f"{tmp_path / 'no.pem'}: {why}\n"
