"""The decision log of one replica: the lives of requests, and the decisions about them with the values their rules saw.

The module owns what the log keeps and for how long. The module knows neither rules nor gRPC. Each session writes to the
log through its `Journal`. The log holds no dispatch plans: a plan concerns no single request, and the strategy
`deadline` makes a plan in nearly every step, so that plans would displace all other entries. The module runs on the
server's event loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from meridian_control.decision_log.records import LIFE_EVENTS, LIFE_PROBES
from meridian_control.decision_log.signal_rows import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from meridian_control.decision_log.records import Decision, Key, Life, LifeEvent
    from meridian_control.decisions.history import HeldMoments

# Largest numbers of events of all lives together, and of decisions, that a replica keeps.
MAX_EVENTS, MAX_DECISIONS = 1 << 16, 1 << 15
# Largest number of writes that wait. The code and the data that they need then stay in the processor's caches, and one
# operation on arrays serves the decisions of many reports; but a write that waits keeps its report.
MAX_WAITING = 64


class DecisionLog:
    """All lives and decisions of a replica. `settled` is called with each decision once the outcome is known, and
    `ended` with each life at its end. Neither function may raise an exception."""

    def __init__(
        self,
        settled: Callable[[Decision], None] | None = None,
        ended: Callable[[Life], None] | None = None,
        max_events: int = MAX_EVENTS,
        max_decisions: int = MAX_DECISIONS,
    ) -> None:
        self.settled, self.ended = settled, ended
        self._events = 0
        self._max_events = max_events
        # Live requests in the order in which they began, and requests that are over in the order in which they ended. A
        # request whose stream is lost counts as over.
        self._live: dict[Key, Life] = {}
        self._over: dict[Key, Life] = {}
        self._decisions: deque[Decision] = deque(maxlen=max_decisions)
        self._number = 0
        # Writes that wait, each with what it is told; the moments that they need, and while they are made, the rows of
        # these moments.
        self._waiting: list[tuple[Callable[[Any], None], Any]] = []
        self._held: list[HeldMoments] = []
        self.moment_rows: list[list[bytes]] = []

    @property
    def events(self) -> int:
        """The number of events of all lives."""
        self.catch_up()
        return self._events

    def queue(self, write: Callable[[Any], None], told: Any) -> None:
        """Call `write` with `told` before anybody reads the log, after all that was queued before."""
        self._waiting.append((write, told))
        if len(self._waiting) >= MAX_WAITING:
            self.catch_up()

    def queue_moments(self, held: HeldMoments) -> int:
        """Let the rows of moments be packed before the next writes, and return their number in `moment_rows`."""
        if not (self._held and self._held[-1] is held):
            self._held.append(held)
        return len(self._held) - 1

    def catch_up(self) -> None:
        """Make the writes that wait."""
        waiting, held = self._waiting, self._held
        self._waiting, self._held = [], []
        self.moment_rows = packed(held) if held else []
        for write, told in waiting:
            write(told)

    def begin(self, life: Life) -> None:
        self._forget(self._over.pop(life.key, None))
        self._forget(self._live.pop(life.key, None))
        self._live[life.key] = life
        life.is_live = True

    def over(self, life: Life) -> None:
        if life.is_live:
            self._over[life.key] = self._live.pop(life.key)
            life.is_live = False

    def back(self, key: Key) -> Life | None:
        """Return the life of a request that continues in another session, None if the life is unknown or closed."""
        life = self._live.get(key)
        if life is None and (life := self._over.get(key)) is not None and life.close_time is None:
            self._live[key] = self._over.pop(key)
            life.is_live = True
        return life if life is not None and life.close_time is None else None

    def add(self, life: Life, event: LifeEvent) -> None:
        """Add an event to a life. A full log drops the life that ended first, or the oldest if no life has ended."""
        if not life.is_live:
            return
        self._number += 1
        event.number = self._number
        life.events.append(event)
        self._count(life, life.events, LIFE_EVENTS)

    def add_decisions(self, decisions: list[Decision]) -> None:
        """Add decisions that were made at once to their lives, as `add` adds an event. All or none are probes."""
        self._number += 1
        probes = bool(decisions) and decisions[0].kind == "probe"
        most = LIFE_PROBES if probes else LIFE_EVENTS
        for made in decisions:
            if not (life := made.life).is_live:
                continue
            made.number = self._number
            self._decisions.append(made)
            among = life.probes if probes else life.events
            among.append(made)
            self._count(life, among, most)

    def _count(self, life: Life, among: list[LifeEvent | Decision], most: int) -> None:
        """Count an event that was added to a life, and keep the bounds of the life and of the log."""
        if len(among) > most:
            life.left_out += 1
            del among[0]
            return
        self._events += 1
        while self._events > self._max_events:
            lives = self._over or self._live
            self._forget(lives.pop(next(iter(lives))))

    def _forget(self, life: Life | None) -> None:
        if life is not None:
            self._events -= len(life)
            life.is_live = False
            # A life and its decisions refer to each other, so that only the garbage collector would free them.
            life.events.clear()
            life.probes.clear()

    def lives(self) -> list[Life]:
        """Return all lives, those that are over first."""
        self.catch_up()
        return [*self._over.values(), *self._live.values()]

    def find(self, request_id: str, engine_id: str) -> Life | None:
        """Return the newest life whose request has this id, or whose request has it as the client's part of its id."""
        lives = [life for life in self.lives() if engine_id in ("", life.engine_id) and life.is_called(request_id)]
        exact = [life for life in lives if life.opened.request_id == request_id]
        return max(exact or lives, key=lambda life: life.open_time, default=None)

    def decisions(self, wanted: Callable[[Decision], bool], before: datetime | None) -> Iterator[Decision]:
        """Return the wanted decisions, newest first, and only those made before `before` if it is given."""
        self.catch_up()
        return (d for d in reversed(self._decisions) if (before is None or d.time < before) and wanted(d))
