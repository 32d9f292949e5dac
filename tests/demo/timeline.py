"""Draw the timeline: a bar per request, thinking and answer apart, with forced ends and the change of policy marked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from meridian_control.common.look import ANSWERING_COLOUR, THINKING_COLOUR
from tests.demo.load import ACROSS

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from tests.demo.load import Sample
    from tests.demo.report import Findings

# The status page's colour for a policy revision.
REVISION_COLOUR = "#0b57d0"
ACROSS_ALPHA = 0.45
END_MARKS = {
    "eat": ("|", "#f0bd5a", "forced end: EAT"),
    "rpdi": ("|", "#ff8a80", "forced end: RPDI"),
    "hard_cap": ("x", "black", "forced end: hard cap"),
}
ROW_INCHES, MIN_INCHES, MAX_INCHES = 0.04, 5.0, 12.0


def draw(findings: Findings, path: Path) -> None:
    """Write the picture to `path`; its suffix gives the format."""
    samples = sorted((s for s in findings.samples if s.finished), key=lambda s: s.sent_s)
    height = min(MAX_INCHES, max(MIN_INCHES, 1.5 + ROW_INCHES * len(samples)))
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots()
    begin_s = min(sample.sent_s for sample in samples)
    _bars(axes, samples, begin_s)
    marked = _marks(axes, samples, findings, begin_s)
    axes.axvspan(findings.change.accepted_s - begin_s, findings.change.acked_s - begin_s, color=REVISION_COLOUR, lw=0)
    axes.axvline(findings.change.acked_s - begin_s, color=REVISION_COLOUR, lw=1.5)
    axes.set(
        title=f"Phases of {len(samples)} requests; revision {findings.change.revision} in force from the blue line on",
        xlabel="time since the first request (s)",
        ylabel="request, in the order sent",
        xlim=(0, None),
        ylim=(len(samples), -1),
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(handles=_legend(marked), loc="lower left", framealpha=0.95)
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, samples: list[Sample], begin_s: float) -> None:
    for row, sample in enumerate(samples):
        alpha = ACROSS_ALPHA if sample.period == ACROSS else 1.0
        if not math.isnan(sample.think_began_s):
            width = sample.think_ended_s - sample.think_began_s
            axes.barh(row, width, left=sample.think_began_s - begin_s, height=0.8, color=THINKING_COLOUR, alpha=alpha)
        if sample.answer_s:
            began_s = sample.answer_s[0] if math.isnan(sample.think_ended_s) else sample.think_ended_s
            width = sample.answer_s[-1] - began_s
            axes.barh(row, width, left=began_s - begin_s, height=0.8, color=ANSWERING_COLOUR, alpha=alpha)


def _marks(axes: Axes, samples: list[Sample], findings: Findings, begin_s: float) -> set[str]:
    """Mark the forced ends and return the set of their reasons."""
    marked = set()
    for row, sample in enumerate(samples):
        reason = findings.ends.get(sample.completion_id, "")
        if reason in END_MARKS and not math.isnan(sample.think_ended_s):
            marker, colour, _ = END_MARKS[reason]
            axes.plot(sample.think_ended_s - begin_s, row, marker, color=colour, ms=4, mew=1.2)
            marked.add(reason)
    return marked


def _legend(marked: set[str]) -> list[Patch | Line2D]:
    marks = [
        Line2D([], [], ls="", marker=marker, color=colour, ms=6, mew=1.4, label=label)
        for reason, (marker, colour, label) in END_MARKS.items()
        if reason in marked
    ]
    return [
        Patch(color=THINKING_COLOUR, label="thinking"),
        Patch(color=ANSWERING_COLOUR, label="answering"),
        *marks,
        Patch(color=THINKING_COLOUR, alpha=ACROSS_ALPHA, label="pale: between the two rounds"),
        Line2D([], [], color=REVISION_COLOUR, lw=1.5, label="policy accepted to acknowledged"),
    ]
