"""Shares the event loop among streams whose messages take long: one slice of one stream in each round of the loop.

A round of the loop does everything else that is ready, so a short message of another stream waits for one slice at most
each time it is ready. The callers take turns, and so do the streams of one caller: whoever opens more streams gets no
larger share. All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque


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
        """Give one stream its turn, and let the loop go round before the next one."""
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
