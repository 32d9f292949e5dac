"""Holds the records that wait to be sent on one stream, between the engine-core thread and gRPC's, which takes it out.

Waking a thread takes longer than all else the engine does for a report, so records are only laid down, and the other
thread is woken once the engine waits for its workers anyway. Owns the sleep of that thread and the wish to end it; how
much may wait is the link's business.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RecordQueue(Generic[T]):
    """A queue with one reader, who rests between two reports: what comes meanwhile goes into the next one."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Items for which the reader is to be woken; 0 while it is awake or rests.
        self._wanted = 0
        # Items that press, each count kept by one thread.
        self._laid_pressing = self._taken_pressing = 0

    def lay(self, item: T, presses: bool = False) -> None:
        """Add without waking the reader. presses: it is not to wait until there are more."""
        self._laid_pressing += presses
        self._items.append(item)

    @property
    def presses(self) -> bool:
        """Whether something is here that is not to wait until there are more."""
        return self._laid_pressing != self._taken_pressing

    def took(self, pressing: int) -> None:
        """So many of what the reader has taken out pressed."""
        self._taken_pressing += pressing

    def put(self, item: T) -> None:
        """Add what cannot wait."""
        self._items.append(item)
        self._wanted = 0
        self._bell.put(None)

    def wake(self) -> None:
        """Wake the reader if what it sleeps for has come, or there is something that presses; never waits."""
        if self._wanted and (self.presses or len(self._items) >= self._wanted):
            self._wanted = 0
            self._bell.put(None)

    def qsize(self) -> int:
        return len(self._items)

    def get_nowait(self) -> T:
        """Raises queue.Empty."""
        try:
            return self._items.popleft()
        except IndexError:
            raise queue.Empty from None

    def get(self, timeout: float, wanted: int = 1) -> T:
        """The first item once this many are there, or the time is up, in seconds. Raises queue.Empty."""
        self._wanted = wanted
        if len(self._items) < wanted and not (self._items and self.presses):
            self._sleep(timeout)
        self._wanted = 0
        return self.get_nowait()

    def rest(self, seconds: float) -> None:
        """Let records gather, unless something comes that cannot wait."""
        self._wanted = 0
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=seconds)
