"""Signals derived from what the agent measured: EAT's moving mean and variance, and RPDI. Pure functions of the table.

Natural logarithms throughout (nats). Definitions: EAT arXiv 2509.26522, RPDI arXiv 2603.14251.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.decisions.moments import Moments
    from meridian_control.decisions.request_table import RequestTable


def add_eat_sample(table: RequestTable, slot: int, eat_nats: float, ema_alpha: float) -> None:
    """M_0 = x_0, M_n = a x_n + (1 - a) M_{n-1}; V_0 = 0, V_n = a (x_n - M_n)^2 + (1 - a) V_{n-1}.

    A sample that could not be measured (NaN) is left out.
    """
    if not math.isfinite(eat_nats):
        return
    mean, variance = eat_nats, 0.0
    if table.eat_count[slot]:
        mean = ema_alpha * eat_nats + (1 - ema_alpha) * table.eat_ema_nats[slot]
        variance = ema_alpha * (eat_nats - mean) ** 2 + (1 - ema_alpha) * table.eat_ema_variance[slot]
    table.note_eat(slot, eat_nats, mean, variance)


def rpdi(table: RequestTable | Moments) -> NDArray[np.float64]:
    """Mean entropy of the last W thinking tokens over that of all of them, [slots]; NaN before W."""
    width, count = table.window.shape[1], table.entropy_count
    known = table.live & (count >= width)
    if not known.any():
        return np.full(len(known), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (table.entropy_window_sum / width) / (table.entropy_sum / count)
    return np.where(known, ratio, np.nan)
