"""Estimate what probes take of decode time, from steps with more and with fewer of them. Pure.

Steps of one window differ little but for their probes, so the time of a probe token is the slope of a step's time over
its probe tokens: ordinary least squares with an intercept for each window, over the steps in which no request arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Step:
    """One engine step. seconds: decode time, so far without the worker's; prefill: whether a request arrived."""

    seconds: float
    probe_tokens: int
    prefill: bool

    def plus(self, seconds: float) -> Step:
        """Return the step with the worker's seconds added."""
        return replace(self, seconds=self.seconds + seconds)


@dataclass(frozen=True)
class Probes:
    """The time of probes in the windows of one batch size.

    decode_s: decode time of all steps. time_share: the probes' part of it; time_share_error: its standard error.
    """

    decode_s: float
    tokens_per_step: float
    us_per_token: float
    time_share: float
    time_share_error: float

    @property
    def seconds(self) -> float:
        return self.time_share * self.decode_s


def probe_cost(windows: Sequence[Sequence[Step]]) -> Probes:
    """Return what probes took in all steps of these windows. All figures are 0 if no step has a probe."""
    steps = [step for window in windows for step in window]
    decode_s, tokens = sum(step.seconds for step in steps), sum(step.probe_tokens for step in steps)
    x, y = (np.concatenate(columns) for columns in zip(*map(_centred, windows), strict=True))
    if not tokens or not (spread := float(x @ x)):
        return Probes(decode_s, tokens / len(steps), 0.0, 0.0, 0.0)
    slope_s = float(x @ y) / spread
    residual = y - slope_s * x
    error_s = float(np.sqrt(residual @ residual / max(1, len(x) - len(windows) - 1) / spread))
    share = tokens / decode_s
    return Probes(decode_s, tokens / len(steps), slope_s * 1e6, slope_s * share, error_s * share)


def _centred(window: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """Return probe tokens and seconds of the steps without arrivals, each less its mean in the window."""
    steps = [step for step in window if not step.prefill]
    x, y = np.array([step.probe_tokens for step in steps], float), np.array([step.seconds for step in steps])
    return x - x.mean(), y - y.mean()


def time_share(measured: Sequence[Probes]) -> float:
    """Return the probes' part of the decode time of all these windows together."""
    return sum(probes.seconds for probes in measured) / sum(probes.decode_s for probes in measured)
