"""Decides the level of a pressure entry on one engine, window by window, from measured values and their targets, and
which requests it shortens first.

The level rises while a target is missed and falls once there is room. It changes at most every second window, because
the window in which a change takes effect measures both levels. Each target that is missed after the level has fallen
doubles the time for which there must be room before it falls again, so that load near a target, or load that comes and
goes, does not move the level back and forth. All code is pure; each object belongs to one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meridian_control.engine.shortening import UNSHORTENED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable

# Highest level: every request is in the last stage.
MAX_LEVEL = 6
# A window with fewer samples misses no target.
MIN_SAMPLES = 10
# There is room if no value exceeds this share of its limit. A value above FAR times its limit raises the level by two.
ROOM, FAR = 0.75, 2.0
# Number of windows with room after which the level falls by one: at first, and at most.
FIRST_HOLD, MAX_HOLD = 3, 48
# Number of windows with room at level 0 after which earlier misses are forgotten.
FORGET = 30


class Reading(NamedTuple):
    """The measured value of a target in a window, with its limit and the number of samples, as PressureReading in
    fleet.proto."""

    target: str
    measured: float
    limit: float
    samples: int

    @property
    def missed(self) -> bool:
        return self.samples >= MIN_SAMPLES and self.measured > self.limit

    @property
    def ratio(self) -> float:
        return self.measured / self.limit


@dataclass
class Controller:
    """The level of one pressure entry on one engine, from 0 to MAX_LEVEL.

    hold: windows with room after which the level falls. room: windows with room since the newest change or the newest
    window without room. settling: whether the level has changed in the window before. fell: whether the level has
    fallen since a target was missed.
    """

    level: int = 0
    hold: int = FIRST_HOLD
    room: int = 0
    settling: bool = False
    fell: bool = False

    def judge(self, readings: Sequence[Reading]) -> int:
        """Take in the readings of a window and return the level from now on. Without a reading there is room."""
        if self.settling:
            self.settling = False
            return self.level
        before, missed = self.level, [reading.ratio for reading in readings if reading.missed]
        if missed:
            self.hold = min(MAX_HOLD, 2 * self.hold) if self.fell else self.hold
            self.fell, self.room = False, 0
            self.level = min(MAX_LEVEL, self.level + (2 if max(missed) > FAR else 1))
        elif all(reading.measured <= ROOM * reading.limit for reading in readings if reading.samples):
            self.room += 1
            if self.level and self.room >= self.hold:
                self.level, self.room, self.fell = self.level - 1, 0, True
            elif not self.level and self.room >= FORGET:
                self.hold, self.fell = FIRST_HOLD, False
        else:
            self.room = 0
        self.settling = self.level != before
        return self.level


def stage_at(level: int, first: bool) -> int:
    """Return the stage of a request at a level. first: whether the request is among those that gain least from more
    thinking, which are shortened a level earlier than all others."""
    return UNSHORTENED + (level + first) // 2


def worst(readings: Sequence[Reading]) -> Reading | None:
    """Return the reading that is furthest above its limit, or nearest to it; None if nothing was measured.

    Readings with enough samples come first.
    """
    measured = (reading for reading in readings if reading.samples)
    return max(measured, key=lambda reading: (reading.samples >= MIN_SAMPLES, reading.ratio), default=None)


def least_gain_first(table: RequestTable, slots: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the slots, those first whose requests gain least from more thinking.

    A request with EAT samples is compared by their moving mean with the others that have some; of the rest, a request
    with a rank of the end marker at a sentence end is compared by the newest one, and any other by its thinking tokens.
    Low values gain least, and long thinking does. Values of different kinds are not comparable, so each request is
    placed by the share of its kind that gains less than it does; ties are broken by thinking tokens.
    """
    tokens = -table.think_tokens[slots].astype(np.float64)
    kinds = [
        (table.eat_count[slots] > 0, table.eat_ema_nats[slots]),
        (table.boundary_count[slots] > 0, table.boundary_ranks[slots, 0].astype(np.float64)),
        (np.ones(len(slots), bool), tokens),
    ]
    place, left = np.zeros(len(slots)), np.ones(len(slots), bool)
    for has, values in kinds:
        mine = (has & left).nonzero()[0]
        left[mine] = False
        order = mine[np.lexsort((tokens[mine], values[mine]))]
        place[order] = (np.arange(len(order)) + 0.5) / max(1, len(order))
    ordered: NDArray[np.intp] = slots[np.lexsort((tokens, place))]
    return ordered
