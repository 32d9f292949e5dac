"""TLS that fails: the agent, meridianctl and a replica that asks another name the cause and what to set. The servers
are processes of their own."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from meridian.v1 import agent_pb2, fleet_pb2
from typer.testing import CliRunner

from meridian_agent.link.control_stream import ControlStream
from meridian_agent.link.credentials import AgentCredentials
from meridian_control.cli.main import app
from meridian_control.common.client_credentials import VARIABLES, ClientCredentials
from meridian_control.fleet import peers
from meridian_control.fleet.membership import Replica
from meridian_control.fleet.peers import Peers
from meridian_control.server import handshakes
from meridian_control.server.handshakes import Handshakes, clients_of
from tests.certificates import Authority, Issued
from tests.fakes.agent import hello
from tests.fakes.linked import until
from tests.processes import Control, Process, free_port, wait_for


@dataclass(frozen=True)
class Servers:
    """`early` has a certificate that is not valid yet, and `late` one of a CA that has expired."""

    secured: str
    plain: str
    early: str
    late: str
    good: Issued
    expired: Issued
    future: Issued
    strange: Issued
    old: Authority
    middle: Authority
    process: Process


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("tls")
    ours, other, old = Authority(folder), Authority(folder, "other"), Authority(folder, "old", -timedelta(hours=1))
    middle, good = Authority(folder, "middle", above=ours), ours.issue("good")
    server = middle.issue("server")
    server.cert.write_bytes(server.cert.read_bytes() + middle.file.read_bytes())
    controls = {}
    for name, own in {"secured": server, "early": ours.issue("early"), "late": ours.issue("late")}.items():
        (folder / name).mkdir()
        options = ["--tls-cert", own.cert, "--tls-key", own.key, "--client-ca", ours.file]
        credentials = good.credentials().channel()
        controls[name] = Control(folder / name, options=[str(part) for part in options], credentials=credentials)
    # The client that waits for a server to start would not accept these certificates.
    ours.issue("early", begins=timedelta(hours=1))
    old.issue("late")
    (folder / "plain").mkdir()
    controls["plain"] = Control(folder / "plain")
    yield Servers(
        **{name: control.target for name, control in controls.items()},
        good=good,
        expired=ours.issue("expired", lasts=-timedelta(hours=1)),
        future=ours.issue("future", begins=timedelta(hours=1)),
        strange=other.issue("strange"),
        old=old,
        middle=middle,
        process=controls["secured"].process,
    )
    for control in controls.values():
        control.process.stop()


@dataclass(frozen=True)
class Case:
    """A target, the files of a client, and parts of the text that names the cause and what to set. `{ca}` stands for
    what the client calls the setting of the CA, and `{cert}` for that of the certificate and its key."""

    target: str
    files: tuple[Path, ...]
    parts: tuple[str, ...]


def case(name: str, at: Servers) -> Case:
    ca, cert, key = at.good.ca, at.good.cert, at.good.key
    by_name = "localhost:" + at.secured.rpartition(":")[2]
    return {
        "plaintext to TLS": Case(at.secured, (), ("wants TLS", "set {ca}")),
        "TLS to plaintext": Case(at.plain, (ca, cert, key), ("uses no TLS", "unset {ca}", "--tls-cert")),
        "no certificate": Case(at.secured, (ca,), ("--client-ca", "set {cert}")),
        "expired": Case(at.secured, (ca, at.expired.cert, at.expired.key), ("expired on", "renew {cert}")),
        "not valid yet": Case(at.secured, (ca, at.future.cert, at.future.key), ("not valid before", "renew {cert}")),
        "server not valid yet": Case(at.early, (ca, cert, key), ("is not valid yet", "renew its --tls-cert")),
        "expired CA": Case(at.late, (at.old.file, cert, key), (f"or one in {at.old.file} has expired", "or {ca}")),
        "of another CA, intermediate trusted": Case(
            at.secured, (at.middle.file, at.strange.cert, at.strange.key), ("does not accept", "--client-ca")
        ),
        "of another CA": Case(at.secured, (ca, at.strange.cert, at.strange.key), ("does not accept", "--client-ca")),
        "wrong CA": Case(at.secured, (at.strange.ca, cert, key), ("not signed by", "{ca} must name")),
        "wrong host": Case(by_name, (ca, cert, key), ("not for localhost", "--tls-cert")),
    }[name]


NAMES = (
    "plaintext to TLS",
    "TLS to plaintext",
    "no certificate",
    "expired",
    "not valid yet",
    "server not valid yet",
    "expired CA",
    "of another CA, intermediate trusted",
    "of another CA",
    "wrong CA",
    "wrong host",
)
every_case = pytest.mark.parametrize("name", NAMES)


@every_case
def test_meridianctl_names_the_cause(servers: Servers, name: str) -> None:
    found = case(name, servers)
    flags = zip(("--ca", "--cert", "--key"), found.files, strict=False)
    args = ["--server", found.target, *(str(part) for pair in flags for part in pair), "engines"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 3
    for part in found.parts:
        assert part.format(ca="--ca (MERIDIAN_TLS_CA)", cert="--cert and --key") in result.stderr


@every_case
def test_the_agents_log_names_the_cause(servers: Servers, name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = case(name, servers)
    credentials = AgentCredentials(*map(str, found.files))
    link = ControlStream([found.target], hello, _nothing, lambda _: None, credentials=credentials, jitter=lambda: 0.0)
    with caplog.at_level(logging.WARNING, "vllm.meridian"):
        link.start()
        wait_for(lambda: "no stream to" in caplog.text, 60, "the agent to complain")
        link.stop()
    for part in found.parts:
        assert part.format(ca="MERIDIAN_TLS_CA", cert="MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY") in caplog.text


def test_the_agents_log_names_each_cause_that_follows_another_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the last two causes gRPC says the same."""
    ours = Authority(tmp_path)
    server, expired = ours.issue("server"), ours.issue("agent", lasts=-timedelta(hours=1))
    port = free_port()
    target, credentials = f"127.0.0.1:{port}", AgentCredentials(**vars(expired.credentials()))
    link = ControlStream([target], hello, _nothing, lambda _: None, credentials=credentials, jitter=lambda: 0.0)

    def named(text: str) -> None:
        wait_for(lambda: text in caplog.text, 60, "the agent to name the cause")

    options = ["--tls-cert", server.cert, "--tls-key", server.key, "--client-ca", server.ca]
    good = ours.issue("good").credentials().channel()
    with caplog.at_level(logging.WARNING, "vllm.meridian"):
        link.start()
        named("Connection refused")
        control = Control(tmp_path, port, [str(part) for part in options], credentials=good)
        try:
            named("has expired on")
            Authority(tmp_path, "other").issue("agent")
            named("does not accept the certificate")
        finally:
            link.stop()
            control.process.stop()


