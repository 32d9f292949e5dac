"""Compares the measurements on a rollout's engines with the limits of its guardrails.

The module does not know the consequences of a violated limit. All functions are pure.
"""

from collections.abc import Callable, Iterator
from math import inf, nextafter

from meridian_control.common.histogram import TIME_BOUNDS_S
from meridian_control.common.inference import evidence
from meridian_control.rollout.plan import Guardrails
from meridian_control.rollout.state import Counts, GuardrailReading, Measured, Rollout, Sample

P99 = 0.99
# A guardrail on harm is violated at this evidence, which a candidate whose harm is within the limit reaches in a step
# with a probability of at most 1 %.
STRONG_EVIDENCE = 100.0
# Once so many requests were shortened in a step, it waits until so many requests of the control group are judged. With
# so many, harm of three answers in ten is found with a probability of 95 % at a limit of 0.01, of 90 % at 0.02.
MIN_SHORTENED, MIN_JUDGED = 30, 20


def judge(rollout: Rollout, sample: Sample) -> Iterator[GuardrailReading]:
    """Yield a reading for every guardrail that has a limit.

    If the other engines have too few observations in this step, a comparison adds their observations of earlier steps.
    A step without an engine of its own, and a comparison without engines to compare with, wait for no observations.
    """
    limits, mine, theirs = rollout.plan.guardrails, rollout.candidate, rollout.stable
    earlier = rollout.reference + theirs
    present = sample.candidate_engines > 0, sample.stable_engines > 0
    for name, observed in _OBSERVED.items():
        latency = name.endswith("_p99")
        value, count = observed(mine)
        other, others = observed(theirs)
        if others < max(1, limits.min_observations):
            other, others = observed(earlier)
        yield from _absolute(f"{name}_ms" if latency else name, limits, value, count, present[0])
        compared = None
        if value is not None and other is not None:
            compared = value / other if latency else value - other
        suffix = "ratio" if latency else "increase"
        yield from _compared(f"{name}_{suffix}", limits, compared, (count, others), present)
    if rollout.harm_limit is not None:
        yield _harm(mine, rollout.harm_limit, present[0])
    for name, engines in (("nacks", sample.nacks), ("degraded_engines", sample.degraded)):
        if (limit := getattr(limits, name)) is not None:
            yield GuardrailReading(
                guardrail=name, value=engines, limit=limit, observations=engines, violated=engines > limit
            )


def _harm(mine: Measured, limit: float, watched: bool) -> GuardrailReading:
    """Return the reading of harm, which is violated once the evidence is strong, however few requests are judged.

    Once the candidate has shortened requests, a step waits until enough of the control group are judged. It does not
    wait if most requests that would be harmed cannot be judged.
    """
    measured = mine.judged > 0 and mine.unjudged <= mine.judged_stops
    strong = measured and evidence(mine.harmful, mine.judged, limit) >= STRONG_EVIDENCE
    judgeable = mine.judged + mine.unjudged < MIN_JUDGED or measured
    return GuardrailReading(
        guardrail="harm_rate",
        value=mine.harmful / mine.judged if measured else None,
        limit=limit,
        observations=mine.judged,
        violated=strong,
        waiting=watched and judgeable and mine.shortened >= MIN_SHORTENED and mine.judged < MIN_JUDGED,
    )


def p99(counts: Counts) -> float | None:
    """Return the 99th percentile in seconds, interpolated within its bucket; the next number above the last bound if
    it exceeds that bound; None if there are no observations."""
    rank, below = P99 * sum(counts), 0
    if not rank:
        return None
    bounds = (0.0, *TIME_BOUNDS_S)
    for index, count in enumerate(counts[:-1]):
        if below + count >= rank:
            return bounds[index] + (bounds[index + 1] - bounds[index]) * (rank - below) / count
        below += count
    return nextafter(bounds[-1], inf)


def _absolute(
    name: str, limits: Guardrails, value: float | None, count: int, watched: bool
) -> Iterator[GuardrailReading]:
    if (limit := getattr(limits, name)) is not None:
        known = value is not None and count >= limits.min_observations
        yield GuardrailReading(
            guardrail=name,
            value=value,
            limit=limit,
            observations=count,
            violated=known and value is not None and value > limit,
            waiting=watched and count < limits.min_observations,
        )


def _compared(
    name: str, limits: Guardrails, value: float | None, counts: tuple[int, int], present: tuple[bool, bool]
) -> Iterator[GuardrailReading]:
    (count, other), (watched, comparable) = counts, present
    for reading in _absolute(name, limits, value, count, watched):
        short = other < limits.min_observations
        yield reading.model_copy(
            update={
                "stable_observations": other,
                "violated": reading.violated and not short,
                "waiting": (reading.waiting or (short and watched)) and (comparable or not short),
            }
        )


def _latency(counts: Counts) -> tuple[float | None, int]:
    value = p99(counts)
    return None if value is None else value * 1e3, sum(counts)


def _rate(part: int, whole: int) -> tuple[float | None, int]:
    return part / whole if whole else None, whole


# For each guardrail, the function that returns its value (latencies in milliseconds) and the number of observations.
_OBSERVED: dict[str, Callable[[Measured], tuple[float | None, int]]] = {
    "output_itl_p99": lambda m: _latency(m.output_itl),
    "ttot_p99": lambda m: _latency(m.ttot),
    "reentry_rate": lambda m: _rate(m.reentries, m.answers),
    "empty_answer_rate": lambda m: _rate(m.empty, m.answers),
}
