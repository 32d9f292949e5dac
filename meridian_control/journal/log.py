"""The decision log of one replica: the lives of requests, and the decisions about them with the values their rules saw.

The module owns what the log keeps and for how long. The module knows neither rules nor gRPC. Each session writes to the
log through its `Journal`. The log holds no dispatch plans: a plan concerns no single request, and the strategy
`deadline` makes a plan in nearly every step, so that plans would displace all other entries. The module runs on the
server's event loop.
"""

from __future__ import annotations

import heapq
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from meridian_control.journal.records import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from meridian_control.journal.records import Circumstances, Key, Life, LifeEvent

# Largest number of newest events kept of one life, besides its begin and its end.
LIFE_EVENTS = 128
# Largest numbers of events of all lives together, without their ends, of probes, and of other decisions, that a replica
# keeps.
MAX_EVENTS, MAX_PROBES, MAX_DECISIONS = 1 << 15, 1 << 15, 1 << 15
# Bound for the bytes of probes and other decisions together, with the lives to which they refer.
MAX_DECISION_BYTES = 64 << 20


class DecisionLog:
    """All lives and decisions of a replica. `settled` is called with each decision once the outcome is known, and
    `ended` with each life at its end. Neither function may raise an exception."""

    def __init__(
        self,
        settled: Callable[[Decision], None] | None = None,
        ended: Callable[[Life], None] | None = None,
        max_events: int = MAX_EVENTS,
        max_decisions: int = MAX_DECISIONS,
        max_probes: int = MAX_PROBES,
        *,
        max_decision_bytes: int = MAX_DECISION_BYTES,
    ) -> None:
        self.settled, self.ended = settled, ended
        # The number of events of all lives, without ends and probes.
        self.events = 0
        self._max_events = max_events
        # Live requests in the order in which they began, and requests that are over in the order in which they ended. A
        # request whose stream is lost counts as over.
        self._live: dict[Key, Life] = {}
        self._over: dict[Key, Life] = {}
        # Probes, and all other decisions, oldest first, with the largest number of each; and their bytes.
        self._probes: deque[Decision] = deque()
        self._decisions: deque[Decision] = deque()
        self._max_probes, self._max_decisions, self._max_decision_bytes = max_probes, max_decisions, max_decision_bytes
        self.decision_bytes = 0
        self._number = 0

    def begin_life(self, life: Life) -> None:
        self._forget(self._over.pop(life.key, None))
        self._forget(self._live.pop(life.key, None))
        self._live[life.key] = life
        life.is_live = True
        self._count(life.weight)

    def end_life(self, life: Life) -> None:
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

    def next_number(self) -> int:
        """Return the next place in the order of the log, for an event or for decisions that are made at once."""
        self._number += 1
        return self._number

    def add_event(self, life: Life, event: LifeEvent | Decision) -> None:
        """Add an event to a life, which keeps its newest LIFE_EVENTS. A full log drops the life that ended first, or
        the oldest one if no life has ended."""
        if not life.is_live:
            return
        events = life.events
        events.append(event)
        if isinstance(event, Decision):
            event.holders += 1
        if len(events) > LIFE_EVENTS:
            life.left_out += 1
            _let_go(events.pop(0))
            return
        self._count(1)

    def add_probes(self, probes: Sequence[Decision], lives: Mapping[int | None, Life], under: Circumstances) -> None:
        """Add probes.

        lives: the lives by slot; requests without a life are not logged.
        """
        size = probes[0].size_under(under)
        for probe in probes:
            if (life := lives.get(probe.slot)) is not None:
                life.probes += 1
                self._keep(self._probes, probe, life, under, size)
        self._keep_bounds()

    def add_decision(self, decision: Decision, life: Life, under: Circumstances) -> None:
        """Add a decision other than a probe to the life of its request."""
        self._keep(self._decisions, decision, life, under, decision.size_under(under))
        self.add_event(life, decision)
        self._keep_bounds()

    def _keep(self, kept: deque[Decision], decision: Decision, life: Life, under: Circumstances, size: int) -> None:
        decision.life, decision.under = life, under
        # `settled` is called with each decision, also with one that the log has dropped before its outcome.
        decision.holders = 1 if self.settled is None else 2
        kept.append(decision)
        self.decision_bytes += size
        life.referring += 1
        if life.referring == 1:
            self.decision_bytes += life.held_bytes

    def _keep_bounds(self) -> None:
        while len(self._probes) > self._max_probes:
            self._drop(self._probes)
        while len(self._decisions) > self._max_decisions:
            self._drop(self._decisions)
        while self.decision_bytes > self._max_decision_bytes:
            both = [kept for kept in (self._probes, self._decisions) if kept]
            self._drop(min(both, key=lambda kept: kept[0].number))

    def _drop(self, kept: deque[Decision]) -> None:
        """Drop the oldest of these decisions."""
        decision = kept.popleft()
        self.decision_bytes -= decision.size_under(decision.under)
        decision.life.referring -= 1
        if not decision.life.referring:
            self.decision_bytes -= decision.life.held_bytes
        _let_go(decision)

    def _count(self, added: int) -> None:
        """Count events that were added, and keep the bound of the log."""
        self.events += added
        while self.events > self._max_events:
            lives = self._over or self._live
            self._forget(lives.pop(next(iter(lives))))

    def _forget(self, life: Life | None) -> None:
        if life is not None:
            self.events -= life.weight + len(life.events)
            life.is_live = False
            # A life and its decisions refer to each other, so that only the garbage collector would free them.
            for event in life.events:
                _let_go(event)
            life.events.clear()

    def lives(self) -> list[Life]:
        """Return all lives, those that are over first."""
        return [*self._over.values(), *self._live.values()]

    def find(self, request_id: str, engine_id: str) -> list[Life]:
        """Return the lives, newest first, of the requests with this id, or else of those to which their client gave
        this id."""
        lives = [life for life in self.lives() if engine_id in ("", life.engine_id) and life.is_called(request_id)]
        exact = [life for life in lives if life.opened.request_id == request_id]
        return sorted(exact or lives, key=lambda life: life.open_time, reverse=True)

    def decisions(self, kind: str = "") -> Iterator[Decision]:
        """Return the decisions of one kind, or all for an empty one, newest first. The log may change meanwhile: the
        decisions that it drops are left out, as are new ones."""
        if kind:
            kept = self._probes if kind == "probe" else self._decisions
            return _kept(decision for decision in list(reversed(kept)) if decision.kind == kind)
        both = (_kept(list(reversed(kept))) for kept in (self._probes, self._decisions))
        return _kept(heapq.merge(*both, key=attrgetter("number"), reverse=True))

    def events_of(self, life: Life) -> tuple[list[LifeEvent | Decision], int]:
        """Return the events and probes of a life in their order, and the number of those that the log has dropped."""
        probes = [probe for probe in self._probes if probe.life is life]
        events = sorted((*life.history(), *probes), key=attrgetter("number"))
        return events, life.left_out + life.probes - len(probes)


def _kept(decisions: Iterable[Decision]) -> Iterator[Decision]:
    return (decision for decision in decisions if decision.holders)


def _let_go(event: LifeEvent | Decision) -> None:
    """Note that one list of the log does not have an event any more.

    A decision that no list has lets go of its life and its circumstances, which take most of the memory: sessions hold
    their decisions until the outcome is known, in a large fleet many more than the log keeps.
    """
    if isinstance(event, Decision):
        event.holders -= 1
        if not event.holders:
            del event.life, event.under
