"""Some of the simulated agents of bench-delivery: `python -m tests.bench.delivery_agents TARGET FIRST COUNT`.

Owns their streams, each a TCP connection of its own, and when they applied what. Prints a line of JSON for each
revision that all have applied: the revision and the monotonic times, in seconds, at which each wrote its ACK. One event
loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import grpc
from meridian.v1 import agent_pb2, agent_pb2_grpc

from tests.fakes.agent import FakeAgent, Script, hello

REQUESTS = 8
# What each agent reports: one step of all its requests.
REPORT_S = 1.0
THINK_TOKENS = 1 << 30
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class Agents:
    """All agents of this process, and how many have applied each revision."""

    def __init__(self, target: str, first: int, count: int) -> None:
        self.target, self.numbers = target, range(first, first + count)
        self.applied: dict[int, list[float]] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as agents:
            for number in self.numbers:
                agents.create_task(self._agent(number))

    async def _agent(self, number: int) -> None:
        agent = FakeAgent(number)
        for request in range(REQUESTS):
            agent.open(f"{number}-{request}", Script(THINK_TOKENS, 1))
        agent.outbox.clear()
        agent.say(snapshot=agent.snapshot())
        async with grpc.aio.insecure_channel(self.target, OPTIONS) as channel:
            call: Any = agent_pb2_grpc.AgentServiceStub(channel).Connect(wait_for_ready=True)
            await call.write(agent_pb2.ConnectRequest(hello=hello(f"engine-{number:04}")))
            one_at_a_time = asyncio.Lock()
            stepping = asyncio.create_task(self._step(agent, call, one_at_a_time))
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.HasField("directives"):
                    agent.engine.accept(response.directives)
                elif response.HasField("settings"):
                    settings = response.settings
                    agent.say(settings_status={"nonce": settings.nonce, "revision": settings.revision})
                    await self._send(agent, call, one_at_a_time)
                    self._note(settings.revision)
            stepping.cancel()
        raise SystemExit(f"agent {number}: the stream ended")

    async def _step(self, agent: FakeAgent, call: Any, one_at_a_time: asyncio.Lock) -> None:
        await asyncio.sleep(REPORT_S * random.random())
        while True:
            agent.step()
            await self._send(agent, call, one_at_a_time)
            await asyncio.sleep(REPORT_S)

    async def _send(self, agent: FakeAgent, call: Any, one_at_a_time: asyncio.Lock) -> None:
        async with one_at_a_time:
            for message in agent.heard():
                await call.write(message)

    def _note(self, revision: int) -> None:
        times = self.applied.setdefault(revision, [])
        times.append(time.monotonic())
        if len(times) == len(self.numbers):
            print(json.dumps({"revision": revision, "at_s": self.applied.pop(revision)}), flush=True)


if __name__ == "__main__":
    asyncio.run(Agents(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())
