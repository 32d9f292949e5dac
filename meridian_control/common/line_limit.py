"""Limits the rate of log lines of one kind, for lines that clients can cause as often as they like.

Lines are of one kind if they have one template, before its arguments are filled in. The filter runs on whatever thread
logs; the agent has a copy.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Lines of one kind that may come at once, and the seconds after which one more may come.
BURST, INTERVAL_S = 10, 10.0
# Largest number of kinds that are remembered; a further kind replaces the oldest.
KINDS = 256


class LineLimit(logging.Filter):
    """Lets BURST lines of a kind through, then one every INTERVAL_S seconds, which gives the number of lines that were
    left out before it. clock: returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By template: lines that may come now, the time of that number, and the lines left out since the last one.
        self._kinds: dict[str, tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), self._clock()
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        free, at, left_out = self._kinds.get(kind, (float(BURST), now, 0))
        free = min(float(BURST), free + (now - at) / INTERVAL_S)
        if free < 1:
            self._kinds[kind] = free, now, left_out + 1
            return False
        self._kinds[kind] = free - 1, now, 0
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} lines like this one were left out before it)"
            record.args = None
        elif free < 2:
            record.msg = f"{record.getMessage()} (from now on one such line every {INTERVAL_S:g} s)"
            record.args = None
        return True
