"""Holds the records that wait to be sent on one stream: the engine-core thread adds them, gRPC's thread takes them out.

Waking a thread takes longer than everything else that the engine does for a report. So adding a record wakes nobody,
and the engine wakes gRPC's thread later, while it waits for its workers anyway. The module owns the sleep of gRPC's
thread; the outbox limits how many records may wait.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RecordQueue(Generic[T]):
    """A queue with one reader, who rests between two reports; records that arrive during a rest share the next
    report."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Number of items at which to wake the reader, 0 while it is awake or rests; and the number while no item is
        # due.
        self._wanted = self._patient = 0
        # Numbers of urgent and of due items added and taken out; each number is written by one thread only.
        self._laid_pressing = self._taken_pressing = 0
        self._laid_due = self._taken_due = 0
        # Whether the agent is to leave the stream; and whether it has, so that nothing more is to be added. The latter
        # is set on the engine's thread.
        self.leaves = self.left = False

    def lay(self, item: T, presses: bool = False, due: bool = False) -> None:
        """Add an item without waking the reader. presses: the item is urgent and does not wait for others. due: the
        item waits for few others even if the reader is patient."""
        self._laid_pressing += presses
        self._laid_due += due
        self._items.append(item)

    @property
    def presses(self) -> bool:
        """Whether an urgent item waits."""
        return self._laid_pressing != self._taken_pressing

    def took(self, pressing: int, due: int = 0) -> None:
        """Note that so many of the items that the reader took out were urgent, and so many due."""
        self._taken_pressing += pressing
        self._taken_due += due

    def put(self, item: T) -> None:
        """Add an item and wake the reader at once."""
        self._items.append(item)
        self.rouse()

    def rouse(self) -> None:
        """Wake the reader at once, whatever is there."""
        self._wanted = 0
        self._bell.put(None)

    def wake(self) -> None:
        """Wake the reader if enough items for it are there, or an urgent one. Never waits."""
        wanted = self._wanted
        if wanted and self.suffices(wanted, self._patient):
            self._wanted = 0
            self._bell.put(None)

    def suffices(self, wanted: int, patient: int) -> bool:
        """Return whether enough items for the reader are there, or an urgent one. wanted, patient: as `get` takes
        them."""
        return len(self._items) >= self._enough(wanted, patient) or self.presses

    def _enough(self, wanted: int, patient: int) -> int:
        return max(wanted, patient) if self._laid_due == self._taken_due else wanted

    def lacks(self) -> int:
        """Return the number of items without which the reader goes on sleeping; 0 while it is awake or rests, or an
        urgent item waits."""
        wanted = self._wanted
        return self._enough(wanted, self._patient) - len(self._items) if wanted and not self.presses else 0

    def qsize(self) -> int:
        return len(self._items)

    def get_nowait(self) -> T:
        """Raises queue.Empty."""
        try:
            return self._items.popleft()
        except IndexError:
            raise queue.Empty from None

    def get(self, timeout: float, wanted: int = 1, patient: int = 0) -> T:
        """Take out the oldest item, once `wanted` items or an urgent one are there or `timeout` seconds have passed.
        Raises queue.Empty if none is there. patient: number of items, if that is more, for which the reader waits while
        none is due."""
        self._patient = patient
        self._wanted = wanted
        if not (self._items and self.suffices(wanted, patient)):
            self._sleep(timeout)
        self._wanted = 0
        return self.get_nowait()

    def rest(self, seconds: float) -> None:
        """Sleep for this many seconds while records gather; `put` ends the sleep early."""
        self._wanted = 0
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=seconds)
