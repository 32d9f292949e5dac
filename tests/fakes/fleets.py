"""The views of a fleet in the test's process, without a turn of the event loop in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.slices import at_once

if TYPE_CHECKING:
    from meridian.v1 import fleet_pb2

    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.fleet import Fleet


def engines_of(fleet: Fleet) -> list[fleet_pb2.Engine]:
    """Return all engines, those that left included."""
    return at_once(fleet.views.engines_in_turns().__await__())


def requests_of(fleet: Fleet, engine_id: str = "") -> list[fleet_pb2.LiveRequest]:
    """Return the live requests of one engine, or of all for an empty id."""
    return at_once(fleet.views.requests_in_turns(engine_id).__await__())


def totals_of(fleet: Fleet) -> Totals:
    """Return the counters summed over all sessions."""
    return at_once(fleet.totals().__await__())
