"""Reads the single steps out of the field `merged` of a report that merges several steps.

If an older agent leaves `merged` out, all rows get one time and all entries belong to the last step. The code does no
I/O and reads no clock.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.common.errors import BadReport
from meridian_control.engine.token_rows import differs, row_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian.v1 import agent_pb2
    from numpy.typing import NDArray

    from meridian_control.engine.token_rows import TokenRows

# Largest age of a step in a report; a report that waited for longer than a day is refused.
MAX_AGE_MS = 86_400_000
# Bound for the steps that a report merges; no correct agent merges as many.
MAX_STEPS = 1 << 12


def steps(report: agent_pb2.StepReport, rows: TokenRows) -> Iterable[tuple[int, int, float]]:
    """Return sequences with tokens, prompt tokens and milliseconds of each step for which the report gives all three.
    With draft tokens a sequence has several rows in a step. rows: those of the report."""
    merged = report.merged
    if sequences := merged.rows[:]:
        # Without drafts no step has more rows than the report has requests.
        if max(sequences) > len(rows.s):
            step = step_of_rows(report).take(rows.number)
            begins = differs(rows.slot) | differs(step)
            sequences = np.bincount(step[begins], minlength=report.steps).tolist()
        return zip(sequences, merged.prefill_tokens[:], merged.step_time_ms[:], strict=True)
    if report.steps == 1:
        return [(len(rows.s), report.prefill_tokens, report.step_time_ms)]
    return ()


def step_of(report: agent_pb2.StepReport, name: str, entries: int) -> list[int]:
    """Return the step in which each entry of a field came, [entries], counted from 0 within the report.

    If the agent does not say, the step is the last. name: of the field. Call `ages_ms` first, which checks the report.
    Raises BadReport if the counts per step do not add up to the entries of the field.
    """
    if not (counts := getattr(report.merged, name)[:]):
        return [max(report.steps, 1) - 1] * entries
    if len(counts) != report.steps or sum(counts) != entries:
        raise BadReport(
            f"merged.{name} must tell of {entries} entries in {report.steps} steps; got {sum(counts)} in {len(counts)}"
        )
    return list(chain.from_iterable(map(repeat, range(len(counts)), counts)))


def step_of_rows(report: agent_pb2.StepReport) -> NDArray[np.int64]:
    """Return the step in which each token row came, [rows], as `step_of` does. Call `ages_ms` first."""
    if not (counts := report.merged.rows[:]):
        return np.full(row_count(report.tokens), max(report.steps, 1) - 1)
    return np.arange(len(counts)).repeat(counts)


def ages_ms(report: agent_pb2.StepReport) -> NDArray[np.float64]:
    """Return for each token row how many milliseconds before the report's last step it came, [rows].

    Raises BadReport if the columns do not fit the report, if it merges too many steps, or if an age is out of range.
    """
    merged, rows = report.merged, row_count(report.tokens)
    if not report.HasField("merged"):
        return np.zeros(rows)
    if report.steps > MAX_STEPS:
        raise BadReport(f"a report must merge at most {MAX_STEPS} steps; got {report.steps}")
    row_counts, age_ms = merged.rows[:], merged.age_ms[:]
    lengths = [len(column) for column in (row_counts, merged.step_time_ms, merged.prefill_tokens, age_ms)]
    if lengths != [report.steps] * 4:
        raise BadReport(f"columns of merged steps must have one entry for each of {report.steps}; got {lengths}")
    if sum(row_counts) != rows:
        raise BadReport(f"merged steps must have all of the report's {rows} rows; got {sum(row_counts)}")
    if wrong := [age for age in age_ms if not 0 <= age <= MAX_AGE_MS]:
        raise BadReport(f"age_ms must be in [0, {MAX_AGE_MS}]; got {wrong[0]}")
    return np.array(age_ms, np.float64).repeat(row_counts)
