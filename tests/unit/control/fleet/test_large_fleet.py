"""The work of one engine that comes or goes does not grow with the number of the other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.capabilities.handover.fleet import FleetHandovers, HandoverPool
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.fleet.connection import Connections
from meridian_control.fleet.fleet import Fleet
from tests.fakes.control import utc_now
from tests.unit.control.capabilities.handover.engines import disagg, hello
from tests.unit.control.fleet.test_turns import counting

if TYPE_CHECKING:
    import pytest


async def test_engines_come_and_go_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = counting(monkeypatch, HandoverPool, "changed")
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    old = [fleet.join(hello(f"engine-{n}")) for n in range(20)]
    new = [fleet.join(hello(f"engine-{n}")) for n in range(20)]
    assert set(new) == fleet.connections
    for connection in new:
        (told,) = connection.session.on_policy(1, disagg())
        status = agent_pb2.SettingsStatus(nonce=told.settings.nonce, revision=1)
        connection.session.on_message(agent_pb2.ConnectRequest(settings_status=status), utc_now())
    fleet.part(FleetHandovers).share()
    scans = counting(monkeypatch, Connections, "__iter__")
    for connection in old:
        fleet.leave(connection, "replaced")
    assert len(fleet.departed) == 0, "the newer streams are still there"
    for connection in new:
        fleet.leave(connection, "disconnected")
    assert len(fleet.departed) == 20
    assert (len(scans), len(shares)) == (0, 1), "the one share is the one above"
