"""The single steps of a report: one that merges several tells each in `merged`.

An agent that does not is taken at what it says of its last step, and at a time for all rows. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import agent_pb2
    from numpy.typing import NDArray

# A report that waits for longer than a day is none any more.
MAX_AGE_MS = 86_400_000
# More than any agent keeps until they are sent.
MAX_STEPS = 1 << 12

# Fields of columns, of which `slot` is one.
COLUMNAR = ("tokens", "probes")


def steps(report: agent_pb2.StepReport) -> Iterator[tuple[int, int, float]]:
    """Rows, prompt tokens and milliseconds of each step of which all three are known."""
    merged = report.merged
    if merged.rows:
        yield from zip(merged.rows, merged.prefill_tokens, merged.step_time_ms, strict=True)
    elif report.steps == 1:
        yield len(report.tokens.slot), report.prefill_tokens, report.step_time_ms


def step_of(report: agent_pb2.StepReport, name: str) -> NDArray[np.int64]:
    """The step in which each entry of a field came, [entries], counted from 0; the last where the agent does not tell.

    name: of the field. To be asked of a report whose `ages_ms` could be told.

    Raises ValueError when the column does not fit the report.
    """
    field = getattr(report, name)
    entries = len(field.slot if name in COLUMNAR else field)
    told = report.merged.rows if name == "tokens" else getattr(report.merged, name)
    if not told:
        return np.full(entries, max(report.steps, 1) - 1)
    if len(told) != report.steps or sum(told) != entries:
        raise ValueError(
            f"merged.{name} must tell of {entries} entries in {report.steps} steps; got {sum(told)} in {len(told)}"
        )
    return np.arange(report.steps).repeat(np.fromiter(told, np.int64, len(told)))


def ages_ms(report: agent_pb2.StepReport) -> NDArray[np.float64]:
    """How long before the report's last step each of its token rows came, [rows].

    Raises ValueError when the columns do not fit the report, for too many steps, and for an age out of range.
    """
    merged, rows = report.merged, len(report.tokens.slot)
    if not report.HasField("merged"):
        return np.zeros(rows)
    if report.steps > MAX_STEPS:
        raise ValueError(f"a report must merge at most {MAX_STEPS} steps; got {report.steps}")
    columns = merged.rows, merged.step_time_ms, merged.prefill_tokens, merged.age_ms
    if any(len(column) != report.steps for column in columns):
        lengths = [len(column) for column in columns]
        raise ValueError(f"columns of merged steps must have one entry for each of {report.steps}; got {lengths}")
    if (told := sum(merged.rows)) != rows:
        raise ValueError(f"merged steps must have all of the report's {rows} rows; got {told}")
    age_ms = np.fromiter(merged.age_ms, np.float64, len(merged.age_ms))
    if len(wrong := age_ms[~((age_ms >= 0) & (age_ms <= MAX_AGE_MS))]):
        raise ValueError(f"age_ms must be in [0, {MAX_AGE_MS}]; got {wrong[0]}")
    return np.repeat(age_ms, np.fromiter(merged.rows, np.int64, len(merged.rows)))
