"""The work of one engine that comes or goes does not grow with the number of the other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.handover_pool import HandoverPool
from tests.fakes.control import utc_now
from tests.unit.control.capabilities.handover.engines import hello
from tests.unit.control.fleet.test_in_turns import counting

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from meridian_control.fleet.connection import Connection


class Scanned(set["Connection"]):
    """A set that counts how often somebody goes through all of it."""

    scans = 0

    def __iter__(self) -> Iterator[Connection]:
        self.scans += 1
        return super().__iter__()


async def test_engines_come_and_go_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = counting(monkeypatch, HandoverPool, "changed")
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    fleet.connections = scanned = Scanned()
    old = [fleet.join(hello(f"engine-{n}", {})) for n in range(20)]
    new = [fleet.join(hello(f"engine-{n}", {})) for n in range(20)]
    assert set(new) == fleet.connections
    scanned.scans = 0
    for connection in old:
        fleet.leave(connection, "replaced")
    assert len(fleet.departed) == 0, "the newer streams are still there"
    for connection in new:
        fleet.leave(connection, "disconnected")
    assert len(fleet.departed) == 20
    assert (scanned.scans, shares) == (0, [])
