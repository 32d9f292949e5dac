"""Reads a policy revision from the store for an engine, and waits while the store does not answer.

All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from meridian_control.common.errors import MeridianError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meridian_control.policy.store import StoredRevision

logger = logging.getLogger(__name__)

# Seconds between two attempts to read from the store.
RETRY_S = 1.0


async def read_stored(
    read: Callable[[int], Awaitable[StoredRevision]], revision: int, wanted: Callable[[], bool]
) -> StoredRevision | None:
    """Return a revision; None once it is no longer wanted, or if it cannot be read. `read` may raise MeridianError."""
    while wanted():
        try:
            return await read(revision)
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)
        except MeridianError as error:
            logger.warning("revision %d, which is in force on an engine, cannot be read: %s", revision, error)
            return None
    return None
