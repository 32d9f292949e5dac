"""The relay as a process of its own, under the limits of an operating system."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.contract.relay.relayed import LONG_S, ask, engines
from tests.fakes.vllm_server import FakeVllm, Plan, Script
from tests.processes import Process, free_port, wait_for

SCRIPT = Script([b"so "], [b"it is"])
FILES, REQUESTS = 64, 60


@asynccontextmanager
async def relay(home: FakeVllm, folder: Path, *within: str) -> AsyncIterator[tuple[Process, str]]:
    """Yield a relay's process, and its URL. within: the command that runs it."""
    port = free_port()
    command = [*within, sys.executable, "-m", "meridian_relay", "--listen", f"127.0.0.1:{port}"]
    process = Process(
        [*command, "--metrics-listen", "", "--drain-s", "3600", "--thinking", home.url], folder / "relay.log"
    )
    try:
        await says(process, "listening on")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()


async def says(process: Process, words: str) -> None:
    """Wait until a process has written some words."""
    await asyncio.to_thread(wait_for, lambda: words in process.output(), 60, words)


async def test_requests_beyond_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    within = ["sh", "-c", f'ulimit -Sn {FILES} && exec "$@"', "sh"]
    async with engines(SCRIPT, 1) as (home,), relay(home, tmp_path, *within) as (_, url):
        home.usual = Plan(waits_after=1)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asked = [asyncio.create_task(ask(session, url)) for _ in range(REQUESTS)]
            async with asyncio.timeout(LONG_S):
                while len(home.seen) + sum(task.done() for task in asked) < REQUESTS:
                    await asyncio.sleep(0.01)
                home.go.set()
                answers = await asyncio.gather(*asked)
    assert [answer.status for answer in answers] == [200] * REQUESTS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_requests_under_way(number: signal.Signals, tmp_path: Path) -> None:
    async with engines(SCRIPT, 1) as (home,), relay(home, tmp_path) as (process, url):
        home.usual = Plan(waits_after=1)
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(ask(session, url))
            await home.waiting.wait()
            process.signal(number)
            await says(process, "shutting down")
            assert process.popen.poll() is None, "the request is under way"
            process.signal(number)
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(asking, 120)
            assert await asyncio.to_thread(process.popen.wait, 120) == 0
