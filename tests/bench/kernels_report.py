"""Render the findings of `make bench-kernels` in Markdown: shares of the copy bandwidth, ratios, aims. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tests.bench.kernels_arms import ALONE, EAGER, OURS

# The aims: share of the copy bandwidth, speed-up over eager torch, and the number of rows from which they apply.
AIM_SHARE, AIM_EAGER, AIM_ROWS = 0.9, 4.0, 128


@dataclass(frozen=True)
class Times:
    """Microseconds of repeated runs: median, and the tenth and ninetieth percentiles."""

    median_us: float
    low_us: float
    high_us: float

    @staticmethod
    def of(samples_us: list[float]) -> Times:
        low, median, high = np.percentile(samples_us, (10, 50, 90)).tolist()
        return Times(median, low, high)


@dataclass(frozen=True)
class Case:
    """One shape of logits.

    host_us: host time to queue a measurement. errors_nats: greatest difference of the entropy from the float64
    definition, by arm.
    """

    dtype: str
    vocab: int
    rows: int
    read_bytes: int
    times: dict[str, Times]
    host_us: float
    errors_nats: dict[str, float]

    def share(self, arm: str, copy_bytes_per_s: float) -> float:
        """Return an arm's bytes read per second, as a share of the bytes per second that a copy reads and writes."""
        return self.read_bytes / (self.times[arm].median_us * 1e-6) / copy_bytes_per_s

    def faster(self, other: str) -> float:
        return self.times[other].median_us / self.times[OURS].median_us

    def best_other(self) -> str:
        """Return the fastest arm that is not the agent's own."""
        return min(self.times.keys() - {OURS, ALONE}, key=lambda arm: self.times[arm].median_us)


@dataclass(frozen=True)
class Found:
    """The findings of one run.

    copy_bytes_per_s: bytes read plus bytes written by a large copy. missing: arms that were not run, with the reason.
    """

    gpu: str
    driver: str
    versions: dict[str, str]
    commit: str
    copy_bytes_per_s: float
    cases: list[Case]
    missing: dict[str, str]

    def aims(self) -> dict[str, str]:
        """Return for each aim the number of cases that meet it, of those to which it applies."""
        many = [c for c in self.cases if c.rows >= AIM_ROWS]

        def met(reached: list[bool]) -> str:
            return f"{sum(reached)} of {len(reached)}"

        return {
            f"{AIM_SHARE:.0%} of copy bandwidth": met(
                [c.share(OURS, self.copy_bytes_per_s) >= AIM_SHARE for c in many]
            ),
            f"{AIM_EAGER:g} times torch eager": met([c.faster(EAGER) >= AIM_EAGER for c in many]),
            "level with the best other (5 %)": met([c.faster(c.best_other()) >= 0.95 for c in many]),
        }

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "aims": self.aims()}


def markdown(found: Found) -> str:
    """Return the whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [
        "# Signals of logits rows on a GPU",
        "",
        f"{found.gpu}, driver {found.driver}, {versions}, commit {found.commit}. A copy of 1 GiB moves "
        f"{found.copy_bytes_per_s / 1e9:,.0f} GB/s, bytes read plus bytes written. Medians, L2 cold. Protocol: "
        "`tests/bench/kernels.py`.",
        "",
        f"From {AIM_ROWS} rows on: " + "; ".join(f"{aim} in {met}" for aim, met in found.aims().items()) + ".",
        "",
        *(f"Not run: {name} ({reason})." for name, reason in found.missing.items()),
    ]
    for dtype in dict.fromkeys(c.dtype for c in found.cases):
        lines += ["", f"## {dtype}", "", *_table([c for c in found.cases if c.dtype == dtype], found.copy_bytes_per_s)]
    return "\n".join(lines) + "\n"


def _table(cases: list[Case], copy_bytes_per_s: float) -> list[str]:
    arms = list(dict.fromkeys(arm for c in cases for arm in c.times))
    head = ["vocabulary", "rows", "GB/s", "of copy", "of copy, kernel alone", "x eager", "x best other", "host, us"]
    head += [f"{arm}, us" for arm in arms]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for c in cases:
        rate = c.read_bytes / c.times[OURS].median_us / 1e3
        cells = [
            f"{c.vocab}",
            f"{c.rows}",
            f"{rate:,.0f}",
            f"{c.share(OURS, copy_bytes_per_s):.0%}",
            f"{c.share(ALONE, copy_bytes_per_s):.0%}",
            f"{c.faster(EAGER):.1f}",
            f"{c.faster(c.best_other()):.2f} ({c.best_other()})",
            f"{c.host_us:.0f}",
            *(f"{c.times[arm].median_us:.1f}" if arm in c.times else "" for arm in arms),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
