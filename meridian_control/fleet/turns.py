"""Shares the event loop between long work and everything else that is ready: a slice, or a short turn, in each round.

A short message of another stream therefore waits for one slice at most each time it is ready. The callers of streams
take turns, and so do the streams of one caller: whoever opens more streams gets no larger share. All code runs on the
server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from meridian_control.common.histogram import Histogram, time_histogram
from meridian_control.common.slices import SLICE_ROWS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable

    from meridian_control.common.slices import Sliced

T = TypeVar("T")
# Seconds of long work after which the event loop does what has become ready meanwhile; and the least share of the time
# that all long work gets together: a pause lasts long on a full core, and the next turns are then longer, too.
TURN_S, TURN_SHARE = 0.002, 0.1
# Engines that are sent a policy or freezes in one round of the event loop.
ENGINES_AT_ONCE = 16
# Seconds between two measurements of the event loop's delay.
PAUSE_S = 0.1


class Turns:
    """The streams that wait for their turn, by caller, in the order in which the callers are next."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_due = False

    async def next(self, who: str) -> None:
        """Wait for the next turn of a stream of the caller `who`. The turn lasts until the stream waits again."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        self._go_on()
        await turn

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        """Give one stream its turn, and let the event loop run other tasks before the next stream's turn."""
        self._is_due = False
        while self._waiting:
            who = next(iter(self._waiting))
            streams = self._waiting.pop(who)
            turn = streams.popleft()
            if streams:
                self._waiting[who] = streams
            if not turn.done():
                turn.set_result(None)
                break
        self._go_on()


class _Turn:
    """The time for which long work holds the event loop."""

    # Number of works that pause now. A pause holds the turns of all others, so they share what a long one adds, or each
    # round would be longer than the one before.
    pausing: ClassVar[int] = 0

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began, self._lasts_s = self._time(), TURN_S

    async def go_on(self) -> None:
        """Let the event loop do other work if the turn is over."""
        if (ended := self._time()) - self._began < self._lasts_s:
            return
        _Turn.pausing += 1
        others = _Turn.pausing
        try:
            await asyncio.sleep(0)
        finally:
            others = max(others, _Turn.pausing)
            _Turn.pausing -= 1
        self._began = self._time()
        self._lasts_s = max(TURN_S, TURN_SHARE * (self._began - ended) / others)


async def in_parts(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield lists of at most SLICE_ROWS items, which are made while the event loop does other work in between."""
    remaining, turn = iter(items), _Turn()
    while part := list(islice(remaining, SLICE_ROWS)):
        yield part
        await turn.go_on()


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield each item, and let the event loop do other work in between."""
    turn = _Turn()
    for item in items:
        yield item
        await turn.go_on()


async def with_pauses(work: Sliced[T]) -> T:
    """Do all of the work and return its result; let the event loop do other work in between, where the work pauses."""
    turn = _Turn()
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        await turn.go_on()


class Tasks:
    """Tasks that go on beside their callers, such as those that wait for the store. No task is cancelled, because a
    cancelled database driver leaks its connection."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def settle(self) -> None:
        """Wait for the tasks. Once all connections are gone, those that wait for the store end with its next answer."""
        await asyncio.gather(*self._running, return_exceptions=True)


class LoopDelay:
    """Measures in seconds how late the event loop gives work its turn: every stream's answers are at least as late."""

    def __init__(self) -> None:
        self.delays: Histogram = time_histogram()

    async def run(self) -> None:
        """Measure every PAUSE_S until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PAUSE_S
            await asyncio.sleep(PAUSE_S)
            self.delays.add_one(max(0.0, loop.time() - due_s))
