"""Keeps the last hour of the fleet in memory, for the charts of the status page.

A point is taken every PERIOD_S seconds, whether or not somebody looks, from the engines of all replicas. The module
runs on the control plane's event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.common.decision_words import spelled
from meridian_control.common.histogram import Histogram
from meridian_control.page.contents import CONNECTED, ended

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from meridian.v1 import fleet_pb2
    from numpy.typing import NDArray

NATURAL = "natural"
PERIOD_S = 15.0
# Values of a point that need the point before.
RATES = (
    *("think_tokens_per_s", "answer_tokens_per_s", "natural_per_min", "forced_per_min"),
    *("agent_share", "ttot_p99_ms", "itl_p99_ms"),
)
# Points of one hour.
POINTS = 241


@dataclass
class _Sums:
    """Counters that were summed over all engines at a time, in seconds. buckets: counts of the histograms by name,
    [bounds + 1]; empty until an engine reports one."""

    time_s: float
    tokens: int = 0
    agent_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    bounds: dict[str, list[float]] = field(default_factory=dict)
    buckets: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, engine: fleet_pb2.Engine) -> None:
        self.tokens += engine.token_events
        self.agent_s += engine.counters.agent_seconds
        for name in ("ttot", "output_itl"):
            told = getattr(engine, name)
            if told.counts:
                self.bounds[name] = list(told.bounds)
                self.buckets[name] = self.buckets.get(name, 0) + np.array(told.counts, np.int64)

    @property
    def answer_tokens(self) -> int:
        """The answer tokens whose delay was measured: all but the first of a request that did not think."""
        return sum(int(counts.sum()) for counts in self.buckets.values())

    def p99_ms(self, name: str, before: _Sums) -> float | None:
        """Return the 99th percentile, in ms, of what was observed since; None without an observation, or if an engine's
        counters began again."""
        if name not in self.buckets:
            return None
        since = self.buckets[name] - before.buckets.get(name, 0)
        if (since < 0).any() or not since.any():
            return None
        seen = Histogram(self.bounds[name])
        seen.add_counts(since, 0.0)
        return 1e3 * seen.upper_quantile(0.99)


class History:
    """The points of the last hour, oldest first, each a dictionary for the page; a value that is not known is None."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._before: _Sums | None = None

    def note(
        self, engines: Iterable[fleet_pb2.Engine], revision: int, now: datetime, values: Mapping[str, float]
    ) -> None:
        """Add a point. revision: the policy revision in force. values: what capabilities add to the point."""
        listed = list(engines)
        up = [engine for engine in listed if engine.state == CONNECTED]
        sums, before = _Sums(now.timestamp(), ends=ended(listed)), self._before
        for engine in listed:
            sums.add(engine)
        self._before = sums
        point: dict[str, Any] = {
            "time": sums.time_s,
            "revision": revision,
            "frozen": sum(engine.freeze.confirmed for engine in up),
            "engines": len(up),
            "thinking": sum(engine.thinking for engine in up),
            "answering": sum(engine.answering for engine in up),
            **dict.fromkeys(RATES),
            "ends": {},
            **values,
        }
        # An engine that left with its counters would make negative rates.
        if before is not None and sums.time_s > before.time_s and sums.tokens >= before.tokens:
            seconds = sums.time_s - before.time_s
            # A new engine's histogram is added as a whole, as are its tokens.
            tokens, answer_tokens = sums.tokens - before.tokens, sums.answer_tokens - before.answer_tokens
            if 0 <= answer_tokens <= tokens:
                point["think_tokens_per_s"] = (tokens - answer_tokens) / seconds
                point["answer_tokens_per_s"] = answer_tokens / seconds
            if up and sums.agent_s >= before.agent_s:
                point["agent_share"] = (sums.agent_s - before.agent_s) / seconds / len(up)
            point["ttot_p99_ms"] = sums.p99_ms("ttot", before)
            point["itl_p99_ms"] = sums.p99_ms("output_itl", before)
            since = sums.ends - before.ends
            point["ends"] = {spelled(name): count for name, count in since.items()}
            point["natural_per_min"] = 60 * since[NATURAL] / seconds
            point["forced_per_min"] = 60 * (since.total() - since[NATURAL]) / seconds
        self.points.append(point)
