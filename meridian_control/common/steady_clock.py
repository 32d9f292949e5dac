"""Gives the time of day without the jumps of the machine's clock. The module owns no state beyond one clock's start."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Linux's monotonic clock stands still while the machine is suspended, and this clock does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SteadyClock:
    """Returns a time that starts at `began`, an aware time, and from then on advances as seconds pass.

    Durations and the order of events within a process come from such a clock, because the time of day may be set back
    or forward while the process runs. elapsed_s: returns seconds that only grow.
    """

    def __init__(self, began: datetime, elapsed_s: Callable[[], float] = lambda: time.clock_gettime(_CLOCK)) -> None:
        self._began, self._elapsed_s = began, elapsed_s
        self._began_s = elapsed_s()

    def __call__(self) -> datetime:
        return self._began + timedelta(seconds=self._elapsed_s() - self._began_s)
