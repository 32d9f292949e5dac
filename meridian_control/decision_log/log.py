"""The decision log of one replica: the lives of requests, and every decision about them with what its rule saw.

Owns what is kept and for how long. Knows neither rules nor gRPC. Sessions write to it through a `Journal` each.
Dispatch plans are not in it: they concern no single request, and under `deadline` there is one in nearly every step,
which would push out all else. Runs on the server's event loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from meridian_control.decision_log.records import LoggedDecision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from meridian_control.decision_log.records import Key, Life, LifeEvent

# Kept by a replica: events of all lives together, and decisions in the order in which they were made.
MAX_EVENTS, MAX_DECISIONS = 1 << 16, 1 << 15


class DecisionLog:
    """All lives and decisions of a replica. `settled` is called with each decision once its outcome is known, `ended`
    with each life at its end; neither may raise."""

    def __init__(
        self,
        settled: Callable[[LoggedDecision], None] | None = None,
        ended: Callable[[Life], None] | None = None,
        max_events: int = MAX_EVENTS,
        max_decisions: int = MAX_DECISIONS,
    ) -> None:
        self.settled, self.ended = settled, ended
        self.events = 0
        self._max_events = max_events
        # In the order in which they began, or were over; a request whose stream is lost counts as over.
        self._live: dict[Key, Life] = {}
        self._over: dict[Key, Life] = {}
        self._decisions: deque[LoggedDecision] = deque(maxlen=max_decisions)
        self._number = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def begin(self, life: Life) -> None:
        self._forget(self._over.pop(life.key, None))
        self._forget(self._live.pop(life.key, None))
        self._live[life.key] = life

    def over(self, life: Life) -> None:
        if self._live.get(life.key) is life:
            self._over[life.key] = self._live.pop(life.key)

    def back(self, key: Key) -> Life | None:
        """A life that goes on in another session, if it is known."""
        life = self._live.get(key)
        if life is None and (life := self._over.get(key)) is not None and life.close_time is None:
            self._live[key] = self._over.pop(key)
        return life if life is not None and life.close_time is None else None

    def add(self, life: Life, event: LifeEvent | LoggedDecision, among: deque[LifeEvent | LoggedDecision]) -> None:
        """Note an event; where there is no room, the oldest life that is over goes, else the oldest of all."""
        if self._live.get(life.key) is not life:
            return
        if len(among) == among.maxlen:
            life.left_out += 1
        else:
            self.events += 1
        among.append(event)
        if isinstance(event, LoggedDecision):
            self._decisions.append(event)
        while self.events > self._max_events:
            lives = self._over or self._live
            self._forget(lives.pop(next(iter(lives))))

    def _forget(self, life: Life | None) -> None:
        self.events -= len(life) if life is not None else 0

    def find(self, request_id: str, engine_id: str) -> Life | None:
        """The newest request of that id; of the client's part of it, where no whole id fits."""
        lives = [
            life
            for life in (*self._over.values(), *self._live.values())
            if engine_id in ("", life.engine_id) and life.is_called(request_id)
        ]
        exact = [life for life in lives if life.opened.request_id == request_id]
        return max(exact or lives, key=lambda life: life.open_time, default=None)

    def decisions(self, wanted: Callable[[LoggedDecision], bool], before: datetime | None) -> Iterator[LoggedDecision]:
        """Decisions, newest first; those made before a time."""
        return (d for d in reversed(self._decisions) if (before is None or d.time < before) and wanted(d))
