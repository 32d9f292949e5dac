"""Logs each change of level of a pressure entry, with the numbers behind it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meridian_control.session.session import Session

logger = logging.getLogger(__name__)


def log_changes(session: Session) -> None:
    """Log the changes of a session's levels since the last call."""
    for change in session.pressure.take_unlogged():
        reading = change.reading
        why = (
            f"{reading.target} is {reading.measured:.4g}, limit {reading.limit:.4g}, {reading.samples} samples"
            if reading is not None
            else "nothing was measured"
        )
        levels = change.level_before, change.level, why, " (shadow)" * change.shadow
        logger.info("pressure %s on engine %s: level %d to %d, %s%s", change.name, session.hello.engine_id, *levels)
