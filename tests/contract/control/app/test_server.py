"""`python -m meridian_control` as a process: what it serves, how it stops, and how it refuses to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import sys
import urllib.request
from base64 import urlsafe_b64encode
from contextlib import closing
from typing import TYPE_CHECKING, Any

import aiohttp
import asyncpg  # type: ignore[import-untyped]
import grpc
import pytest
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]
from meridian.v1 import fleet_pb2, policy_pb2

from meridian_control.common.paging import MAX_PAGE_SIZE, page, token_after
from meridian_control.server import server as control_server
from meridian_control.server.rate_limits import Kind
from tests.contract.clients import Clients, calling
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control, refusal
from tests.fakes.linked import LinkedEngine, until
from tests.processes import free_port, start

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.preloaded import Forked

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STOP_S = 120.0


class Process:
    """A control plane as a process; its folder holds the store and the log."""

    # The module that the process runs.
    module = "meridian_control"

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port, self.metrics_port = free_port(), free_port()
        self.target = f"127.0.0.1:{self.port}"
        self.options = options
        self.popen: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", self.module, "--listen", self.target]
        command += [
            "--metrics-listen",
            f"127.0.0.1:{self.metrics_port}",
            "--page-listen",
            "",
            "--store",
            str(self.folder / "m.db"),
        ]
        self.popen = start([*command, *self.options], self.folder / "log", os.environ)

    async def started(self) -> None:
        self.start()
        async with calling(self.target) as clients:
            response = await clients.health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
        assert response.status == SERVING

    async def ended(self) -> int:
        assert self.popen is not None
        return await asyncio.to_thread(self.popen.wait, STOP_S)

    def signal(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    async def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return await self.ended()

    def kill(self) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60) as response:
            return str(response.read(), "utf-8")

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
async def clients(running: Process) -> AsyncIterator[Clients]:
    async with calling(running.target) as clients:
        yield clients


# ---------------------------------------------------------------------------------------------------------- services


async def test_health_of_every_service(clients: Clients) -> None:
    stub = clients.health
    for name in ("", *control_server.SERVICES):
        response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == SERVING
    code, _ = await refusal(stub.Check(health_pb2.HealthCheckRequest(service="no.such")))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_reflection(clients: Clients) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(clients.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert {"meridian.v1.AgentService", "meridian.v1.PolicyService", "meridian.v1.FleetService"} <= names
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
    call.cancel()


async def test_the_fleet(running: Process, clients: Clients) -> None:
    stub = clients.fleet
    with LinkedEngine([running.target], "shown") as engine, LinkedEngine([running.target], "also") as other:
        for number in range(5):
            engine.open(f"r{number}")
        other.open("elsewhere")
        await engine.steps_until(lambda: len(engine.caps()) == 5)
        await other.steps_until(other.caps)
        engines = (await stub.ListEngines(fleet_pb2.ListEnginesRequest())).engines
        connected = {e.engine_id for e in engines if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED}
        assert connected == {"shown", "also"}
        request = fleet_pb2.ListRequestsRequest(engine_id="shown", page_size=2)
        pages = 0
        names: list[str] = []
        while True:
            response = await stub.ListRequests(request)
            pages, names = pages + 1, names + [r.request_id for r in response.requests]
            request.page_token = response.next_page_token
            if not request.page_token:
                break
        assert (pages, names) == (3, [f"r{number}" for number in range(5)])
        everywhere = await stub.ListRequests(fleet_pb2.ListRequestsRequest())
        assert [r.request_id for r in everywhere.requests] == ["elsewhere", *names]
        nowhere = await stub.ListRequests(fleet_pb2.ListRequestsRequest(engine_id="none"))
        assert not nowhere.requests
        watching = stub.WatchFleet(fleet_pb2.WatchFleetRequest(interval_ms=50))
        shown: Any = await watching.read()
        before = {r.request_id: r.think_tokens for r in shown.requests}
        assert set(before) == {"elsewhere", *names}
        engine.step()
        while all(r.think_tokens == before[r.request_id] for r in shown.requests):
            shown = await watching.read()
        watching.cancel()


async def test_explain_for_what_is_connected(running: Process, clients: Clients) -> None:
    async def cap(**fields: Any) -> tuple[str, str]:
        answer = await clients.policy.ExplainPolicy(policy_pb2.ExplainPolicyRequest(**fields))
        (found,) = [row for row in answer.values if row.path == "scheduler.max_think_tokens"]
        return found.value, found.origin

    with LinkedEngine([running.target], "asked") as engine:
        engine.open("capped", own_cap=7)
        await engine.steps_until(engine.caps)
        assert await cap(engine_id="asked") == ("32768", "default")
        assert await cap(request_id="capped") == await cap(engine_id="asked", request_id="capped") == ("7", "request")
        for fields, complaint in (
            ({"engine_id": "no"}, 'no engine "no" is connected'),
            ({"request_id": "no"}, 'no live request "no" on any engine'),
            ({"engine_id": "asked", "request_id": "no"}, 'no live request "no" on engine "asked"'),
        ):
            assert await refusal(cap(**fields)) == (grpc.StatusCode.NOT_FOUND, complaint)


async def refused(call: Any) -> str:
    code, said = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    return said


TEXTS = ["[" * 90_000, '["e", "r"]', '["e", "r", 1e999]', '["e", "r", {}]', '{"e": 1, "r": 2, "s": 3}', "[1, 2, 3, 4]"]


@pytest.mark.parametrize("token", ["-1", "²", "9" * 1000, *(urlsafe_b64encode(t.encode()).decode() for t in TEXTS)])
async def test_page_tokens_that_were_never_given_out(clients: Clients, token: str) -> None:
    stub = clients.fleet
    complaint = "page_token must be a token that the server has returned"
    assert (await refused(stub.ListEngines(fleet_pb2.ListEnginesRequest(page_token=token)))).startswith(complaint)
    assert (await refused(stub.ListRequests(fleet_pb2.ListRequestsRequest(page_token=token)))).startswith(complaint)


async def test_sizes_and_intervals_below_zero(clients: Clients) -> None:
    stub = clients.fleet
    complaint = "page_size must be at least 0; got -1"
    assert await refused(stub.ListEngines(fleet_pb2.ListEnginesRequest(page_size=-1))) == complaint
    assert await refused(stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=-1))) == complaint
    watching = stub.WatchFleet(fleet_pb2.WatchFleetRequest(interval_ms=-1))
    assert await refused(watching.read()) == "interval_ms must be at least 0; got -1"


def key(entry: str) -> tuple[str, str]:
    return entry[:2], entry[2:]


def walked(looks: list[list[str]], size: int) -> list[list[str]]:
    """Return the pages of a list that looks so at each page."""
    pages, token = list[list[str]](), ""
    for entries in looks:
        begin, end = page(entries, key, size, token)
        pages.append(entries[begin:end])
        token = token_after(entries, key, end)
    assert not token
    return pages


@pytest.mark.parametrize(
    ("looks", "size", "pages"),
    [
        ([[]], 0, [[]]),
        ([["e11", "e12"]], 2, [["e11", "e12"]]),
        ([["e11", "e12", "e21"], ["e12", "e21"]], 2, [["e11", "e12"], ["e21"]]),
        ([["e11", "e12", "e21"], ["e01", "e11", "e111", "e12", "e21"]], 2, [["e11", "e12"], ["e21"]]),
        ([["e11", "e12", "e21"], ["e11", "e21", "e22"]], 2, [["e11", "e12"], ["e21", "e22"]]),
        ([["e11", "e11", "e11"], ["e11", "e11", "e11"]], 2, [["e11", "e11"], ["e11"]]),
        ([["e11", "e12"], []], 1, [["e11"], []]),
    ],
    ids=["empty", "whole", "one leaves", "two come", "the last shown leaves", "same keys", "all leave"],
)
def test_pages_of_a_list_that_changes(looks: list[list[str]], size: int, pages: list[list[str]]) -> None:
    """No entry that stays is shown twice or left out."""
    assert walked(looks, size) == pages


def test_page_sizes() -> None:
    entries = [f"e1{number:05d}" for number in range(5000)]
    assert (page(entries, key, 0, ""), page(entries, key, 4000, "")) == ((0, 100), (0, MAX_PAGE_SIZE))


# -------------------------------------------------------------------------------------------------------- shutdown


async def test_sigterm(own: Process) -> None:
    """Health changes first, agents are told to go away, and the process ends within its grace period although streams
    are open."""
    await own.started()
    async with calling(own.target) as clients:
        health = clients.health.Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == SERVING
        watching = clients.fleet.WatchFleet(fleet_pb2.WatchFleetRequest(interval_ms=60_000))
        await watching.read()
        call = (await RawEngine(clients.channel, "engine").welcomed()).call
        assert (await call.read()).HasField("settings")
        ending = asyncio.create_task(own.terminate())
        assert (await health.read()).status == NOT_SERVING
        assert (await call.read()).going_away.reason == "the control plane is shutting down"
        assert await call.read() is grpc.aio.EOF
        assert await watching.read() is grpc.aio.EOF
        health.cancel()
        assert await ending == 0
    assert "Traceback" not in own.log()


async def test_what_calls_under_way_begin_after_the_farewell_ends_at_once(control: Control, tmp_path: Path) -> None:
    gate = control.parts.gate
    async with calling(control.target) as clients:
        engine = RawEngine(clients.channel, "engine")
        await until(lambda: gate.limiter._taken[Kind.ENGINE, "ipv4:127.0.0.1"])
        with closing(sqlite3.connect(tmp_path / "meridian.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            recording = clients.fleet.RecordTrace(fleet_pb2.RecordTraceRequest())
            await until(lambda: gate._tasks)
            stopping = asyncio.create_task(control.server.stop(300.0))
            await until(control.server._watching._stopped.is_set)
        assert await recording.read() is grpc.aio.EOF
        await engine.welcomed()
        while not (message := await engine.call.read()).HasField("going_away"):
            pass
        assert message.going_away.reason == "the control plane is shutting down"
        assert await engine.call.read() is grpc.aio.EOF
        await stopping


async def test_state_survives_a_restart(own: Process) -> None:
    await own.started()
    async with calling(own.target) as clients:
        policy = policy_pb2.Policy(scheduler=policy_pb2.SchedulerPolicy(max_think_tokens=777))
        await clients.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy))
    with LinkedEngine([own.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 777)])
        assert engine.link.lease.revision == 2
        own.kill()
        await until(lambda: not engine.link.lease.connected)
        await own.started()
        await engine.steps_until(lambda: engine.caps() == [(0, 777)] * 2)
        assert [s.revision for s in engine.settings] == [2, 2]
        assert [s.nonce for s in engine.settings] == [1, 1], "nonces are counted per stream"
        assert await own.terminate() == 0


async def test_sigterm_during_the_start(own: Process) -> None:
    """A container's first process would ignore it."""
    file = own.folder / "access.toml"
    os.mkfifo(file)
    own.options = ("--access", str(file))
    own.start()
    # The open returns once the control plane reads the file.
    with await asyncio.to_thread(file.open, "w"):
        assert await own.terminate() == 0
    assert own.log() == ""


