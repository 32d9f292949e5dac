"""Logs each change of level of a pressure entry, with the numbers behind it, and restores the levels of engines without
requests, which send no reports."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.fleet.in_turns import in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import datetime

    from meridian_control.engine.session import Session
    from meridian_control.fleet.connection import Connection

logger = logging.getLogger(__name__)

# Seconds between two looks for engines without requests.
REST_S = 1.0


def log_changes(session: Session) -> None:
    """Log the changes of a session's levels since the last call."""
    for change in session.part(EnginePressure).take_unlogged():
        reading = change.reading
        why = (
            f"{reading.target} is {reading.measured:.4g}, limit {reading.limit:.4g}, {reading.samples} samples"
            if reading is not None
            else "nothing was measured"
        )
        levels = change.level_before, change.level, why, " (shadow)" * change.shadow
        logger.info("pressure %s on engine %s: level %d to %d, %s%s", change.name, session.hello.engine_id, *levels)


async def restore_idle(connections: Collection[Connection], clock: Callable[[], datetime]) -> None:
    """Restore the levels of engines without requests by the time that passes, until cancelled. connections: the fleet's
    own set."""
    while True:
        await _restore(list(connections), clock)
        await asyncio.sleep(REST_S)


async def _restore(connections: Sequence[Connection], clock: Callable[[], datetime]) -> None:
    """Restore the levels once. The function ends, so that no connection that leaves meanwhile is kept."""
    async for connection in in_turns(connections):
        if not connection.busy:
            connection.session.rest(clock())
        log_changes(connection.session)
