"""The relay as a process of its own, under the limits of an operating system."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import aiohttp

from tests.contract.relay.relayed import LONG_S, ask, engines
from tests.fakes.vllm_server import Plan, Script
from tests.processes import Process, free_port, wait_for

if TYPE_CHECKING:
    from pathlib import Path

FILES, REQUESTS = 64, 60


async def test_requests_beyond_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    port = free_port()
    async with engines(Script([b"so "], [b"it is"]), 1) as (home,):
        home.usual = Plan(waits_after=1)
        command = ["sh", "-c", f'ulimit -Sn {FILES} && exec "$@"', "sh", sys.executable, "-m", "meridian_relay"]
        command += ["--listen", f"127.0.0.1:{port}", "--metrics-listen", "", "--thinking", home.url]
        process = Process(command, tmp_path / "relay.log")
        try:
            await asyncio.to_thread(wait_for, lambda: "listening on" in process.output(), 60, "the relay to listen")
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                asked = [asyncio.create_task(ask(session, f"http://127.0.0.1:{port}")) for _ in range(REQUESTS)]
                async with asyncio.timeout(LONG_S):
                    while len(home.seen) + sum(task.done() for task in asked) < REQUESTS:
                        await asyncio.sleep(0.01)
                    home.go.set()
                    answers = await asyncio.gather(*asked)
        finally:
            process.stop()
    assert [answer.status for answer in answers] == [200] * REQUESTS
