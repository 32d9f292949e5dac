"""Computes the signals EAT and RPDI from the measurements of the agent. Entropies are in nats.

EAT is the entropy after `</think>` (arXiv 2509.26522); rules read its moving mean and variance. RPDI is the reasoning
path deviation index (arXiv 2603.14251).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_control.engine.history import ratio_of_means

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable


def add_eat_samples(
    table: RequestTable,
    slots: NDArray[np.int64],
    eat_nats: NDArray[np.float64],
    ema_alpha: NDArray[np.float64] | float,
    think_tokens: NDArray[np.int64],
) -> None:
    """Add a sample x_n of each slot to its moving mean M and variance V of EAT.

    M_0 = x_0, M_n = a x_n + (1 - a) M_{n-1}; V_0 = 0, V_n = a (x_n - M_n)^2 + (1 - a) V_{n-1}. slots: different from
    each other, [samples]. ema_alpha: a, [samples] or one for all. think_tokens: thinking tokens at which the sample was
    measured, [samples]. The function ignores NaN and infinity, which are no measurements.
    """
    if np.count_nonzero(measured := np.isfinite(eat_nats)) < len(slots):
        slots, eat_nats, think_tokens = slots[measured], eat_nats[measured], think_tokens[measured]
        ema_alpha = np.broadcast_to(ema_alpha, measured.shape)[measured]
    newest, has_mean = np.zeros((len(slots), 3)), table.eat_count.take(slots) > 0
    mean = ema_alpha * eat_nats + (1 - ema_alpha) * table.eat_ema_nats.take(slots)
    variance = ema_alpha * (eat_nats - mean) ** 2 + (1 - ema_alpha) * table.eat_ema_variance.take(slots)
    newest[:, 0], newest[:, 1] = eat_nats, np.where(has_mean, mean, eat_nats)
    newest[has_mean, 2] = variance[has_mean]
    table.note_eat(slots, newest, think_tokens)


def rpdi(table: RequestTable) -> NDArray[np.float64]:
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
