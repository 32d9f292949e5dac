"""Virtual time: a monotonic clock that moves when told to, a wall clock that can jump, and the timers of an event loop.

Stands in for the running event loop while code of the control plane is called that asks for it; nothing ever waits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from meridian_control.policy.store import StoredRevision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meridian_control.policy.model import Policy

EPOCH = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@dataclass(slots=True)
class Timer:
    call: Callable[..., object]
    args: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timeline:
    """`now_s` is monotonic; `jump_s` is what the wall clock has been set forward or back by."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.jump_s = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now_s

    # What meridian_agent calls on the module `time`.
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
        """Move on; timers run at their own times, in order."""
        until = self.now_s + seconds
        while self._timers and self._timers[0][0] <= until:
            when_s, _, timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, when_s)
            if not timer.cancelled:
                timer.call(*timer.args)
        self.now_s = until

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running event loop."""
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


def stored(revision: int, policy: Policy) -> StoredRevision:
    """A policy as the store would hand it out."""
    return StoredRevision(revision, f"etag-{revision}", policy, "test", "", EPOCH)
