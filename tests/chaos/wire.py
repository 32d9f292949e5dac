"""A pure model of the network's effect on packets: one Way for each direction. Time and randomness are passed in."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass

# A packet that is held back to be overtaken waits its delay twice, and at least this much longer than others.
HELD_BACK_S = 0.01


@dataclass(frozen=True)
class Conditions:
    """Conditions of one direction.

    loss, reorder and duplicate are probabilities of each packet. jitter_ms is the most that is added to the delay; it
    changes no order. cut lets no packet through.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    cut: bool = False

    @property
    def fates(self) -> set[str]:
        """Return what happens to some packets, as `Way.counts` names it."""
        kinds = {"cut": self.cut, "lost": self.loss, "held_back": self.reorder, "duplicated": self.duplicate}
        return {name for name, happens in kinds.items() if happens}


FINE = Conditions()


class Way:
    """One direction of the network: takes packets when they are sent, and releases them when they arrive."""

    def __init__(self, rng: random.Random) -> None:
        self.conditions = FINE
        self.counts: Counter[str] = Counter()
        self._rng = rng
        # Packets under way, ordered by arrival time and then by number.
        self._under_way: list[tuple[float, int, bytes]] = []
        self._number = 0
        # Arrival time of the newest packet that keeps its order.
        self._newest_at = 0.0

    def send(self, now_s: float, packet: bytes) -> None:
        """Take in a packet."""
        c, draw = self.conditions, self._rng.random
        if c.cut or draw() < c.loss:
            self.counts["cut" if c.cut else "lost"] += 1
            return
        delay_s = (c.delay_ms + draw() * c.jitter_ms) / 1e3
        if draw() < c.reorder:
            self.counts["held_back"] += 1
            self._arrives(now_s + delay_s + max(delay_s, HELD_BACK_S), packet)
        else:
            self._newest_at = max(self._newest_at, now_s + delay_s)
            self._arrives(self._newest_at, packet)
        if draw() < c.duplicate:
            self.counts["duplicated"] += 1
            self._arrives(self._newest_at, packet)

    def _arrives(self, at_s: float, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._under_way, (at_s, self._number, packet))

    def change(self, conditions: Conditions, now_s: float) -> None:
        """Apply new conditions to packets sent from now on. A cut also drops the packets under way."""
        if conditions.cut:
            self.counts["cut"] += len(self._under_way)
            self._under_way.clear()
        self.conditions, self._newest_at = conditions, now_s

    def arrived(self, now_s: float) -> list[bytes]:
        """Return the packets that have arrived since the last call, in order of arrival."""
        found = []
        while self._under_way and self._under_way[0][0] <= now_s:
            found.append(heapq.heappop(self._under_way)[2])
        self.counts["arrived"] += len(found)
        return found

    def next_arrival_s(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None