# Files in the place of a CA, a certificate or a key, or of a token, that cannot be used.
UNUSABLE = [
    *(("ca", kind) for kind in ("empty", "DER")),
    *(("cert", kind) for kind in ("no PEM", "key")),
    *(("key", kind) for kind in ("key of another", "key with a password")),
    *(("token_file", kind) for kind in ("empty", "two lines")),
]


@pytest.mark.parametrize(("field", "kind"), UNUSABLE)
def test_a_file_that_cannot_be_used_is_named(field: str, kind: str, tmp_path: Path) -> None:
    """gRPC takes an empty CA for none, and would send the token to every server with a certificate of a public CA. Of
    most other files it says only that the handshake fails."""
    ours = Authority(tmp_path)
    good, other = ours.issue("good"), ours.issue("other")
    private = load_pem_private_key(other.key.read_bytes(), password=None)
    bad = tmp_path / "bad"
    bad.write_bytes(
        {
            "empty": b"\n",
            "no PEM": b"not a certificate\n",
            "DER": ssl.PEM_cert_to_DER_cert(good.ca.read_text()),
            "key": good.key.read_bytes(),
            "key of another": other.key.read_bytes(),
            "key with a password": private.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
            ),
            "two lines": b"a\nb",
        }[kind]
    )
    token = tmp_path / "token"
    token.write_text("secret")
    files = {"ca": str(good.ca), "cert": str(good.cert), "key": str(good.key), "token_file": str(token)}
    fits, wrong = AgentCredentials(**files), AgentCredentials(**{**files, field: str(bad)})
    fits.open("127.0.0.1:1", ()).close()
    assert fits.metadata() == (("authorization", "Bearer secret"),)
    with pytest.raises(ValueError, match=VARIABLES[field]) as raised:
        (wrong.metadata if field == "token_file" else partial(wrong.open, "127.0.0.1:1", ()))()
    assert "secret" not in str(raised.value)
    ClientCredentials(**files).channel()
    with pytest.raises(ValueError, match=str(bad)):
        ClientCredentials(**{**files, field: str(bad)}).channel()


