"""Computes the signals EAT and RPDI from the measurements of the agent. Entropies are in nats.

EAT is the entropy after `</think>` (arXiv 2509.26522); rules read its moving mean and variance. RPDI is the reasoning
path deviation index (arXiv 2603.14251).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.decisions.history import ratio_of_means

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.decisions.moments import Moments
    from meridian_control.decisions.request_table import RequestTable


def add_eat_sample(table: RequestTable, slot: int, eat_nats: float, ema_alpha: float, think_tokens: int) -> None:
    """Add a sample x_n to the moving mean M and variance V of EAT. The function ignores NaN, an unmeasured sample.

    M_0 = x_0, M_n = a x_n + (1 - a) M_{n-1}; V_0 = 0, V_n = a (x_n - M_n)^2 + (1 - a) V_{n-1}. think_tokens: thinking
    tokens at which the sample was measured.
    """
    if not math.isfinite(eat_nats):
        return
    mean, variance = eat_nats, 0.0
    if table.eat_count[slot]:
        mean = ema_alpha * eat_nats + (1 - ema_alpha) * float(table.eat_ema_nats[slot])
        variance = ema_alpha * (eat_nats - mean) ** 2 + (1 - ema_alpha) * float(table.eat_ema_variance[slot])
    table.note_eat(slot, eat_nats, think_tokens, mean, variance)


def rpdi(table: RequestTable | Moments) -> NDArray[np.float64]:
    """Return the mean entropy of the last W thinking tokens divided by the mean entropy of all of them, [slots].

    The ratio is NaN while a request has fewer than W entropies.
    """
    width, count = table.window.shape[1], table.entropy_count
    known = table.live & (count >= width)
    if not known.any():
        return np.full(len(known), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = ratio_of_means(width, count, table.entropy_sum, table.entropy_window_sum)
    return np.where(known, ratio, np.nan)