# ---------------------------------------------------------------------------------------------------- refused starts


async def complaint_of(process: Process) -> str:
    """Return the only line that the process logs, apart from gRPC's own lines."""
    process.start()
    assert await process.ended() == 2
    (line,) = [line for line in process.log().splitlines() if "add_port.cc" not in line]
    return line


@pytest.mark.parametrize(("which", "flag"), [("port", ""), ("metrics_port", "--metrics-listen: ")])
async def test_a_busy_port(own: Process, which: str, flag: str) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", getattr(own, which)))
        taken.listen()
        line = await complaint_of(own)
    assert line.startswith(f"meridian-control: {flag}cannot listen on 127.0.0.1:{getattr(own, which)}")


async def test_a_refused_start_leaves_no_replica_behind(own: Process, postgres_address: str) -> None:
    own.options = ("--store", postgres_address)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", own.port))
        taken.listen()
        own.start()
        assert await own.ended() == 2
    assert "leads, token 1" in own.log()
    connection = await asyncpg.connect(postgres_address)
    try:
        assert await connection.fetch("SELECT FROM replicas") == []
        assert await connection.fetch("SELECT FROM leader WHERE expires_at > now()") == []
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--policy {0}/bad.toml", "{0}/bad.toml:2: entropy.ema_alpha must be in (0, 1]; got 1.5"),
        ("--listen localhost", "an address must be host:port or :port; got 'localhost'"),
        # Without TLS no caller could prove who it is.
        (
            "--listen :50051 --access {0}/bad.toml",
            "--access needs --tls-cert and --tls-key if other machines can reach --listen :50051: without TLS callers "
            "cannot prove who they are",
        ),
        ("--tls-cert x", "--tls-cert and --tls-key belong together, and --client-ca needs both"),
        ("--tls-cert /no/x --tls-key /no/y", "[Errno 2] No such file or directory: '/no/x'"),
    ],
)
async def test_options_that_cannot_be_used(own: Process, options: str, complaint: str) -> None:
    (own.folder / "bad.toml").write_text("[entropy]\nema_alpha = 1.5\n")
    own.options = tuple(options.format(own.folder).split())
    assert await complaint_of(own) == f"meridian-control: {complaint.format(own.folder)}"