@pytest.mark.parametrize("credentials", [AgentCredentials, ClientCredentials])
def test_files_that_gRPC_can_use_are_used(  # noqa: N802
    credentials: type[AgentCredentials | ClientCredentials], tmp_path: Path
) -> None:
    """A bundle of CAs may have comments in any encoding, and old CAs with a negative serial number, as those of systems
    have; keys may be shorter than OpenSSL's usual ones."""
    ours = Authority(tmp_path)
    issued = ours.issue("short", key=rsa.generate_private_key(65537, 1024))
    old = bytearray(ssl.PEM_cert_to_DER_cert(issued.ca.read_text()))
    # The serial number comes after the version.
    old[old.index(b"\xa0\x03\x02\x01\x02\x02") + 7] = 0x80
    bundle = 2 * issued.ca.read_bytes() + ssl.DER_cert_to_PEM_cert(bytes(old)).encode()
    issued.ca.write_bytes("# Zertifizierungsstelle für uns\n".encode("latin-1") + bundle)
    fits = credentials(str(issued.ca), str(issued.cert), str(issued.key))
    if isinstance(fits, AgentCredentials):
        fits.open("127.0.0.1:1", ()).close()
    else:
        assert fits.channel() is not None


def _nothing(_: agent_pb2.Settings) -> None:
    """Take in any settings."""


