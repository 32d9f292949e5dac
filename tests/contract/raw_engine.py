"""An engine that a test plays message by message."""

from __future__ import annotations

from typing import Any, Self

import grpc
from meridian.v1 import agent_pb2, agent_pb2_grpc

from tests.fakes.agent import hello


class RawEngine:
    """An engine whose stream has only the messages that a test sends."""

    def __init__(self, channel: grpc.aio.Channel, said: str | agent_pb2.Hello, **fields: Any) -> None:
        """said: the engine's Hello, or its id and, in `fields`, further fields of its Hello."""
        self.call: Any = agent_pb2_grpc.AgentServiceStub(channel).Connect()
        self.hello = hello(said, **fields) if isinstance(said, str) else said
        self.step = 0

    async def send(self, **message: Any) -> None:
        await self.call.write(agent_pb2.ConnectRequest(**message))

    async def welcomed(self) -> Self:
        """Open the stream. Raises the error with which the stream is refused."""
        await self.send(hello=self.hello)
        assert (await self.call.read()).HasField("welcome")
        return self

    async def connect(self, revision: int = 1) -> Self:
        """Open the stream, and apply the policy as soon as it has this revision or a later one."""
        await self.welcomed()
        await self.send(snapshot=agent_pb2.Snapshot())
        while (settings := (await self.call.read()).settings).revision < revision:
            pass
        await self.apply(settings)
        await self.report()
        return self

    async def apply(self, settings: agent_pb2.Settings) -> None:
        status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=settings.revision)
        await self.send(settings_status=status)

    async def report(self, **fields: Any) -> None:
        self.step += 1
        await self.send(step=agent_pb2.StepReport(step=self.step, steps=1, **fields))

    async def answer(self, step: int) -> None:
        """Wait for the answer to a step."""
        while (await self.call.read()).directives.step < step:
            pass

    async def hand_over(self) -> agent_pb2.HandOver:
        """Return the next handover that the control plane decides."""
        while not (made := list((await self.call.read()).directives.hand_overs)):
            pass
        first: agent_pb2.HandOver = made[0]
        return first
