"""A relay on a real port in front of scripted engines, and a client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import aiohttp
from prometheus_client import CollectorRegistry

from meridian_relay import engines as engines_module
from meridian_relay import exchange as exchange_module
from meridian_relay.bodies import HANDOVER
from meridian_relay.metrics import RESULTS
from meridian_relay.server import Relay
from tests.fakes.vllm_server import MARKER, FakeVllm, Script

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 100,
}
# Seconds in place of the relay's own limits, which a busy machine could exceed.
LONG_S = 60.0
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}


@dataclass
class Answer:
    """A streamed answer as a client reads it; `error` is the error event's object."""

    status: int
    chunks: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def text(self, name: str) -> str:
        return "".join(choice["delta"].get(name) or "" for choice in self._choices())

    def ending(self) -> tuple[str | None, Any]:
        """Return finish_reason and stop_reason, which one chunk alone has."""
        (last,) = [choice for choice in self._choices() if choice["finish_reason"] is not None]
        return last["finish_reason"], last["stop_reason"]

    def usage(self) -> dict[str, Any]:
        (usage,) = [dict(chunk["usage"]) for chunk in self.chunks if "usage" in chunk]
        return usage

    def _choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]


@dataclass
class Relayed:
    """A relay with its registry, and the engines: the thinking ones and the answering one."""

    url: str
    registry: CollectorRegistry
    session: aiohttp.ClientSession
    relay: Relay

    async def ask(self, **fields: Any) -> Answer:
        return await ask(self.session, self.url, **fields)

    def results(self) -> dict[str, float]:
        """Return the results that are not zero."""
        counts = {result: self.value("meridian_relay_requests_total", result=result) for result in RESULTS}
        return {result: count for result, count in counts.items() if count}

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


async def ask(session: aiohttp.ClientSession, url: str, **fields: Any) -> Answer:
    """Send a streamed chat request and read the answer to its end."""
    async with session.post(f"{url}/v1/chat/completions", json=BODY | fields) as response:
        answer = Answer(response.status, headers=dict(response.headers))
        if response.status != 200:
            answer.error = (await response.json())["error"]
            return answer
        lines = [line async for line in response.content if line.strip() and not line.startswith(b":")]
    assert lines[-1] == b"data: [DONE]\n"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            answer.error = chunk["error"]
        else:
            answer.chunks.append(chunk)
    return answer


@asynccontextmanager
async def relaying(*thinking: str, drain_s: float = LONG_S) -> AsyncIterator[Relayed]:
    registry = CollectorRegistry()
    relay = Relay(list(thinking), MARKER, registry, drain_s)
    with (
        patch.multiple(engines_module, CONNECT_S=LONG_S, ANSWER_S=LONG_S, SKIP_S=LONG_S),
        patch.object(exchange_module, "USAGE_S", LONG_S),
    ):
        port = await relay.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as session:
                yield Relayed(f"http://127.0.0.1:{port}", registry, session, relay)
        finally:
            await relay.stop()


@asynccontextmanager
async def engines(script: Script, number: int) -> AsyncIterator[list[FakeVllm]]:
    started = [await FakeVllm(script).start() for _ in range(number)]
    try:
        yield started
    finally:
        for engine in started:
            await engine.stop()


def handover(url: str, params: dict[str, Any] | None = PARAMS, expires_ms: float = 60_000, **more: Any) -> str:
    """Return the stop_reason with which an engine has a request continued at a URL."""
    fields = {"ref": "ref-1", "url": url, "kv_transfer_params": params, "expires_ms": expires_ms}
    return HANDOVER + json.dumps(fields | more)
