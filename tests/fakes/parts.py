"""Makers of the parts of a stream, of which a test gives some of its own."""

from __future__ import annotations

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.engine.part import PartMaker
from meridian_control.engine.session import Session
from meridian_control.fleet.fleet import Fleet


def parts(**own: PartMaker) -> list[PartMaker]:
    """Return the makers of all capabilities. own: makers by the capability's name, instead of the capability's own."""
    assert own.keys() <= {one.name for one in CAPABILITIES}
    made = [own.get(one.name, one.stream) for one in CAPABILITIES]
    return [make for make in made if make is not None]


def engine_view(session: Session) -> fleet_pb2.Engine:
    """Return the session's engine as a fleet with all capabilities shows it."""
    return Fleet(lambda: session.connected_at, capabilities=CAPABILITIES).engine_view(session, connected=True)
