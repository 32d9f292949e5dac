"""Counts requests that began at about the same time together, and only once all of them have ended.

Requests that end first are the short ones. Soon after a change of the rules hardly any long one has ended, and long
ones save most. So a cohort counts once its requests and those of all earlier cohorts have ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

# Requests that begin within this time are of one cohort, so that few are kept.
LENGTH = timedelta(seconds=10)
# Time after which a cohort counts although requests of it still run, which then count when they close.
PATIENCE = timedelta(hours=1)


@dataclass(slots=True, eq=False)
class Cohort:
    """Requests that began within LENGTH. whole: the cohorts of the experiment. running: number of those that have not
    ended. counts: counts of those that have."""

    whole: Cohorts
    began: datetime
    running: int = 0
    counts: fleet_pb2.Savings = field(default_factory=fleet_pb2.Savings)

    def leave(self) -> None:
        """Note that a request has ended, and is counted in its cohort if it counts at all."""
        self.running -= 1
        if not self.running:
            self.whole.count_complete()


class Cohorts:
    """The cohorts of one experiment on a replica, oldest first.

    counts: the experiment's. add: adds a cohort's counts to them.
    """

    def __init__(self, counts: fleet_pb2.Savings, add: Callable[[fleet_pb2.Savings, fleet_pb2.Savings], None]) -> None:
        self._counts, self._add = counts, add
        self._waiting: deque[Cohort] = deque()

    @property
    def waiting(self) -> tuple[int, int]:
        """Numbers of closed requests that do not count yet: treated ones, and those of the control group."""
        counts = [cohort.counts for cohort in self._waiting]
        return sum(each.treated.requests for each in counts), sum(each.control.requests for each in counts)

    def join(self, now: datetime) -> Cohort:
        """Return the cohort of a request that begins now; `Cohort.leave` must follow."""
        self.count_complete(now - PATIENCE)
        # The wall clock may be set back.
        if not self._waiting or abs(now - self._waiting[-1].began) >= LENGTH:
            self._waiting.append(Cohort(self, now))
        cohort = self._waiting[-1]
        cohort.running += 1
        return cohort

    def count_complete(self, oldest: datetime | None = None) -> None:
        """Add the counts of the oldest cohorts, up to the first in which a request runs that began after `oldest`."""
        while self._waiting:
            cohort = self._waiting[0]
            if cohort.running and (oldest is None or cohort.began >= oldest):
                return
            self._waiting.popleft()
            self._add(self._counts, cohort.counts)
            cohort.counts = self._counts
