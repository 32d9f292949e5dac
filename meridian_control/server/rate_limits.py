"""Limits the calls of one caller and of all callers together, so that the reports of engines are served in time.

The module owns the rate of calls and the number of open calls. One event loop serves all calls, and a report may wait
for every admitted call to give the loop back; the number of open calls therefore has a limit for all callers together.
Engines' streams have a limit of their own. Time is passed in. The module belongs to the event loop of the gRPC server.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from meridian_control.common.errors import TooMany

if TYPE_CHECKING:
    from collections.abc import Callable

# Number of callers whose rates are kept; beyond it, the rates of callers without recent calls are dropped.
REMEMBERED = 1024
# Seconds after which a caller may retry a call that found all places taken.
RETRY_S = 1.0


class Kind(Enum):
    """The kinds of call that have separate limits: one response, a stream of responses, a stream that every caller may
    open, an engine's stream."""

    CALL = "calls"
    STREAM = "streams"
    OPEN_STREAM = "health watches"
    ENGINE = "engines"


@dataclass(frozen=True)
class CallLimits:
    """Limits on calls. `calls_per_s` and `burst` limit the rate at which one caller begins calls and streams. `calls`
    and `streams` limit one caller's open calls and streams, and `all_calls`, `all_streams` and `engines` those of all
    callers together. Health watches have the limits of streams, and places of their own. A caller is a principal, or a
    host if callers need not authenticate; a replica is a caller, too. `engines` limits the engines of all callers
    together, and `engines_of_caller` the streams of one caller, those without a Hello included.
    """

    calls_per_s: float = 200.0
    burst: int = 400
    calls: int = 16
    streams: int = 16
    all_calls: int = 32
    all_streams: int = 64
    engines: int = 4096
    engines_of_caller: int = 2048


class Limiter:
    """Admits calls within `limits`. `clock` returns monotonic seconds."""

    def __init__(self, limits: CallLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._rates: dict[str, Rate] = {}
        self._taken: Counter[tuple[Kind, str]] = Counter()

    def place(self, kind: Kind, who: str) -> ExitStack:
        """Take a place for a call of `who`; closing the returned ExitStack frees the place. Raises TooMany."""
        limits = self._limits
        if kind is Kind.ENGINE:
            # The stream takes a place of all callers together with `seat`.
            bounds = [(who, limits.engines_of_caller)]
        else:
            # Callers without credentials take no places of the others.
            single = kind is Kind.CALL
            per_caller, together = (limits.calls, limits.all_calls) if single else (limits.streams, limits.all_streams)
            bounds = [(who, per_caller), ("", together)]
            if wait_s := self._rate(who).wait_s(self._clock()):
                raise TooMany(f"more than {limits.calls_per_s:g} calls per second by one caller", wait_s)
        return self._take(kind, bounds)

    def seat(self) -> ExitStack:
        """Take a place among all engines, for a stream that has begun with a Hello. Raises TooMany."""
        return self._take(Kind.ENGINE, [("", self._limits.engines)])

    def _take(self, kind: Kind, bounds: list[tuple[str, int]]) -> ExitStack:
        for whose, bound in bounds:
            if self._taken[kind, whose] >= bound:
                raise TooMany(f"{bound} {kind.value} {'by one caller ' if whose else ''}are open", RETRY_S)
        place = ExitStack()
        for whose, _ in bounds:
            self._taken[kind, whose] += 1
            place.callback(self._free, kind, whose)
        return place

    def _free(self, kind: Kind, whose: str) -> None:
        self._taken[kind, whose] -= 1
        if not self._taken[kind, whose]:
            del self._taken[kind, whose]

    def _rate(self, who: str) -> Rate:
        if (rate := self._rates.get(who)) is None:
            if len(self._rates) >= REMEMBERED:
                now = self._clock()
                self._rates = {name: kept for name, kept in self._rates.items() if not kept.full(now)}
            rate = self._rates[who] = Rate(self._limits.calls_per_s, self._limits.burst, self._clock())
        return rate


class Rate:
    """A token bucket that gains `per_s` tokens per second and holds at most `burst` tokens."""

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at = float(burst), now

    def wait_s(self, now: float) -> float:
        """Take a token and return 0; without a token, return the seconds until the bucket has one."""
        self._tokens = self._at_hand(now)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._per_s
        self._tokens -= 1
        return 0.0

    def full(self, now: float) -> bool:
        return self._at_hand(now) >= self._burst

    def _at_hand(self, now: float) -> float:
        return min(self._burst, self._tokens + (now - self._at) * self._per_s)
