"""Measure what it costs that a gateway names tenant and SLO class: `python -m tests.bench.gateway [REQUESTS]`.

The program measures the CPU time that a stock API server takes for a chat of one token, in its own process, and the CPU
time of the agent's part of a request for each source. The last line is JSON; `share` is the second as a share of the
first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from meridian_agent.core.request_sources import OF_TENANT, RequestSources, source_of
from meridian_agent.vllm_adapter.gateway import SENDER, named
from tests.bench.machine import ticks_of
from tests.engine.served import APART, PROMPTS, Served
from tests.processes import RPC_S, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

# Times that the agent's part runs for each source.
ROUNDS = 20_000
CLAIMS = {"iss": "https://issuer.example", "sub": "4711", "aud": ["vllm"], "exp": 1_900_000_000, "org": "acme"}
TOKEN = f"e30.{base64.urlsafe_b64encode(json.dumps(CLAIMS).encode()).decode()}.{'s' * 342}"
HEADERS = [(f"x-header-{i}".encode(), b"value") for i in range(12)]
HEADERS += [(b"x-tenant", b"acme"), (b"authorization", f"Bearer {TOKEN}".encode())]


async def stock_us(requests: int) -> float:
    """Return the CPU microseconds that a stock API server takes for a chat."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), "", more=APART)
        try:
            wait_for(served.ready, 300, "vLLM to serve")
            body = {"model": "maze", "max_tokens": 1, "messages": [{"role": "user", "content": PROMPTS[0]}]}
            url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
            pid = served.process.popen.pid
            async with httpx.AsyncClient(verify=False, timeout=RPC_S) as client:
                for count in (requests // 10, requests):
                    before = ticks_of(pid)
                    for _ in range(count):
                        (await client.post(url, json=body)).raise_for_status()
            return (ticks_of(pid) - before) / os.sysconf("SC_CLK_TCK") / requests * 1e6
        finally:
            served.process.stop()


def agent_us() -> Iterator[tuple[str, float]]:
    """Yield the CPU microseconds of the agent's part of a request, by source."""
    for said in ("header:x-tenant", "api_key", "verified_claim:org"):
        sources = RequestSources(source_of(said, OF_TENANT), None, b"s" * 32)
        assert sources.read(HEADERS).tenant
        begin = time.process_time()
        for _ in range(ROUNDS):
            token = SENDER.set(sources.read(HEADERS))
            named(sources, SENDER.get(), {"meridian_effort": "low"})
            SENDER.reset(token)
        yield said, (time.process_time() - begin) / ROUNDS * 1e6


def main() -> None:
    stock = asyncio.run(stock_us(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
    agent = dict(agent_us())
    shares = {said: round(us / stock, 5) for said, us in agent.items()}
    print(
        json.dumps({"stock_us": round(stock), "agent_us": {k: round(v, 1) for k, v in agent.items()}, "share": shares})
    )


if __name__ == "__main__":
    main()
