"""The relay's listeners, asked as a hostile page and a hostile client ask them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from meridian_relay import listener
from meridian_relay.metrics import metrics_listener
from meridian_relay.server import Relay
from tests.processes import Process, free_port, wait_for

EVIL = "evil.example"


@asynccontextmanager
async def relay(*names: str, host: str = "127.0.0.1") -> AsyncIterator[str]:
    served = Relay([f"http://127.0.0.1:{free_port()}"], "</think>", CollectorRegistry(), 1.0, names)
    port = await served.start(host, 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await served.stop()


@asynccontextmanager
async def metrics(*names: str) -> AsyncIterator[str]:
    registry = CollectorRegistry()
    Counter("asked", "Questions", registry=registry)
    served = metrics_listener(registry, names)
    port = await served.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await served.stop()


async def status(url: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status


async def test_a_page_at_another_name_asks_no_engine() -> None:
    # No engine runs here: 502 says that the relay has passed the request on.
    async with relay() as url, relay("api.example") as named, relay("api.example", host="0.0.0.0") as outside:
        assert await status(f"{url}/v1/models") == 502
        assert await status(f"{url}/v1/models", Host=EVIL) == 421
        assert await status(f"{named}/v1/models", Host="api.example:8000") == 502
        assert await status(f"{outside}/v1/models", Host="api.example") == 502
        assert await status(f"{outside}/v1/models", Host="10.0.0.7:8000") == 502
        assert await status(f"{outside}/v1/models", Host=EVIL) == 421
        # Web clients of other origins use the API; whether they may is what the engine says.
        assert await status(f"{url}/v1/models", Origin="http://localhost:3000") == 502
    async with relay(host="0.0.0.0") as url:
        assert await status(f"{url}/v1/models", Host="relay.internal") == 502


@pytest.mark.parametrize(
    ("head", "host", "names", "answer"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", "0.0.0.0", [], b"502"),
        (b"GET /health HTTP/1.0\r\n\r\n", "0.0.0.0", ["api.example"], b"421"),
        (b"GET /health HTTP/1.0\r\n\r\n", "127.0.0.1", [], b"421"),
        (b"GET /health HTTP/1.1\r\n\r\n", "0.0.0.0", [], b"400"),
        (b"GET /health HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "0.0.0.0", [], b"400"),
    ],
)
async def test_a_check_of_health_needs_no_name(head: bytes, host: str, names: list[str], answer: bytes) -> None:
    """Load balancers check by HTTP/1.0 without a host, as HAProxy does, where every name is answered."""
    async with relay(*names, host=host) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head)
        said = await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert said.split()[1] == answer


async def test_a_page_reads_why_the_relay_serves_nothing() -> None:
    """An engine's own errors can be read by pages of other origins, too."""
    chat, path = {"messages": [{"role": "user", "content": "hi"}]}, "/v1/chat/completions"
    async with relay() as url, aiohttp.ClientSession() as session:
        for body in (chat, chat | {"stream": True}, {}):
            async with session.post(url + path, json=body) as answer:
                assert (answer.status, answer.headers.get("Access-Control-Allow-Origin")) == (502, "*")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-User: caf\xe9\r\n\r\n")
        said = await reader.read()
        writer.close()
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"Access-Control-Allow-Origin: *" in said


async def test_the_metrics_are_not_compressed() -> None:
    refuses = {"Accept-Encoding": "gzip;q=0"}
    async with metrics() as url, aiohttp.ClientSession() as session, session.get(url, headers=refuses) as answer:
        assert ("Content-Encoding" in answer.headers, "asked_total" in await answer.text()) == (False, True)


async def test_many_clients_may_connect_while_the_event_loop_is_busy() -> None:
    """A connection that finds no place is tried again after seconds only."""
    async with relay() as url:
        address = "127.0.0.1", int(url.rpartition(":")[2])
        with ExitStack() as opened:
            # This test holds up the relay's own event loop.
            for _ in range(300):
                opened.enter_context(socket.create_connection(address, timeout=120)).settimeout(0)


async def test_a_page_at_another_name_reads_no_metrics() -> None:
    async with metrics("relay.internal") as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as answer:
            assert (answer.content_type, "asked_total 0.0" in await answer.text()) == ("text/plain", True)
        assert await status(f"{url}/metrics", Host="relay.internal") == 200
        assert await status(f"{url}/metrics", Host=EVIL) == 421


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
async def test_a_connection_that_asks_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.01)
    async with relay() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        async with asyncio.timeout(120):
            with suppress(ConnectionError):
                while await reader.read(1 << 20):
                    pass
        writer.close()


def test_a_hostile_client_forges_no_line_of_the_log(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "meridian_relay", "--listen", f"127.0.0.1:{port}", "--metrics-listen", ""]
    process = Process([*command, "--thinking", "http://127.0.0.1:1"], tmp_path / "relay.log")
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        try:
            httpx.get(url + "/health", timeout=2)
        except httpx.HTTPError:
            return False
        return True

    wait_for(serves, 60, "the relay to serve")
    for _ in range(50):
        httpx.get(url + "/v1/%0aCRITICAL%20forged%1b%5b31m%c2%9b%e2%80%ae", timeout=10)
    process.stop()
    lines = process.output().splitlines()
    assert [line for line in lines if not line.replace("\t", " ").isprintable()] == []
    assert [line for line in lines if line.startswith("CRITICAL")] == []
    assert 0 < process.output().count("cannot be reached") < 20


def test_sigterm_during_the_imports(tmp_path: Path) -> None:
    """A container's first process would ignore it."""
    fifo, where = tmp_path / "waits", os.pathsep.join([str(tmp_path), *sys.path])
    os.mkfifo(fifo)
    # A module that the relay needs, whose import does not end.
    (tmp_path / "prometheus_client.py").write_text(f"open({str(fifo)!r}).read()")
    process = Process([sys.executable, "-m", "meridian_relay"], tmp_path / "relay.log", {"PYTHONPATH": where})
    ends = ExitStack()

    def imports() -> bool:
        assert process.popen.poll() is None, process.output()
        with suppress(OSError):
            # It can be opened once the module reads.
            ends.callback(os.close, os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    with ends:
        wait_for(imports, 60, "the import")
        assert process.stop() == 0
    assert process.output() == ""
