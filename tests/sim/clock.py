"""Virtual time: a monotonic clock that moves only on command, a wall clock that can jump, and an event loop's timers.

The virtual time replaces the running event loop while the control plane's code runs that needs one; nothing ever waits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from meridian_control.policy.model import Policy
from meridian_control.policy.store import StoredRevision

EPOCH = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@dataclass(slots=True)
class Timer:
    call: Callable[..., object]
    args: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timeline:
    """The virtual time. `now_s` is monotonic; `jump_s` is the offset by which the wall clock was set forward or
    back."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.jump_s = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now_s

    # Functions of the module `time` that meridian_agent calls.
    monotonic = perf_counter = time

    def utc_now(self) -> datetime:
        return EPOCH + timedelta(seconds=self.now_s + self.jump_s)

    def call_at(self, when_s: float, call: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(call, args)
        heapq.heappush(self._timers, (when_s, next(self._numbers), timer))
        return timer

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> Timer:
        return self.call_at(self.now_s + delay_s, call, *args)

    def advance(self, seconds: float) -> None:
        """Move time on; timers run at their own times, in order."""
        until = self.now_s + seconds
        while self._timers and self._timers[0][0] <= until:
            when_s, _, timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, when_s)
            if not timer.cancelled:
                timer.call(*timer.args)
        self.now_s = until

    @contextmanager
    def running(self) -> Iterator[None]:
        """Act as the running event loop inside the block."""
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


def stored(revision: int, policy: Policy) -> StoredRevision:
    """Return a policy as the store would return it."""
    return StoredRevision(revision, f"etag-{revision}", "test", "", EPOCH, policy)
