"""Counts callers' faults by cause, and logs each fault in one line, with a limited rate of lines per host and cause.

The module owns the rate at which the log gets lines that a caller can cause. The module knows neither gRPC nor the
meaning of the faults. A flood of bad calls fills neither the log nor memory: one line every SUMMARY_S seconds gives the
number of lines left out. Time is passed in. The module belongs to the event loop of the gRPC server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from meridian_control.server.rate_limits import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Limits of log lines as (lines per second in the long run, lines in one burst). FAULTS and CONNECTIONS, for lines about
# engines that connect and disconnect, are limits per host and cause; ALL is the limit of all hosts together.
FAULTS, CONNECTIONS, ALL = (0.1, 10), (1.0, 100), (5.0, 1000)
# Largest number of pairs of host and cause whose rates are remembered; a further pair replaces the oldest.
REMEMBERED = 1024
SUMMARY_S = 60.0
# Number of pairs of host and cause that a summary names, beginning with the most lines left out.
NAMED = 5


class ClientFaults:
    """Counts and logs callers' faults. `counts` has the number of faults by cause, whether they were logged or not.
    `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._rates: dict[tuple[str, str], Rate] = {}
        self._all = Rate(*ALL, clock())
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._summary: asyncio.TimerHandle | None = None

    def note(self, level: int, host: str, cause: str, text: str) -> None:
        """Count a fault of a caller on `host`, and log `text` at `level` unless the rate of lines is exceeded.

        `cause` must come from a small fixed set, because it becomes a metric label.
        """
        self.counts[cause] += 1
        if logger.isEnabledFor(level) and self.may_log(host, cause):
            logger.log(level, "%s", text)

    def may_log(self, host: str, cause: str, rate: tuple[float, int] = FAULTS) -> bool:
        """Return whether a line may be logged now. A line that may not be logged is counted for the next summary."""
        key, now = (host, cause), self._clock()
        if key not in self._rates:
            if len(self._rates) >= REMEMBERED:
                del self._rates[next(iter(self._rates))]
            self._rates[key] = Rate(*rate, now)
        if not self._rates[key].wait_s(now) and not self._all.wait_s(now):
            return True
        known = key in self._left_out or len(self._left_out) < REMEMBERED
        self._left_out[key if known else ("others", cause)] += 1
        if self._summary is None:
            self._summary = asyncio.get_running_loop().call_later(SUMMARY_S, self.summarise)
        return False

    def summarise(self) -> None:
        """Log in one line how many lines were left out since the last summary."""
        if self._summary is not None:
            self._summary.cancel()
            self._summary = None
        if left_out := self._left_out:
            named = [f"{count} of {cause} by {host}" for (host, cause), count in left_out.most_common(NAMED)]
            rest = f", and {len(left_out) - NAMED} more hosts and causes" if len(left_out) > NAMED else ""
            logger.warning("%d lines about callers were left out: %s%s", left_out.total(), ", ".join(named), rest)
            left_out.clear()
