"""A pure model of the network's effect on packets: one Way for each direction. Time and randomness are passed in."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

# A packet that would wait longer than this for a slow line is dropped, as from a router's full queue.
QUEUE_S = 0.5
# A packet that is held back to be overtaken waits this multiple of its delay longer than others, and at least
# HELD_BACK_S.
HELD_BACK, HELD_BACK_S = 1.0, 0.01


@dataclass(frozen=True)
class Conditions:
    """Conditions of one direction.

    loss, reorder and duplicate are probabilities of each packet. jitter_ms is the most that is added to the delay; it
    changes no order. bytes_per_s is 0 for no limit. cut lets no packet through.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    bytes_per_s: float = 0.0
    cut: bool = False


FINE = Conditions()


class Way:
    """One direction of the network: takes packets when they are sent, and releases them when they arrive."""

    def __init__(self, rng: random.Random, conditions: Conditions = FINE) -> None:
        self.conditions = conditions
        self.counts: Counter[str] = Counter()
        self._rng = rng
        # Packets under way, ordered by arrival time and then by number.
        self._under_way: list[tuple[float, int, bytes]] = []
        self._number = 0
        # Time at which the line is free again, and arrival time of the newest packet that keeps its order.
        self._free_at = self._newest_at = 0.0

    def send(self, now_s: float, packet: bytes) -> None:
        """Take in a packet."""
        c, draw = self.conditions, self._rng.random
        if c.cut or draw() < c.loss:
            self.counts["cut" if c.cut else "lost"] += 1
            return
        sent_s = self._through_the_line(now_s, len(packet))
        if sent_s is None:
            self.counts["queue_full"] += 1
            return
        delay_s = (c.delay_ms + draw() * c.jitter_ms) / 1e3
        if draw() < c.reorder:
            self.counts["held_back"] += 1
            self._arrives(sent_s + delay_s + max(HELD_BACK * delay_s, HELD_BACK_S), packet)
        else:
            self._newest_at = max(self._newest_at, sent_s + delay_s)
            self._arrives(self._newest_at, packet)
        if draw() < c.duplicate:
            self.counts["duplicated"] += 1
            self._arrives(self._newest_at, packet)

    def _through_the_line(self, now_s: float, size: int) -> float | None:
        """Return when the packet's last byte has left, or None if the queue for the line is too long."""
        if not self.conditions.bytes_per_s:
            return now_s
        began_s = max(now_s, self._free_at)
        if began_s - now_s > QUEUE_S:
            return None
        self._free_at = began_s + size / self.conditions.bytes_per_s
        return self._free_at

    def _arrives(self, at_s: float, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._under_way, (at_s, self._number, packet))

    def change(self, conditions: Conditions, now_s: float) -> None:
        """Apply new conditions to packets sent from now on. A cut also drops the packets under way."""
        if conditions.cut:
            self.counts["cut"] += len(self._under_way)
            self._under_way.clear()
        self.conditions, self._free_at, self._newest_at = conditions, now_s, now_s

    def arrived(self, now_s: float) -> list[bytes]:
        """Return the packets that have arrived since the last call, in order of arrival."""
        found = []
        while self._under_way and self._under_way[0][0] <= now_s:
            found.append(heapq.heappop(self._under_way)[2])
        self.counts["arrived"] += len(found)
        return found

    def next_arrival_s(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None
