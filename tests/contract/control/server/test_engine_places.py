"""Places of engines on a real server: neither one caller, nor one engine's id, nor streams without a Hello take those
of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_control.fleet.fleet import INCARNATIONS
from meridian_control.server.rate_limits import CallLimits
from tests.contract.secured import Secured, securing
from tests.fakes.agent import hello
from tests.fakes.linked import until

PLACES = 40
LIMITS = CallLimits(engines=PLACES, engines_of_caller=PLACES // 2)
ACCESS = '[[identity]]\ncn = "engine-*"\nrole = "agent"\n[[identity]]\ncn = "fleet"\nrole = "agent"\nengines = ["*"]\n'


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with securing(tmp_path, limits=LIMITS) as secured:
        secured.access.write_text(ACCESS)
        yield secured


class Opened:
    """Streams that one caller opens."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._connect: Any = agent_pb2_grpc.AgentServiceStub(channel).Connect

    def silent(self) -> Any:
        """Open a stream without a Hello."""
        return self._connect()

    async def engine(self, engine_id: str, incarnation: str = "1") -> tuple[Any, str]:
        """Open a stream and say Hello; return it with the reason why it was refused, empty if it was not."""
        said = hello(engine_id)
        said.incarnation = incarnation

        async def messages() -> AsyncIterator[agent_pb2.ConnectRequest]:
            yield agent_pb2.ConnectRequest(hello=said)
            await asyncio.Event().wait()

        # A stream may be refused before its Hello is sent, so gRPC sends it.
        call = self._connect(messages())
        try:
            assert (await call.read()).HasField("welcome")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:
                # grpcio loses the status of a stream that is refused while the client sends.
                return await self.engine(engine_id, incarnation)
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return call, error.details() or ""
        return call, ""


async def test_one_certificate_does_not_take_the_places_of_others(secured: Secured) -> None:
    async with AsyncExitStack() as channels:
        one = Opened(await channels.enter_async_context(secured.channel("engine-1")))
        other = Opened(await channels.enter_async_context(secured.channel("engine-2")))
        found = [await one.engine("engine-1", str(number)) for number in range(PLACES)]
        refused = [reason for _, reason in found if reason]
        assert set(refused) == {f'{INCARNATIONS} processes of engine "engine-1" have streams'}
        assert len(refused) == PLACES - INCARNATIONS
        assert (await other.engine("engine-2"))[1] == ""
        # A process that connects again replaces its own stream.
        assert (await one.engine("engine-1", "0"))[1] == ""


async def test_one_caller_of_many_engines_leaves_half_of_the_places(secured: Secured) -> None:
    async with AsyncExitStack() as channels:
        fleet = Opened(await channels.enter_async_context(secured.channel("fleet")))
        other = Opened(await channels.enter_async_context(secured.channel("engine-2")))
        found = [(await fleet.engine(f"e{number}"))[1] for number in range(PLACES)]
        assert found == [""] * (PLACES // 2) + [f"{PLACES // 2} engines by one caller are open"] * (PLACES // 2)
        assert (await other.engine("engine-2"))[1] == ""


async def test_streams_without_a_hello_take_their_callers_places(secured: Secured) -> None:
    async with AsyncExitStack() as channels:
        silent = Opened(await channels.enter_async_context(secured.channel("fleet")))
        other = Opened(await channels.enter_async_context(secured.channel("engine-2")))
        calls = [silent.silent() for _ in range(PLACES)]
        taken = secured.gate.limiter._taken
        await until(lambda: max(taken.values(), default=0) == PLACES // 2)
        assert (await other.engine("engine-2"))[1] == ""
        for call in calls:
            call.cancel()
