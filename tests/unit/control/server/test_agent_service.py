"""The stream of an engine that cannot begin, and engines whose streams broke off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.engine.part import Capability, Part, Stream
from meridian_control.fleet.fleet import Fleet
from meridian_control.server import agent_service
from meridian_control.server.agent_service import AgentService
from meridian_control.server.client_faults import ClientFaults
from tests.fakes.control import utc_now
from tests.unit.control.capabilities.handover.engines import hello


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


async def test_only_for_engines_that_are_not_back_here_all_replicas_are_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams break off in great numbers, and a list of all engines takes long."""
    monkeypatch.setattr(agent_service, "LOOK_S", 0.0)
    monkeypatch.setattr(agent_service, "BACK_S", 0.0)
    fleet, asked = Fleet(utc_now, capabilities=[]), 0

    async def engines() -> tuple[list[fleet_pb2.Engine], list[str]]:
        nonlocal asked
        asked += 1
        return [], []

    unused: Any = None
    service = AgentService(fleet, ClientFaults(), unused, engines, ExitStack)
    left = utc_now()
    for engine_id, incarnation in (("back", "1"), ("restarted", "2")):
        first = hello(engine_id)
        first.incarnation = incarnation
        fleet.join(first)
    for names in (("back", "restarted"), ("back", "gone")):
        service._broken_off = {(name, "1"): (left, "host") for name in names}
        await service._look_for_lost()
    assert asked == 1
    assert [message.partition(":")[0] for message in caplog.messages] == ["engine gone (1) is lost"]
