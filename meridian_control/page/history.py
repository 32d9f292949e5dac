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
from meridian_control.common.histogram import TIME_BUCKETS, time_counts, time_histogram
from meridian_control.common.previous_look import PreviousLook
from meridian_control.page.contents import CONNECTED, ended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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
class _Counted:
    """The counts of a replica, or of all. ttot, output_itl: observations, [TIME_BUCKETS]."""

    thinking_tokens: int = 0
    answer_tokens: int = 0
    ttot: NDArray[np.int64] = field(default_factory=lambda: np.zeros(TIME_BUCKETS, np.int64))
    output_itl: NDArray[np.int64] = field(default_factory=lambda: np.zeros(TIME_BUCKETS, np.int64))
    ends: Counter[str] = field(default_factory=Counter)

    @classmethod
    def on(cls, replica: fleet_pb2.Engine) -> _Counted:
        times = time_counts(replica.ttot), time_counts(replica.output_itl)
        return cls(replica.thinking_tokens, replica.answer_tokens, *times, ended([replica.ends]))

    def add(self, before: _Counted, after: _Counted) -> None:
        """Add what was counted between two looks."""
        self.thinking_tokens += after.thinking_tokens - before.thinking_tokens
        self.answer_tokens += after.answer_tokens - before.answer_tokens
        self.ttot += after.ttot - before.ttot
        self.output_itl += after.output_itl - before.output_itl
        self.ends += after.ends - before.ends

    def rates(self, seconds: float) -> dict[str, Any]:
        """Return the values of a point about so many seconds."""
        forced = self.ends.total() - self.ends[NATURAL]
        return {
            # A marker may take back more tokens than came since the look before.
            "think_tokens_per_s": max(0, self.thinking_tokens) / seconds,
            "answer_tokens_per_s": max(0, self.answer_tokens) / seconds,
            "ttot_p99_ms": _p99_ms(self.ttot),
            "itl_p99_ms": _p99_ms(self.output_itl),
            "ends": {spelled(name): count for name, count in self.ends.items()},
            "natural_per_min": 60 * self.ends[NATURAL] / seconds,
            "forced_per_min": 60 * forced / seconds,
        }


def _p99_ms(counts: NDArray[np.int64]) -> float | None:
    """Return the 99th percentile of observed times in ms, None without an observation."""
    if not counts.any():
        return None
    seen = time_histogram()
    seen.add_counts(counts, 0.0)
    return 1e3 * seen.upper_quantile(0.99)


class History:
    """The points of the last hour, oldest first, each a dictionary for the page; a value that is not known is None."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        # The newest look at what each replica has counted.
        self._looks: PreviousLook[_Counted] = PreviousLook()
        self._noted_at: datetime | None = None
        # Seconds that the agent of each engine and incarnation has spent since the engine started.
        self._agent_s: dict[tuple[str, str], float] = {}

    def note(
        self,
        engines: Sequence[fleet_pb2.Engine],
        sums: Sequence[fleet_pb2.Engine],
        revision: int,
        now: datetime,
        values: Mapping[str, float],
    ) -> None:
        """Add a point. sums: what all streams of each replica have counted since it began. revision: the policy
        revision in force. values: what capabilities add to the point."""
        up = [engine for engine in engines if engine.state == CONNECTED]
        grown, counted = _Counted(), [(replica, _Counted.on(replica)) for replica in sums]
        for replica, after in counted:
            if (before := self._looks.of(replica, _Counted())) is not None:
                grown.add(before, after)
        self._looks.replace(counted, now)
        # The value is 0 until the engine has reported counters.
        agent_s = {(e.engine_id, e.incarnation): e.counters.agent_seconds for e in up if e.counters.agent_seconds}
        spent_s = [spent - self._agent_s[key] for key, spent in agent_s.items() if key in self._agent_s]
        seconds = (now - self._noted_at).total_seconds() if self._noted_at is not None else 0.0
        self._agent_s, self._noted_at = agent_s, now
        point: dict[str, Any] = {
            "time": now.timestamp(),
            "revision": revision,
            "frozen": sum(engine.freeze.confirmed for engine in up),
            "engines": len(up),
            "thinking": sum(engine.thinking for engine in up),
            "answering": sum(engine.answering for engine in up),
            **dict.fromkeys(RATES),
            "ends": {},
            **values,
        }
        # The clock may be set back.
        if seconds > 0:
            # Replicas of 0.3.0 have no sums.
            if {engine.replica for engine in up} <= {replica.replica for replica in sums}:
                point |= grown.rates(seconds)
            if spent_s:
                point["agent_share"] = sum(spent_s) / seconds / len(spent_s)
        self.points.append(point)
