"""Turns the engines' counters into samples: the observations between two looks at the fleet.

The engines come as FleetService messages. The module does not know how its samples are used. Time is passed in. A
sampler runs on one event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from meridian.v1 import fleet_pb2

from meridian_control.common.histogram import TIME_BUCKETS, time_counts
from meridian_control.common.previous_look import PreviousLook
from meridian_control.rollout.state import Measured, Sample
from meridian_control.rollout.transitions import revision_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from numpy.typing import NDArray

    from meridian_control.rollout.state import Rollout

Engine: TypeAlias = fleet_pb2.Engine
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
# Counts of the control group, as `Engine.control_group` names them.
CONTROL_GROUP = ("shortened", "judged", "judged_stops", "harmful", "unjudged")
ANSWER_KINDS = ("answered_after_", "empty_after_", "long_after_")
# Seconds without a stream after which an engine counts as degraded, however long the lease is. The fleet forgets a lost
# engine after ten minutes.
LOST_S = 300.0


class Sampler:
    """Computes samples from counters, which grow from each engine's connection on, by subtracting the previous look."""

    def __init__(self) -> None:
        # Revision in force and counters of each connection.
        self._looks: PreviousLook[tuple[int, NDArray[np.int64]]] = PreviousLook()
        # Seconds since the stream of an engine of the group broke off.
        self._gone_s: dict[str, float] = {}

    def sample(
        self, engines: Iterable[Engine], rollout: Rollout, lease_s: float, now: datetime, elapsed_s: float
    ) -> Sample:
        """Return the sample of one look at the whole fleet. An engine without a stream for `lease_s`, at most
        LOST_S, is degraded.

        elapsed_s: seconds since the previous look.
        """
        listed = list(engines)
        connected = [engine for engine in listed if engine.state == CONNECTED]
        candidate = rollout.candidate_revision
        observed = {candidate: _nothing(), rollout.stable_revision: _nothing()}
        seen = [(engine, (_in_force(engine), _counters(engine))) for engine in connected]
        for engine, (in_force, counters) in seen:
            before = self._looks.of(engine, (in_force, _nothing()))
            # The counts of the time in which an engine changed its policy belong to neither.
            if in_force in observed and before is not None and before[0] == in_force:
                observed[in_force] += counters - before[1]
        self._looks.replace(seen, now)
        group = [engine for engine in listed if candidate in (engine.revision, engine.acked_revision)]
        # An engine that its environment freezes runs as stock vLLM as long as it lives. Nothing waits for it, unless
        # nobody else has the candidate.
        governed = [engine for engine in connected if not engine.HasField("freeze") or _thaws(engine)]
        comparable = [e for e in governed if e.acked_revision == rollout.stable_revision and not e.fault]
        applied = [engine for engine in governed if engine.acked_revision == candidate]
        frozen = [e for e in connected if e.acked_revision == candidate and e.HasField("freeze")]
        refused = [engine for engine in group if engine.nack_error]
        # A replica that does not know the rollout yet, or cannot read it, has not offered its engines the candidate.
        waiting = [e for e in connected if e.acked_revision != candidate and _wanted(e, rollout) == candidate]
        missing, late = self._gone(group, {engine.engine_id for engine in connected}, lease_s, elapsed_s)
        off = [engine for engine in group if engine.state == CONNECTED and engine.fault]
        return Sample(
            candidate=_measured(observed[candidate]),
            stable=_measured(observed[rollout.stable_revision]),
            candidate_engines=len(applied),
            other_engines=len(connected) - len(applied),
            stable_engines=len(comparable),
            # An agent that is off gets no settings.
            pending=len([engine for engine in waiting if not (engine.nack_error or engine.fault)]),
            missing=missing,
            frozen=len([e for e in frozen if _thaws(e)] if applied else frozen),
            nacks=len(refused),
            degraded=late + len(off),
        )

    def _gone(self, group: list[Engine], connected: set[str], lease_s: float, elapsed_s: float) -> tuple[int, int]:
        """Return the numbers of engines in the group whose stream broke off: less than the lease or LOST_S ago, and
        earlier. An engine that has shut down is neither."""
        gone = {engine.engine_id for engine in group if engine.lost} - connected
        self._gone_s = {engine_id: self._gone_s.get(engine_id, -elapsed_s) + elapsed_s for engine_id in gone}
        late = [seconds for seconds in self._gone_s.values() if seconds > min(lease_s, LOST_S)]
        return len(gone) - len(late), len(late)


def _wanted(engine: Engine, rollout: Rollout) -> int:
    """Return the revision that the engine should have, whether or not it was sent it."""
    return revision_of(rollout, engine.engine_id, engine.labels, engine.revision or engine.acked_revision)


def _in_force(engine: Engine) -> int:
    """Return the revision that the engine obeys, -1 while it is frozen and obeys none."""
    return -1 if engine.HasField("freeze") else engine.acked_revision


def _thaws(engine: Engine) -> bool:
    """Whether the freeze of a frozen engine will end, or has ended and the agent has not confirmed it yet."""
    return bool(engine.freeze.freeze_ids) or not engine.freeze.confirmed


def _counters(engine: Engine) -> NDArray[np.int64]:
    """Return an engine's counters in the order in which `_measured` reads them."""
    answers = engine.answers
    finished = sum(count for kind, count in answers.items() if kind.startswith(ANSWER_KINDS))
    empty = sum(count for kind, count in answers.items() if kind.startswith("empty_after_"))
    reentries = sum(count for kind, count in answers.items() if kind.startswith("reentry_after_"))
    judged = [engine.control_group.get(name, 0) for name in CONTROL_GROUP]
    times = time_counts(engine.output_itl), time_counts(engine.ttot)
    return np.concatenate((*times, np.array([finished, empty, reentries, *judged], np.int64)))


def _nothing() -> NDArray[np.int64]:
    return np.zeros(2 * TIME_BUCKETS + 3 + len(CONTROL_GROUP), np.int64)


def _measured(observed: NDArray[np.int64]) -> Measured:
    output_itl, ttot, (answers, empty, reentries, *judged) = np.split(observed, (TIME_BUCKETS, 2 * TIME_BUCKETS))
    return Measured(
        output_itl=tuple(output_itl.tolist()),
        ttot=tuple(ttot.tolist()),
        answers=int(answers),
        empty=int(empty),
        reentries=int(reentries),
        **dict(zip(CONTROL_GROUP, map(int, judged), strict=True)),
    )
