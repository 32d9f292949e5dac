"""TLS, identities and roles on a real server: real handshakes on loopback, with certificates made for the test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from jwt.algorithms import OKPAlgorithm
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2
from typer.testing import CliRunner

from meridian_agent.link import credentials as agent_credentials
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.cli.main import app
from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.fleet import peers
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.server import agent_service, interceptor
from meridian_control.server.roles import OPEN, OUTLIVES_S, RULES, Role, rule_of
from tests.certificates import DAY, Authority
from tests.contract.clients import Clients
from tests.contract.raw_engine import RawEngine
from tests.contract.secured import ACCESS, DENIED, METHODS, ROLES, Secured, code_of, securing
from tests.fakes.agent import hello
from tests.fakes.control import utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.postgres import Postgres
from tests.processes import Control, wait_for

SECRET = "0123456789abcdef0123456789abcdef"


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def engines(clients: Clients) -> Any:
    return await clients.fleet.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=60)


async def refused(secured: Secured, who: str | ClientCredentials) -> None:
    """Assert that a connection with these credentials is not accepted."""
    async with secured.calling(who) as clients:
        assert (await failure(engines(clients))).code() is grpc.StatusCode.UNAVAILABLE


async def accepted(secured: Secured, who: str | ClientCredentials) -> None:
    async with secured.calling(who) as clients:
        await engines(clients)


# ------------------------------------------------------------------------------------------------------------- roles


def test_every_method_has_a_decision() -> None:
    """`access.RULES` says for every method who may call the method."""
    assert set(METHODS) <= set(RULES)


def test_the_table() -> None:
    """Methods that change something are recorded and closed to viewers; a method without a rule is for administrators
    only."""
    unknown = rule_of("/meridian.v1.NewService/Do")
    assert (unknown.role, unknown.recorded) == (Role.ADMIN, True)
    reading = ("Get", "List", "Watch", "Diff", "Explain", "ServerReflection", "Check", "Connect")
    for method, rule in RULES.items():
        if not method.partition("/")[2].startswith(reading):
            assert rule.recorded, method
            assert rule.role is not None
            assert rule.role >= Role.OPERATOR, method
    assert [method for method, rule in RULES.items() if rule.role is Role.AGENT] == ["meridian.v1.AgentService/Connect"]
    assert {method.partition("/")[0] for method, rule in RULES.items() if rule is OPEN} == {"grpc.health.v1.Health"}


async def test_every_role_and_method(secured: Secured) -> None:
    for who in (*ROLES, "nobody"):
        async with secured.channel(who) as channel:
            for method in METHODS:
                needed = rule_of(f"/{method}").role
                role = Role[who.upper()] if who in ROLES else Role.NONE
                if needed is None:
                    allowed = True
                elif Role.AGENT in (needed, role):
                    allowed = needed is role
                else:
                    allowed = role >= needed
                code = await code_of(secured.fleet, channel, method)
                assert (code not in DENIED) == allowed, f"{who} {method}: {code}"


async def test_a_refusal_says_why(secured: Secured) -> None:
    async with secured.calling("viewer") as viewer:
        call = viewer.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy()))
        status = await rpc_status.aio.from_call(call)
    assert status.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
    assert status.message == '"viewer" is viewer; meridian.v1.PolicyService/UpdatePolicy needs operator'
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("PERMISSION_DENIED", "meridian")


async def test_the_access_file_counts_when_it_changes(secured: Secured) -> None:
    async with secured.calling("nobody") as nobody:
        assert (await failure(engines(nobody))).code() is grpc.StatusCode.PERMISSION_DENIED
        before = secured.access.read_text()
        secured.access.write_text(before + '[[identity]]\ncn = "nob*"\nrole = "viewer"\n')
        await engines(nobody)
        secured.access.write_text("nonsense")
        await engines(nobody)
        secured.access.write_text(before)
        assert (await failure(engines(nobody))).code() is grpc.StatusCode.PERMISSION_DENIED


async def test_who_wrote_a_revision_is_who_was_let_in(secured: Secured) -> None:
    request = policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy(), author="somebody else")
    async with secured.calling("operator") as operator:
        answer = await operator.policy.UpdatePolicy(request)
    assert answer.revision.author == "operator"


# ------------------------------------------------------------------------------------------------------------ agents


async def connected(secured: Secured, who: str | ClientCredentials, engine_id: str) -> grpc.StatusCode:
    async with secured.channel(who) as channel:
        try:
            engine = await RawEngine(channel, engine_id).welcomed()
        except grpc.aio.AioRpcError as error:
            return error.code()
        engine.call.cancel()
        return grpc.StatusCode.OK


async def test_an_agent_is_its_own_engine_only(secured: Secured) -> None:
    assert await connected(secured, "agent", "agent") is grpc.StatusCode.OK
    assert await connected(secured, "agent", "another") is grpc.StatusCode.PERMISSION_DENIED
    for who in ("viewer", "operator", "admin", "nobody"):
        assert await connected(secured, who, who) is grpc.StatusCode.PERMISSION_DENIED
    entries = '[[identity]]\ncn = "agent"\nrole = "agent"\nengines = ["gpu-*", "one"]\n'
    entries += '[[identity]]\nuri = "spiffe://here/engine/*"\nrole = "agent"\n'
    secured.access.write_text(entries)
    assert await connected(secured, "agent", "gpu-7") is grpc.StatusCode.OK
    assert await connected(secured, "agent", "one") is grpc.StatusCode.OK
    assert await connected(secured, "agent", "agent") is grpc.StatusCode.PERMISSION_DENIED
    secured.authority.issue("x", "spiffe://here/engine/*")
    spiffe = secured.authority.issue("x", "spiffe://here/engine/a7").credentials()
    assert await connected(secured, spiffe, "a7") is grpc.StatusCode.OK
    assert await connected(secured, spiffe, "x") is grpc.StatusCode.PERMISSION_DENIED


async def test_the_link_takes_new_files_for_its_next_stream(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    """The server's CA is replaced while the link runs: no stream begins with the old files, and one begins with the new
    files."""
    credentials = secured.agent("agent")
    with LinkedEngine([secured.target], "agent", credentials=credentials) as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        await secured.stop()
        secured.authority = Authority(secured.folder, "new-ca")
        secured.authority.issue("server")
        await secured.start()
        await until(lambda: "no stream to" in caplog.text)
        assert not engine.link.lease.connected
        issued = secured.authority.issue("agent", file="renewed")
        for new, old in zip((issued.ca, issued.cert, issued.key), vars(credentials).values(), strict=False):
            shutil.copy(new, old)
        await engine.steps_until(lambda: len(engine.caps()) == 2)
    assert "Traceback" not in caplog.text


async def test_a_link_that_is_refused_says_so_once(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    with LinkedEngine([secured.target], "another", credentials=secured.agent("agent")) as engine:
        await until(lambda: '"agent" may not connect as engine "another"' in caplog.text)
        assert not engine.link.lease.connected
        secured.access.write_text('[[identity]]\ncn = "agent"\nrole = "agent"\nengines = ["another"]\n')
        await until(lambda: engine.link.lease.connected)
    said = [record for record in caplog.records if record.name == "vllm.meridian"]
    assert sum("may not connect" in record.getMessage() for record in said) == 1


async def test_a_link_whose_files_are_no_good_says_so(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    (broken := secured.folder / "broken").write_text("one\ntwo\n")
    for files, complaint in (
        (
            agent_credentials.AgentCredentials(ca="/no/such.pem"),
            "MERIDIAN_TLS_CA='/no/such.pem': No such file or directory",
        ),
        (agent_credentials.AgentCredentials(token_file="/no/token"), "MERIDIAN_TOKEN_FILE needs TLS"),
        (
            agent_credentials.AgentCredentials(ca=str(secured.authority.file), token_file=str(broken)),
            "holds no token of printable ASCII characters",
        ),
        (
            agent_credentials.AgentCredentials(ca=str(secured.authority.file), cert="x"),
            "MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY belong together",
        ),
    ):
        with LinkedEngine([secured.target], "agent", credentials=files):
            await until(lambda wanted=complaint: wanted in caplog.text)  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------------- TLS


async def test_certificates_that_are_not_accepted(secured: Secured) -> None:
    stranger = Authority(secured.folder, "stranger")
    good = secured.credentials("viewer")
    foreign = stranger.issue("viewer", file="foreign").credentials()
    expired = secured.authority.issue("viewer", file="expired", lasts=-DAY).credentials()
    for credentials in (
        ClientCredentials(ca=good.ca),
        ClientCredentials(good.ca, foreign.cert, foreign.key),
        expired,
        ClientCredentials(foreign.ca, good.cert, good.key),
        ClientCredentials(),
    ):
        await refused(secured, credentials)
    await accepted(secured, good)


async def test_certificates_are_renewed_without_a_restart(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    """Server and client replace their certificate files one after the other; a connection that is already open stays
    open."""
    old = secured.credentials("viewer")
    old_ca = secured.folder / "old-ca.pem"
    shutil.copy(old.ca, old_ca)
    old = ClientCredentials(str(old_ca), old.cert, old.key)
    async with secured.calling(old) as opened:
        await engines(opened)
        new = Authority(secured.folder, "new-ca")
        viewer = new.issue("viewer", file="new-viewer").credentials()
        await refused(secured, viewer)

        renewed = new.issue("server", file="renewed")
        shutil.copy(renewed.cert, secured.folder / "server.crt")
        await accepted(secured, old)
        assert "is not the key of" in caplog.text
        shutil.copy(renewed.key, secured.folder / "server.key")
        shutil.copy(new.file, secured.authority.file)

        await accepted(secured, viewer)
        await refused(secured, old)
        await engines(opened)


async def test_certificates_that_expire(tmp_path: Path) -> None:
    """After a certificate has expired, open connections stay, and new ones are refused until there is a new
    certificate."""
    (tmp_path / "other").mkdir()
    async with securing(tmp_path) as one, securing(tmp_path / "other") as other:
        await asyncio.gather(expires(one, "server"), expires(other, "viewer"))


async def expires(secured: Secured, whose: str) -> None:
    """Let the certificate of the server or of a viewer expire, and renew it."""
    viewer = secured.credentials("viewer")
    # On a busy machine the shortest time may be over before the first connection is open.
    for lasts_s in (2, 8, 32):
        expires_s = time.time() + lasts_s
        issued = secured.authority.issue(whose, lasts=timedelta(seconds=lasts_s))
        viewer = issued.credentials() if whose == "viewer" else viewer
        async with secured.calling(viewer) as opened:
            try:
                await engines(opened)
            except grpc.aio.AioRpcError:
                # A certificate stores its end in whole seconds.
                assert time.time() > expires_s - 1
                continue
            await until(lambda: time.time() > expires_s + 1)  # noqa: B023
            await refused(secured, viewer)
            await engines(opened)
            break
    else:
        pytest.fail("no connection was open before its certificate expired")
    secured.authority.issue(whose)
    await accepted(secured, viewer)


# ------------------------------------------------------------------------------------------------------------ tokens


def token(key: str = SECRET, **claims: Any) -> str:
    said = {"iss": "issuer", "aud": "meridian", "sub": "ann", "role": "operator", "exp": time.time() + 3600, **claims}
    return jwt.encode({name: value for name, value in said.items() if value is not None}, key, "HS256")


@pytest.fixture
async def by_token(tmp_path: Path) -> AsyncIterator[Secured]:
    """A control plane whose clients show tokens instead of certificates."""
    async with securing(tmp_path, client_ca=False) as running:
        (tmp_path / "secret").write_text(SECRET)
        running.access.write_text('[jwt]\nissuer = "issuer"\naudience = "meridian"\nsecret_file = "secret"\n')
        yield running


async def shown(secured: Secured, shown: str) -> grpc.StatusCode:
    """Make a read call with the token `shown`, which the client reads from a file, and return the status code."""
    file = secured.folder / "token"
    file.write_text(shown + "\n")
    async with secured.calling(ClientCredentials(ca=str(secured.authority.file), token_file=str(file))) as clients:
        try:
            await engines(clients)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_tokens(by_token: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    assert await shown(by_token, token()) is grpc.StatusCode.OK
    assert await shown(by_token, token(role=None)) is grpc.StatusCode.PERMISSION_DENIED
    assert await shown(by_token, token(role="agent")) is grpc.StatusCode.PERMISSION_DENIED
    secrets = [token("x" * 32), token(exp=time.time() - 3600), token(aud="other"), "x.y.z"]
    for secret in secrets:
        assert await shown(by_token, secret) is grpc.StatusCode.UNAUTHENTICATED
    (by_token.folder / "secret").write_text("x" * 32)
    assert await shown(by_token, secrets[0]) is grpc.StatusCode.OK
    assert await shown(by_token, token()) is grpc.StatusCode.UNAUTHENTICATED
    assert not any(secret in caplog.text for secret in (*secrets, token()))


async def test_without_credentials_only_health_answers(by_token: Secured) -> None:
    async with by_token.channel(ClientCredentials(ca=str(by_token.authority.file))) as channel:
        for method in METHODS:
            code = await code_of(by_token.fleet, channel, method)
            assert (code is grpc.StatusCode.UNAUTHENTICATED) == (rule_of(f"/{method}").role is not None), method


@pytest.mark.parametrize("asks", [False, True])
def test_a_certificate_counts_only_if_the_server_asks_for_it(tmp_path: Path, asks: bool) -> None:
    """Without --client-ca no entry of the access file for certificates matches, and the caller learns why."""
    ours, access, file = Authority(tmp_path), tmp_path / "access.toml", tmp_path / "token"
    server, good = ours.issue("server"), ours.issue("good")
    (tmp_path / "secret").write_text(SECRET)
    file.write_text(token(role="viewer"))
    by_token = '[jwt]\nissuer = "issuer"\naudience = "meridian"\nsecret_file = "secret"\n'
    access.write_text(by_token + '[[identity]]\ncn = "good"\nrole = "viewer"\n')
    options = ["--tls-cert", server.cert, "--tls-key", server.key, "--access", access]
    options += ["--client-ca", ours.file] if asks else []
    control = Control(tmp_path, options=list(map(str, options)), credentials=good.credentials(str(file)).channel())
    flags = ["--ca", str(good.ca), "--cert", str(good.cert), "--key", str(good.key)]
    result = CliRunner().invoke(app, ["--server", control.target, *flags, "engines"])
    control.process.stop()
    assert result.exit_code == (0 if asks else 4)
    assert ("the control plane asks for certificates only with --client-ca" in result.stderr) != asks


async def test_an_agent_by_token(by_token: Secured) -> None:
    file = by_token.folder / "agent-token"
    files = agent_credentials.AgentCredentials(ca=str(by_token.authority.file), token_file=str(file))
    for claims, engine_id in itertools.product(({"sub": "e1"}, {"sub": "s", "engine": "e1"}), ("e1", "s*")):
        file.write_text(token(role="agent", **claims))
        with LinkedEngine([by_token.target], engine_id, credentials=files) as engine:
            if engine_id == "e1":
                await until(lambda running=engine: running.link.lease.connected)  # type: ignore[misc]
            else:
                await until(lambda running=engine: running.link._complaints)  # type: ignore[misc]
                assert not engine.link.lease.connected


# ------------------------------------------------------------------------------------------------------ open streams


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Wait for the end of a stream; return its status code and details."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


def expire(patch: pytest.MonkeyPatch, secured: Secured, expired_s: float = OUTLIVES_S + 60, **claims: Any) -> str:
    """Let the token of each open stream be one that expired `expired_s` seconds ago, as if time had passed; return that
    token."""
    expired = token(exp=time.time() - expired_s, **claims)
    for gated in secured.gate.streams:
        patch.setattr(gated, "_shown", ((("authorization", f"Bearer {expired}"),), {}, "ipv4:127.0.0.1:1"))
    return expired


async def test_a_stream_ends_with_its_callers_role(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    """The streams of callers who keep their roles stay open."""
    entries = '[[identity]]\ncn = "agent"\nrole = "agent"\nengines = ["a"]\n'
    async with secured.channel("agent") as agent, secured.channel("viewer") as viewer:
        engine = await RawEngine(agent, "agent").connect()
        watch = Clients(viewer).fleet.WatchFleet(fleet_pb2.WatchFleetRequest())
        await watch.read()
        await secured.gate.check_streams()

        secured.access.write_text(secured.access.read_text().replace('role = "viewer"', 'role = "agent"', 1))
        await secured.gate.check_streams()
        needed = "meridian.v1.FleetService/WatchFleet needs viewer"
        assert await end_of(watch) == (grpc.StatusCode.PERMISSION_DENIED, f'"viewer" is agent; {needed}')
        assert len(secured.gate.streams) == 1

        secured.access.write_text(entries)
        await secured.gate.check_streams()
        why = '"agent" may not connect as engine "agent"'
        assert await end_of(engine.call) == (grpc.StatusCode.PERMISSION_DENIED, why)
    assert not secured.gate.streams
    assert secured.fleet.stream_ends == {"permission_denied": 1}
    assert "is lost" not in caplog.text
    refused = [(r.principal, r.method, r.outcome) for r in await secured.gate.audit.list(10, None, [])]
    assert refused == [
        ("agent", "meridian.v1.AgentService/Connect", "PERMISSION_DENIED"),
        ("viewer", "meridian.v1.FleetService/WatchFleet", "PERMISSION_DENIED"),
    ]


async def test_a_caller_who_has_not_read_yet_learns_why_its_stream_ends(secured: Secured) -> None:
    """gRPC holds a response that is larger than the caller's window until the caller reads."""
    for number in range(1000):
        secured.fleet.join(hello(f"engine-{number}"))
    async with secured.calling("viewer") as viewer:
        watch = viewer.fleet.WatchFleet(fleet_pb2.WatchFleetRequest())
        await until(lambda: any(not gated._waits for gated in secured.gate.streams))
        secured.access.write_text(secured.access.read_text().replace('"viewer"', '"another"', 1))
        await secured.gate.check_streams()
        assert len(secured.gate.streams) == 1
        assert (await watch.read()).engines
        assert await end_of(watch) == (
            grpc.StatusCode.PERMISSION_DENIED,
            '"viewer" has no role; meridian.v1.FleetService/WatchFleet needs viewer',
        )


