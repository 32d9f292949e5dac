"""Counts by cause what callers do wrong, and tells it in the log in one line each, so many per host and cause.

Owns how often something is logged that a caller can bring about. Knows neither gRPC nor what the faults are. A flood of
nonsense fills neither the log nor memory: what is left out is told as a number, once in SUMMARY_S. Time is passed in;
belongs to the event loop of the gRPC server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from meridian_control.access.rate_limits import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Lines of one host and cause, per second in the long run and at once: of faults, and of engines that come and go. Of
# all hosts together.
FAULTS, CONNECTIONS, ALL = (0.1, 10), (1.0, 100), (5.0, 1000)
# Hosts and causes whose rates are remembered; beyond that the oldest is forgotten.
REMEMBERED = 1024
SUMMARY_S = 60.0
# Named in a summary, those with the most lines left out; the rest is a number.
NAMED = 5


class ClientFaults:
    """`clock` gives monotonic seconds. `counts` has every fault by its cause, whether it was logged or not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._rates: dict[tuple[str, str], Rate] = {}
        self._all = Rate(*ALL, clock())
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._summary: asyncio.TimerHandle | None = None

    def note(self, level: int, host: str, cause: str, text: str) -> None:
        """Count a fault of a caller on `host`, and log `text` at this level where it may be logged.

        `cause` is one of a few; it becomes a label of a metric.
        """
        self.counts[cause] += 1
        if logger.isEnabledFor(level) and self.may_log(host, cause):
            logger.log(level, "%s", text)

    def may_log(self, host: str, cause: str, rate: tuple[float, int] = FAULTS) -> bool:
        """Whether there is room for a line more; where there is none it is counted, and told of later as a number."""
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
        """Log how much was left out since this was done last, in one line."""
        if self._summary is not None:
            self._summary.cancel()
            self._summary = None
        if left_out := self._left_out:
            named = [f"{count} of {cause} by {host}" for (host, cause), count in left_out.most_common(NAMED)]
            rest = f", and {len(left_out) - NAMED} more hosts and causes" if len(left_out) > NAMED else ""
            logger.warning("%d lines about callers were left out: %s%s", left_out.total(), ", ".join(named), rest)
            left_out.clear()
