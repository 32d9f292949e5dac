"""Decides when Python looks for garbage among all objects of the process.

Such a full collection stops the event loop, for about a second per million objects. Python starts one whenever a
quarter more objects have become old, which at a fleet's turnover of requests is every few seconds. Nearly all objects
are freed without a collection, as soon as nothing refers to them, so full collections are rare here.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Largest share of the time that full collections take, and fewest seconds between two of them.
SHARE = 0.001
LEAST_PAUSE_S = 600.0
# Number of collections of younger objects that would start a full one; Python never reaches this number.
NEVER = (1 << 31) - 1


async def collect(
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    full: Callable[[], object] = gc.collect,
) -> None:
    """Collect garbage among all objects now and then, and leave only younger objects to Python itself. Runs
    until it is cancelled.

    clock: returns seconds. sleep: waits for a number of seconds. full: makes a full collection.
    """
    # The objects of the start live until the end, so no collection need look at them again.
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NEVER)
    took_s = 0.0
    try:
        while True:
            await sleep(max(LEAST_PAUSE_S, took_s / SHARE))
            began = clock()
            full()
            took_s = clock() - began
    finally:
        gc.set_threshold(*thresholds)
