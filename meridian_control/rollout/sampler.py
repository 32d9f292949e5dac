"""Turns the engines' counters into samples: the observations between two looks at the fleet.

The engines come as FleetService messages. The module does not know how its samples are used. Time is passed in. A
sampler runs on one event loop.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from meridian.v1 import fleet_pb2

from meridian_control.common.histogram import TIME_BOUNDS_S
from meridian_control.rollout.state import Measured, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from meridian_control.rollout.state import Rollout

Engine: TypeAlias = fleet_pb2.Engine
Key = tuple[str, str]
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
BUCKETS = len(TIME_BOUNDS_S) + 1
# Counts of the control group, as `Engine.control_group` names them.
CONTROL_GROUP = ("shortened", "judged", "harmful", "unjudged")
ANSWER_KINDS = ("answered_after_", "empty_after_", "long_after_")


class Sampler:
    """Computes samples from counters, which grow from each engine's connection on, by subtracting the previous look."""

    def __init__(self) -> None:
        # Connection time, applied revision and counters of each engine and incarnation at the previous look.
        self._seen: dict[Key, tuple[datetime, int, NDArray[np.int64]]] = {}
        self._looked_at: datetime | None = None
        # Seconds without a stream of each engine of the group.
        self._gone_s: dict[str, float] = {}

    def sample(
        self, engines: Iterable[Engine], rollout: Rollout, lease_s: float, now: datetime, elapsed_s: float
    ) -> Sample:
        """Return the sample of one look at the whole fleet. An engine without a stream for `lease_s` is DEGRADED.

        elapsed_s: seconds since the previous look.
        """
        listed = list(engines)
        connected = [engine for engine in listed if engine.state == CONNECTED]
        candidate = rollout.candidate_revision
        observed = {candidate: _nothing(), rollout.stable_revision: _nothing()}
        seen = {}
        for engine in connected:
            key = (engine.engine_id, engine.incarnation)
            seen[key] = at = (engine.connect_time.ToDatetime(UTC), engine.acked_revision, _counters(engine))
            if engine.acked_revision in observed:
                observed[engine.acked_revision] += self._since(key, *at)
        group = [engine for engine in listed if candidate in (engine.revision, engine.acked_revision)]
        applied = [engine for engine in connected if engine.acked_revision == candidate]
        refused = [engine for engine in group if engine.nack_error]
        waiting = [engine for engine in group if engine.state == CONNECTED and engine.acked_revision != candidate]
        self._seen, self._looked_at = seen, now
        missing, late = self._gone(group, {engine.engine_id for engine in connected}, lease_s, elapsed_s)
        off = [engine for engine in group if engine.state == CONNECTED and engine.fault]
        return Sample(
            candidate=_measured(observed[candidate]),
            stable=_measured(observed[rollout.stable_revision]),
            candidate_engines=len(applied),
            other_engines=len(connected) - len(applied),
            # An agent that is off gets no settings.
            pending=len([engine for engine in waiting if not (engine.nack_error or engine.fault)]),
            missing=missing,
            nacks=len(refused),
            degraded=late + len(off),
        )

    def _since(self, key: Key, connected_at: datetime, acked: int, counters: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the observations since the previous look at the fleet.

        The result is empty at the first look, and if the engine changed its policy since the previous look.
        """
        before = self._seen.get(key)
        if before is not None and before[0] == connected_at:
            return counters - before[2] if before[1] == acked else _nothing()
        new = self._looked_at is not None and connected_at > self._looked_at
        return counters if new else _nothing()

    def _gone(self, group: list[Engine], connected: set[str], lease_s: float, elapsed_s: float) -> tuple[int, int]:
        """Return the numbers of engines in the group without a stream: for less than the lease, and for longer."""
        gone = {engine.engine_id for engine in group} - connected
        self._gone_s = {engine_id: self._gone_s.get(engine_id, -elapsed_s) + elapsed_s for engine_id in gone}
        late = [seconds for seconds in self._gone_s.values() if seconds > lease_s]
        return len(gone) - len(late), len(late)


def _counters(engine: Engine) -> NDArray[np.int64]:
    """Return an engine's counters in the order in which `_measured` reads them."""
    answers = engine.answers
    finished = sum(count for kind, count in answers.items() if kind.startswith(ANSWER_KINDS))
    empty = sum(count for kind, count in answers.items() if kind.startswith("empty_after_"))
    reentries = sum(count for kind, count in answers.items() if kind.startswith("reentry_after_"))
    judged = [engine.control_group.get(name, 0) for name in CONTROL_GROUP]
    counts = [*_buckets(engine.output_itl), *_buckets(engine.ttot), finished, empty, reentries, *judged]
    return np.array(counts, np.int64)


def _buckets(histogram: fleet_pb2.Histogram) -> Iterable[int]:
    """Return the histogram's counts, all zero if an engine of another version used other buckets."""
    return histogram.counts if len(histogram.counts) == BUCKETS else [0] * BUCKETS


def _nothing() -> NDArray[np.int64]:
    return np.zeros(2 * BUCKETS + 3 + len(CONTROL_GROUP), np.int64)


def _measured(observed: NDArray[np.int64]) -> Measured:
    output_itl, ttot, (answers, empty, reentries, *judged) = np.split(observed, (BUCKETS, 2 * BUCKETS))
    return Measured(
        output_itl=tuple(output_itl.tolist()),
        ttot=tuple(ttot.tolist()),
        answers=int(answers),
        empty=int(empty),
        reentries=int(reentries),
        **dict(zip(CONTROL_GROUP, map(int, judged), strict=True)),
    )