def warnings(process: Process) -> list[str]:
    return [line.partition(" WARNING ")[2] for line in process.log().splitlines() if " WARNING " in line]


async def test_it_starts_as_users_start_it_and_says_who_may_what(own: Process) -> None:
    """With only --listen :50051, the log and the status page say the same about who may do what."""
    port, page_port = own.target.rpartition(":")[2], free_port()
    own.options = ("--listen", f":{port}", "--page-listen", f"127.0.0.1:{page_port}")
    await own.started()
    (line,) = warnings(own)
    notice = line.removeprefix("meridian_control ")
    assert notice == (
        f"Every caller that reaches :{port} may read, and connect engines. Changes are accepted from this host only. "
        "To accept changes from other hosts, give --access FILE or --client-ca FILE, both with --tls-cert and "
        "--tls-key, or give --insecure."
    )
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{page_port}/events") as events:
        told = json.loads((await events.content.readline()).removeprefix(b"data: "))
    assert told["access"] == notice
    async with calling(own.target) as clients:
        await clients.policy.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy()))
    assert await own.terminate() == 0


async def test_insecure_is_said_aloud(own: Process) -> None:
    """With --insecure the log names the risk. On a Unix socket nothing is logged, because no other host can connect."""
    port = own.target.rpartition(":")[2]
    own.options = ("--listen", f":{port}", "--insecure")
    await own.started()
    assert warnings(own) == [f"meridian_control Every caller that reaches :{port} may change everything (--insecure)."]
    assert await own.terminate() == 0
    (own.folder / "log").unlink()
    own.target = f"unix:{own.folder / 'socket'}"
    own.options = ()
    await own.started()
    assert warnings(own) == []
    assert await own.terminate() == 0