@pytest.mark.usefixtures("_patient")
async def test_a_replica_names_the_cause(servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also the one of files that replace those which failed."""
    files = [tmp_path / name for name in ("ca", "cert", "key")]
    asking = None
    for name in ("expired", "of another CA"):
        found = case(name, servers)
        for source, file in zip(found.files, files, strict=True):
            shutil.copy(source, file)
        asking = asking or Peers(lambda: [Replica("b", servers.secured)], ClientCredentials(*map(str, files)))
        assert await asking.ask(peers_engines) == ({}, ["b"])
        for part in found.parts:
            told = part.format(ca="MERIDIAN_TLS_CA", cert="MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY")
            await until(lambda told=told: told in caplog.text)  # type: ignore[misc]
    assert asking is not None
    await asking.close()


async def peers_engines(peer: peers.Peer) -> object:
    return await peer.fleet.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=peers.CALL_TIMEOUT_S)


def test_the_server_logs_who_has_left_without_a_call(servers: Servers) -> None:
    """One line for each host, however often its clients fail, and none about a client that fits."""
    for name in ("plaintext to TLS", "no certificate", "expired", "wrong CA"):
        found = case(name, servers)
        flags = zip(("--ca", "--cert", "--key"), found.files, strict=False)
        CliRunner().invoke(app, ["--server", found.target, *(str(part) for pair in flags for part in pair), "engines"])
    wait_for(lambda: "left without a call" in servers.process.output(), 60, "the server's line")
    (line,) = [line for line in servers.process.output().splitlines() if "left without a call" in line]
    assert "127.0.0.1 connected to the TLS port" in line
    assert "WARNING" in line
    for setting in ("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "--client-ca", "--tls-cert"):
        assert setting in line


def test_a_client_that_fits_is_no_line_of_the_servers_log(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    server, good, expired = ours.issue("server"), ours.issue("good"), ours.issue("expired", lasts=-timedelta(hours=1))
    options = ["--tls-cert", server.cert, "--tls-key", server.key, "--client-ca", server.ca]
    control = Control(tmp_path, options=[str(part) for part in options], credentials=good.credentials().channel())
    for issued in (good, good, expired):
        flags = ["--ca", str(issued.ca), "--cert", str(issued.cert), "--key", str(issued.key)]
        CliRunner().invoke(app, ["--server", control.target, *flags, "engines"])
    # The line about the last client shows that the clients before it were looked at too.
    wait_for(lambda: "left without a call" in control.process.output(), 60, "the server's line")
    assert control.process.output().count("more since") == 0
    control.process.stop()


class Looks:
    """Connects clients to a port of this process that never answers, and notes the thread of each look at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        monkeypatch.setattr(handshakes, "WAIT_S", 0.1)
        monkeypatch.setattr(handshakes, "clients_of", self._look)

    def _look(self, port: int) -> set[handshakes.Address]:
        self.threads.append(threading.get_ident())
        return clients_of(port)

    async def connect(self, server: asyncio.Server, count: int, host: str = "127.0.0.1") -> list[socket.socket]:
        port = server.sockets[0].getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port), source_address=(host, 0)) for _ in range(count)]
        await until(lambda: {client.getsockname() for client in clients} <= clients_of(port))
        return clients


async def test_one_look_on_another_thread_serves_all_clients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, watched = Looks(monkeypatch), Handshakes()
    async with await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0) as server:
        watched.watch(server.sockets[0].getsockname()[1])
        clients = await looks.connect(server, 50)
        await asyncio.to_thread(watched.begun)
        for client in clients:
            client.close()
        await until(lambda: "left without a call" in caplog.text)
    assert len(looks.threads) == 2
    assert threading.get_ident() not in looks.threads


async def test_a_client_whose_call_lasts_is_not_taken_for_a_silent_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many clients have called since then."""
    monkeypatch.setattr(handshakes, "REMEMBERED", 4)
    looks, watched = Looks(monkeypatch), Handshakes()
    async with await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0) as server:
        watched.watch(server.sockets[0].getsockname()[1])
        (engine,) = await looks.connect(server, 1, "127.0.0.2")
        watched.called(f"ipv4:127.0.0.2:{engine.getsockname()[1]}")
        for number in range(6):
            watched.called(f"ipv4:10.0.0.7:{40000 + number}")
            await asyncio.to_thread(watched.begun)
            await asyncio.sleep(0)
        engine.close()
        (silent,) = await looks.connect(server, 1)
        await asyncio.to_thread(watched.begun)
        silent.close()
        await until(lambda: "127.0.0.1 connected to the TLS port" in caplog.text)
    assert "127.0.0.2" not in caplog.text


def test_a_client_that_fits_hears_nothing_of_tls(servers: Servers) -> None:
    good = servers.good
    flags = ["--ca", str(good.ca), "--cert", str(good.cert), "--key", str(good.key)]
    result = CliRunner().invoke(app, ["--server", servers.secured, *flags, "engines"])
    assert (result.exit_code, result.stderr) == (0, "")
    gone = CliRunner().invoke(app, ["--server", "127.0.0.1:1", *flags, "engines"])
    assert gone.exit_code == 3
    assert "TLS" not in gone.stderr
