"""Run a part of bench-delivery's simulated agents: `python -m tests.bench.delivery_agents TARGET FIRST COUNT`.

The module owns the agents' streams, each a TCP connection of its own, and the time at which each agent applied a
revision. When all its agents have applied a revision, it prints a line of JSON: the revision and the monotonic times,
in seconds, at which each agent wrote its ACK. The program has one event loop.
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
# Each agent reports one step of all its requests at this interval.
REPORT_S = 1.0
THINK_TOKENS = 1 << 30
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class Agents:
    """All agents of this process, and the times at which they applied each revision."""

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
