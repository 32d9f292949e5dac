"""Lets episodes through in the order in which their requests began, so that those that are let through at any time are
of all lengths.

Requests that end first are the short ones. Where about as many run at once as a calibration reads, the first that end
say nothing of the long ones. So an episode waits until all recorded requests of its traffic that began before it on
this replica have ended. Whether a request is recorded must never depend on how long it runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from meridian_control.capabilities.self_calibration.episodes import LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from meridian_control.capabilities.self_calibration.episodes import Episode

# Most requests of a traffic that run or wait, and most bytes that the episodes of all could have. Further requests that
# begin are not recorded.
MAX_BEGUN, MAX_BYTES = 5_000, 64 << 20
# Time after which no episode waits for a request any more.
PATIENCE = timedelta(hours=1)


@dataclass(slots=True, eq=False)
class _Begun:
    """A recorded request that runs, or whose episode waits. owner, slot: a mark of who records it, and its slot there.
    traffic: at its beginning. found: what waits, as `InOrder` passes it on. is_over: whether it has ended, with or
    without an episode."""

    owner: object
    slot: int
    traffic: str
    time: datetime
    found: tuple[str, Episode | LeftOut] | None = None
    is_over: bool = False


class InOrder:
    """The recorded requests of all streams of a replica.

    found: takes the name of the traffic and an episode, or why a request has none. clock: the time.
    """

    def __init__(self, found: Callable[[str, Episode | LeftOut], None], clock: Callable[[], datetime]) -> None:
        self._found, self._clock = found, clock
        # By traffic, its requests in order of beginning; and by owner those that run, by slot.
        self._begun: dict[str, deque[_Begun]] = {}
        self._running: dict[object, dict[int, _Begun]] = {}
        # Number of requests in `_begun`, and bytes of the largest episode so far.
        self._count = self._largest = 0

    def begin(self, owner: object, slot: int, traffic: str) -> None:
        """Note that a request begins. A faulty agent may not have reported the end of the one before in its slot."""
        self.end(owner, slot, traffic, None)
        self._let_through(traffic)
        begun = self._begun.setdefault(traffic, deque())
        if len(begun) < MAX_BEGUN and (self._count + 1) * self._largest <= MAX_BYTES:
            request = _Begun(owner, slot, traffic, self._clock())
            self._running.setdefault(owner, {})[slot] = request
            begun.append(request)
            self._count += 1

    def end(self, owner: object, slot: int, traffic: str, result: Episode | LeftOut | None) -> None:
        """Take in what came of a request that ends, None if nothing did. Without `begin` it is not recorded."""
        if (request := self._running.get(owner, {}).pop(slot, None)) is None:
            return
        request.is_over = True
        if result is not None:
            request.found = traffic, result
        if result is not None and not isinstance(result, LeftOut):
            self._largest = max(self._largest, len(result.to_json()))
        self._let_through(request.traffic)

    def running(self, owner: object) -> list[int]:
        """Return the slots of an owner's recorded requests that run."""
        return [*self._running.get(owner, ())]

    def forget(self, owner: object, goes_on: Callable[[int], bool]) -> None:
        """Drop the requests of an owner that are not recorded any more, and all that began after the first of them,
        because those that have ended are the short ones. goes_on: whether a running request, by its slot, goes on."""
        running = self._running.get(owner, {})
        for traffic in {request.traffic for slot, request in running.items() if not goes_on(slot)}:
            is_broken = False
            for request in self._begun[traffic]:
                if request.owner is owner:
                    is_broken |= not (request.is_over or goes_on(request.slot))
                    if is_broken:
                        request.is_over, request.found = True, None
                        running.pop(request.slot, None)
            self._let_through(traffic)
        if not running:
            self._running.pop(owner, None)

    def _let_through(self, traffic: str) -> None:
        """Pass on the episodes that need not wait any more."""
        begun, oldest = self._begun.get(traffic, deque()), self._clock() - PATIENCE
        while begun and (begun[0].is_over or begun[0].time < oldest):
            request = begun.popleft()
            self._count -= 1
            if not request.is_over:
                del self._running[request.owner][request.slot]
            elif request.found is not None:
                self._found(*request.found)
        if not begun:
            self._begun.pop(traffic, None)
