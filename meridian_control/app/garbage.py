"""Decides when Python looks for garbage among the objects of the process.

Nearly all objects are freed without a look, as soon as nothing refers to them. By itself Python looks at the newest
objects whenever it has 700 more than before, and at each that stays once more. A look at the newest objects once a
second takes less, because at that time fewer of them are left, and each that stays is seen once. Python looks at all
objects whenever a quarter more have become old, which at a fleet's turnover of requests is every few seconds. Such a
full look stops the event loop, for about a second per million objects. So full looks are rare here.

The C library keeps the memory of freed objects, of which a large stream that ends leaves much. It is asked to give that
memory back to the system, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Seconds between two looks at the newest objects.
PAUSE_S = 1.0
# Largest share of the time that full looks take, and fewest seconds between two of them.
SHARE = 0.001
LEAST_PAUSE_S = 600.0
# Number of new objects at which Python looks at the newest objects by itself. A full core has a third of it in a
# second; only a flood of broken messages has more.
FLOOD = 50_000
# Number of looks at younger objects that would start a full one; Python never reaches this number.
NEVER = (1 << 31) - 1
# Generations of Python's collector: that of the newest objects and those that one look of Python's own has left; and
# all objects.
NEWEST, ALL = 1, 2


def _trim() -> None:
    """Give free memory back to the system, with a C library that can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def collect(
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    look: Callable[[int], object] = gc.collect,
    trims: Callable[[], bool] = lambda: False,
) -> None:
    """Look for garbage among the newest objects every PAUSE_S, and among all objects now and then. Runs until it is
    cancelled.

    clock: returns seconds. sleep: waits for a number of seconds. look: looks at a generation and at younger ones.
    trims: returns whether much memory has been freed since the last time.
    """
    # The objects of the start live until the end, so no look need include them again.
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(FLOOD, thresholds[1], NEVER)
    due_s = clock() + LEAST_PAUSE_S
    try:
        while True:
            await sleep(PAUSE_S)
            if trims():
                await asyncio.to_thread(_trim)
            if (began_s := clock()) < due_s:
                look(NEWEST)
                continue
            look(ALL)
            due_s = (ended_s := clock()) + max(LEAST_PAUSE_S, (ended_s - began_s) / SHARE)
    finally:
        gc.set_threshold(*thresholds)
