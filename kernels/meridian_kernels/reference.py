"""The definition of the signals, in float64 NumPy: slow, plain, and what every other path must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_kernels.probe import EntropySignal

if TYPE_CHECKING:
    from numpy.typing import NDArray


def compute_batch(logits: NDArray[np.floating], end_token_id: int) -> EntropySignal:
    """Signals of logits [rows, vocabulary]; see `EntropyProbe.compute_batch`."""
    x = np.asarray(logits, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        shifted = x - x.max(axis=1, keepdims=True)
    weight = np.exp(shifted)
    total = weight.sum(axis=1)
    product = np.where(weight > 0, weight * np.where(np.isneginf(shifted), 0.0, shifted), weight)
    log_total = np.log(total)
    return EntropySignal(
        (log_total - product.sum(axis=1) / total).astype(np.float32),
        (1 + (x > x[:, end_token_id : end_token_id + 1]).sum(axis=1)).astype(np.int32),
        (shifted[:, end_token_id] - log_total).astype(np.float32),
    )
