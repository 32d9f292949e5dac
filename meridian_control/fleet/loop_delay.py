"""Measures how late the event loop gives work its turn: every stream's answers are at least as late."""

from __future__ import annotations

import asyncio

from meridian_control.common.histogram import Histogram, time_histogram

# Seconds between two measurements.
PAUSE_S = 0.1


class LoopDelay:
    """The delays of the server's event loop, in seconds."""

    def __init__(self) -> None:
        self.delays: Histogram = time_histogram()

    async def run(self) -> None:
        """Measure every PAUSE_S until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PAUSE_S
            await asyncio.sleep(PAUSE_S)
            self.delays.add_one(max(0.0, loop.time() - due_s))