async def test_an_engine_that_never_reads_loses_its_stream_all_the_same(secured: Secured) -> None:
    async with secured.channel("agent") as channel:
        await RawEngine(channel, "agent").connect()
        (gated,), (connection,) = secured.gate.streams, secured.fleet.connections
        # gRPC takes some MiB for a caller who does not read.
        large = agent_pb2.ConnectResponse(settings=agent_pb2.Settings(closing_text="x" * (1 << 20)))
        connection.say([large] * 7, secured.fleet.clock())
        await until(lambda: connection.outgoing.qsize() == 3 and not gated._waits)
        secured.access.write_text('[[identity]]\ncn = "admin"\nrole = "admin"\n')
        await secured.gate.check_streams()
        assert secured.gate.streams == {gated}
        await secured.gate.check_streams()
        await until(lambda: secured.fleet.stream_ends)
    await secured.gate.settle()
    assert not secured.gate.streams
    assert secured.fleet.stream_ends == secured.gate.faults.counts == {"permission_denied": 1}
    (record,) = await secured.gate.audit.list(10, None, [])
    assert (record.method, record.outcome) == ("meridian.v1.AgentService/Connect", "PERMISSION_DENIED")


async def test_a_link_whose_role_is_taken_away_comes_back_with_it(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    before = secured.access.read_text()
    with LinkedEngine([secured.target], "agent", credentials=secured.agent("agent")) as engine:
        await until(lambda: engine.link.lease.connected)
        secured.access.write_text(before.replace('cn = "agent"', 'cn = "other"'))
        await secured.gate.check_streams()
        await until(lambda: '"agent" has no role' in caplog.text and not engine.link.lease.connected)
        secured.access.write_text(before)
        await until(lambda: engine.link.lease.connected)


async def test_a_stream_outlives_its_token_for_a_while(by_token: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    file = by_token.folder / "token"
    file.write_text(token(role="viewer"))
    shows = ClientCredentials(ca=str(by_token.authority.file), token_file=str(file))
    async with by_token.calling(shows) as clients:
        watch = clients.fleet.WatchFleet(fleet_pb2.WatchFleetRequest())
        await watch.read()
        for expired_s in (OUTLIVES_S - 60, OUTLIVES_S + 60):
            expired = expire(monkeypatch, by_token, expired_s, role="viewer")
            await by_token.gate.check_streams()
            assert await shown(by_token, expired) is grpc.StatusCode.UNAUTHENTICATED
        assert await end_of(watch) == (grpc.StatusCode.UNAUTHENTICATED, "the token has expired")


async def test_an_engine_whose_token_has_expired_is_sent_away_and_comes_back_with_a_new_one(
    by_token: Secured, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens expire in normal work, so that no alert may take such an end for a refusal or a failure."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(agent_service, "SPREAD_S", 0.0)
    file = by_token.folder / "token"
    file.write_text(token(role="agent", sub="e1"))
    files = agent_credentials.AgentCredentials(ca=str(by_token.authority.file), token_file=str(file))
    with LinkedEngine([by_token.target], "e1", credentials=files) as engine:
        await engine.steps_until(lambda: engine.link.lease.connected)
        (gated,) = by_token.gate.streams
        expire(monkeypatch, by_token, role="agent", sub="e1")
        await by_token.gate.check_streams()
        await engine.steps_until(lambda: by_token.gate.streams - {gated} and engine.link.lease.connected)
    assert by_token.fleet.stream_ends["going_away"] == 1
    assert not by_token.gate.faults.counts
    assert "the control plane is going away: the token has expired" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_engines_whose_tokens_expire_together_do_not_leave_together(
    by_token: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = by_token.folder / "token"
    file.write_text(token(role="agent", sub="e1"))
    files = agent_credentials.AgentCredentials(ca=str(by_token.authority.file), token_file=str(file))
    with contextlib.ExitStack() as running:
        target = [by_token.target]
        engines = [LinkedEngine(target, "e1", credentials=files, incarnation=str(number)) for number in range(4)]
        for engine in engines:
            running.enter_context(engine)
        connections = by_token.fleet.connections
        await until(lambda: len(connections) == len(engines) == len(by_token.gate.streams))
        expire(monkeypatch, by_token, role="agent", sub="e1")
        await by_token.gate.check_streams()
        assert not all(connection.closing for connection in connections)
        assert agent_service.SPREAD_S + agent_service.LEAVES_S < interceptor.RECHECK_S


async def test_a_recording_ends_with_its_callers_role(secured: Secured) -> None:
    async with secured.calling("operator") as operator, secured.channel("agent") as agent:
        recording = operator.fleet.RecordTrace(fleet_pb2.RecordTraceRequest())
        await recording.initial_metadata()
        await RawEngine(agent, "agent").connect()
        await recording.read()
        secured.access.write_text(secured.access.read_text().replace('role = "operator"', 'role = "viewer"'))
        await secured.gate.check_streams()
        why = '"operator" is viewer; meridian.v1.FleetService/RecordTrace needs operator'
        assert await end_of(recording) == (grpc.StatusCode.PERMISSION_DENIED, why)
        await secured.gate.settle()
        assert not secured.fleet.recordings
        assert len(secured.gate.streams) == 1, "the engine's stream goes on"
        (record,) = await secured.gate.audit.list(10, None, [])
        assert (record.method, record.outcome) == ("meridian.v1.FleetService/RecordTrace", "PERMISSION_DENIED")


async def test_streams_end_once_the_jwks_loses_their_key(by_token: Secured, caplog: pytest.LogCaptureFixture) -> None:
    """Those of other keys go on, and an agent comes back with a token of another key."""
    keys = {name: ed25519.Ed25519PrivateKey.generate() for name in ("old", "new")}

    def publish(*names: str) -> None:
        public = {name: OKPAlgorithm.to_jwk(keys[name].public_key(), as_dict=True) for name in names}
        listed = [{**key, "kid": name} for name, key in public.items()]
        (by_token.folder / "jwks.json").write_text(json.dumps({"keys": listed}))

    def give(name: str, engine_id: str) -> Path:
        claims = {"iss": "issuer", "aud": "meridian", "sub": engine_id, "role": "agent", "exp": time.time() + 3600}
        (file := by_token.folder / f"token-{engine_id}").write_text(
            jwt.encode(claims, keys[name], "EdDSA", headers={"kid": name})
        )
        return file

    publish("old", "new")
    by_token.access.write_text(by_token.access.read_text().replace('secret_file = "secret"', 'keys_file = "jwks.json"'))
    with contextlib.ExitStack() as running:
        for name, engine_id in (("old", "e1"), ("new", "e2")):
            files = {"ca": str(by_token.authority.file), "token_file": str(give(name, engine_id))}
            credentials = agent_credentials.AgentCredentials(**files)
            running.enter_context(LinkedEngine([by_token.target], engine_id, credentials=credentials))
        connections = by_token.fleet.connections
        await until(lambda: len(connections) == 2)
        kept = {c for c in connections if c.session.hello.engine_id == "e2"}
        await by_token.gate.check_streams()
        assert len(by_token.gate.streams) == 2
        publish("new")
        await by_token.gate.check_streams()
        await until(lambda: "signature does not fit any trusted key" in caplog.text and {*connections} == kept)
        # The next key set is being written.
        (by_token.folder / "jwks.json").write_text("")
        await by_token.gate.check_streams()
        give("new", "e1")
        await until(lambda: len(connections) == 2)
        assert kept <= {*connections}


# ---------------------------------------------------------------------------------------------------------- replicas


async def test_a_recording_goes_on_with_the_replicas_new_token(
    by_token: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording may last for longer than the token with which the replica began to ask for it."""
    file = by_token.folder / "replica-token"
    file.write_text(token(role="operator"))
    live = [Replica("other", by_token.target)]
    shows = ClientCredentials(ca=str(by_token.authority.file), token_file=str(file))
    replicas = peers.Peers(lambda: live, shows)
    whole = WholeFleet(Fleet(utc_now, capabilities=CAPABILITIES), "asking", replicas, lambda: True)
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 120.0)
    # The recording began long ago.
    monkeypatch.setattr(peers, "REFUSED_S", 0.0)
    async with whole.recording("", local_only=False) as recording:
        (gated,) = await until(by_token.gate.streams.copy)
        assert not recording.unreachable
        monkeypatch.setattr(peers, "REFUSED_S", 3600.0)
        expire(monkeypatch, by_token)
        await by_token.gate.check_streams()
        await until(lambda: by_token.gate.streams - {gated} and not recording.unreachable)
    await replicas.close()


def test_replicas_know_each_other_by_certificate(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica lists the other replica's engine, until the access file no longer gives the replicas' certificate a
    role."""
    authority, access = Authority(tmp_path), tmp_path / "access.toml"
    own = authority.issue("replica")
    access.write_text(ACCESS + '[[identity]]\ncn = "replica"\nrole = "operator"\n')
    for name, file in (("CA", own.ca), ("CERT", own.cert), ("KEY", own.key)):
        monkeypatch.setenv(f"MERIDIAN_TLS_{name}", str(file))
    files = {"--tls-cert": own.cert, "--tls-key": own.key, "--client-ca": own.ca, "--access": access}
    options = [*(str(part) for pair in files.items() for part in pair), "--store", postgres.database()]
    viewer = authority.issue("viewer").credentials().channel()
    controls: list[Control] = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            controls.append(Control(tmp_path / name, options=options, credentials=viewer))
        one, two = controls
        agent = agent_credentials.AgentCredentials(**vars(authority.issue("agent").credentials()))
        with LinkedEngine([one.target], "agent", credentials=agent):
            wait_for(lambda: [e.engine_id for e in two.engines()] == ["agent"], 20, "the other's engine to be listed")
            access.write_text(ACCESS)
            wait_for(lambda: not two.engines(), 20, "the other not to be heard any more")
            assert [e.engine_id for e in one.engines()] == ["agent"]
    finally:
        for control in controls:
            control.process.kill()
