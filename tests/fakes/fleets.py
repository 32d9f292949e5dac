"""The views of a fleet in the test's process, without a turn of the event loop in between."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from meridian.v1 import fleet_pb2

from meridian_control.common.slices import at_once
from meridian_control.engine.totals import Totals
from meridian_control.fleet.fleet import Fleet

T = TypeVar("T")


def engines_of(fleet: Fleet) -> list[fleet_pb2.Engine]:
    """Return all engines, those that left included."""
    return _now(fleet.views.engines_in_turns())


def requests_of(fleet: Fleet, engine_id: str = "") -> list[fleet_pb2.LiveRequest]:
    """Return the live requests of one engine, or of all for an empty id."""
    return _now(fleet.views.requests_in_turns(engine_id))


def totals_of(fleet: Fleet) -> Totals:
    """Return the counters summed over all sessions."""
    return _now(fleet.totals())


def _now(work: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return at_once(work.__await__())
