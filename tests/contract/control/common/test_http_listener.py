"""The HTTP listeners of the control plane, asked as a hostile page and a hostile client ask them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from meridian_control.common import http_listener
from meridian_control.common.http_listener import MAX_CONNECTIONS, HttpListener
from meridian_control.common.metrics_listener import MetricsListener
from meridian_control.fleet.whole_fleet import WholeFleet
from meridian_control.page.server import StatusPage
from meridian_control.rollout.store import RolloutStore
from tests.contract.control.app.test_server import Process
from tests.contract.streams import Control

EVIL = "evil.example"


@asynccontextmanager
async def page(control: Control, host: str = "127.0.0.1", *names: str) -> AsyncIterator[str]:
    whole = WholeFleet(control.fleet, "replica-1", None, lambda: True)
    served = StatusPage(whole, control.store, RolloutStore(control.store), hosts=names)
    port = await served.start(host, 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await served.stop()


@asynccontextmanager
async def metrics(host: str = "127.0.0.1", *names: str) -> AsyncIterator[str]:
    registry = CollectorRegistry()
    Counter("asked", "Questions", registry=registry)
    served = MetricsListener(registry, names)
    port = await served.start(f"{host}:0")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await served.stop()


async def asked(url: str, **headers: str) -> tuple[int, str]:
    """Return the status of an answer and its first line."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.get(url, headers=named) as answer:
        return answer.status, (await answer.content.readline()).decode()


PATHS = ["/", "/events", "/request?id=x", "/page.js", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_at_another_name_reads_nothing_of_the_status_page(control: Control, path: str) -> None:
    async with page(control) as url:
        status, text = await asked(url + path, Host=f"{EVIL}:9465")
        assert (status, text) == (
            421,
            "this listener does not answer to 'evil.example:9465'; --allow-host adds a name\n",
        )
        assert (await asked(url + path, Origin=f"http://{EVIL}"))[0] == 403
        assert (await asked(url + path, Origin="null"))[0] == 403
        for site in ("cross-site", "same-site"):
            assert (await asked(url + path, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors"))[0] == 403


async def test_own_pages_links_and_tools_read_the_status_page(control: Control) -> None:
    async with page(control) as url:
        for headers in (
            {},
            {"Origin": url},
            {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"},
            {"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"},
            {"Host": "localhost:9465"},
        ):
            status, line = await asked(url + "/events", **headers)
            assert (status, line[:7]) == (200, "data: {")
        assert (await asked(url, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate"))[0] == 200


async def test_the_operator_allows_a_proxys_name(control: Control) -> None:
    async with page(control, "127.0.0.1", "page.example") as url:
        assert (await asked(url, Host="page.example", Origin="https://page.example"))[0] == 200
        assert (await asked(url, Origin="https://page.example"))[0] == 200
        assert (await asked(url, Host=EVIL))[0] == 421


async def test_a_page_at_another_name_reads_no_metrics() -> None:
    async with metrics() as scraped:
        assert (await asked(f"{scraped}/metrics"))[0] == 200
        assert (await asked(f"{scraped}/metrics", Host=EVIL))[0] == 421
        assert (await asked(f"{scraped}/metrics", Origin=f"http://{EVIL}"))[0] == 403


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n"]
)
async def test_no_host_and_two_hosts_are_refused(head: bytes) -> None:
    async with metrics() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head)
        assert (await reader.readline()).split()[1] in (b"421", b"400")
        writer.close()


async def test_the_formats_of_the_metrics() -> None:
    async with metrics() as url, aiohttp.ClientSession() as session:
        for headers, kind, coding in (
            ({}, "text/plain", "gzip"),
            ({"Accept": "application/openmetrics-text; version=1.0.0"}, "application/openmetrics-text", "gzip"),
            ({"Accept-Encoding": "br, GZIP; q=0.5"}, "text/plain", "gzip"),
            ({"Accept-Encoding": "identity"}, "text/plain", None),
            ({"Accept-Encoding": "gzip;q=0, identity"}, "text/plain", None),
            ({"Accept-Encoding": "deflate, gzip; q=0.0"}, "text/plain", None),
        ):
            async with session.get(f"{url}/metrics", headers=headers) as answer:
                text = await answer.text()
                assert (answer.content_type, answer.headers.get("Content-Encoding")) == (kind, coding)
                assert "asked_total 0.0" in text
        async with session.get(f"{url}/metrics", params={"name[]": "nothing"}) as answer:
            assert "asked" not in await answer.text()


# ---------------------------------------------------------------------------------------------- half-open connections


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.kill()


async def test_half_open_requests_cost_no_thread(running: Process) -> None:
    """Clients that send half of a request's head get no thread, and do not keep a scraper out."""
    await running.started()
    running.metrics()
    assert running.popen is not None
    tasks = f"/proc/{running.popen.pid}/task"
    before = len(os.listdir(tasks))
    opened = []
    try:
        for _ in range(MAX_CONNECTIONS // 2):
            opened.append(half := socket.create_connection(("127.0.0.1", running.metrics_port)))
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: loc")
        assert "meridian_build_info" in await asyncio.to_thread(running.metrics)
        assert len(os.listdir(tasks)) <= before + 2
    finally:
        for half in opened:
            half.close()


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[HttpListener, int]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="x" * (1 << 26))

    app = web.Application()
    app.router.add_get("/", answer)
    listener = HttpListener(app)
    port = await listener.start("127.0.0.1", 0)
    try:
        yield listener, port
    finally:
        await listener.stop()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait until the listener has ended a connection."""
    try:
        while await reader.read(1 << 20):
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
async def test_a_connection_that_asks_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_listener, "HEAD_S", 0.01)
    async with listening() as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(120):
            assert await ended(reader)
        writer.close()
        assert not listener._due


async def test_a_client_that_does_not_read_holds_up_no_end() -> None:
    async with asyncio.timeout(http_listener.READ_S):
        async with listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.read(1)
        writer.close()


async def test_a_client_that_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "READ_S", 0.01)
    async with listening() as (listener, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server: Any = listener._runner.server
        async with asyncio.timeout(120):
            while not server.connections:
                await asyncio.sleep(0.001)
            while server.connections:
                await asyncio.sleep(0.001)
        writer.transport.abort()


async def test_the_number_of_connections_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "MAX_CONNECTIONS", 3)
    async with listening() as (listener, port):
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        server: Any = listener._runner.server
        async with asyncio.timeout(120):
            while len(server.connections) < 3:
                await asyncio.sleep(0.001)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await ended(reader)
        assert len(server.connections) == 3
        for _, each in [*kept, (reader, writer)]:
            each.close()
