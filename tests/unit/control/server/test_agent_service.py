"""The stream of an engine that cannot begin."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.engine.part import Capability
from meridian_control.fleet.fleet import Fleet
from meridian_control.server.agent_service import AgentService
from meridian_control.server.client_faults import ClientFaults
from tests.fakes.control import utc_now
from tests.unit.control.capabilities.handover.engines import hello

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meridian_control.engine.part import Part, Stream


class Context:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


async def test_a_part_that_cannot_be_made_takes_no_place() -> None:
    def broken(stream: Stream) -> Part:
        raise ValueError("no part")

    async def said() -> AsyncIterator[agent_pb2.ConnectRequest]:
        yield agent_pb2.ConnectRequest(hello=hello("one"))

    async def nothing() -> Any:
        pytest.fail("nobody asks for it")

    taken: list[str] = []

    def seat() -> ExitStack:
        place = ExitStack()
        taken.append("place")
        place.callback(taken.pop)
        return place

    fleet = Fleet(utc_now, capabilities=[Capability("broken", broken)])
    context: Any = Context()
    with pytest.raises(ValueError, match="no part"):
        await anext(AgentService(fleet, ClientFaults(), nothing, nothing, seat).Connect(said(), context))
    assert taken == []
    assert not fleet.connections.counted
