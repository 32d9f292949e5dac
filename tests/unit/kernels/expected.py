"""Rows of logits of every kind, and the comparison of signals with the definition, for the tests of all backends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from meridian_kernels import RowSignals
    from numpy.typing import NDArray

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["random", "peaked", "flat", "tied", "masked", "equal"]
# Tolerance in nats; the logarithm of a float32 that is far from 0 has a larger rounding error.
NATS = 1e-5


def rows_of(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        x[:, vocab // 2] += 60.0
    elif kind == "flat":
        x *= 1e-3
    elif kind == "tied":
        x = torch.round(x)
    elif kind == "masked":
        x[torch.rand(rows, vocab, generator=generator) < 0.9] = -math.inf
        x[:, seed % vocab] = 1.0
    elif kind == "equal":
        x[:] = x[:, :1]
    return x


def margins(signals: RowSignals) -> NDArray[np.float64]:
    """Return the end marker's margins: by how much the likeliest token's log-probability exceeds the end marker's."""
    return signals.top_logprob_nats.astype(np.float64) - signals.end_logprob_nats


def compare(measured: RowSignals, wanted: RowSignals) -> None:
    for column in ("entropy_nats", "log_sum_exp_nats", "top_logprob_nats", "end_logprob_nats"):
        values = getattr(measured, column)
        np.testing.assert_allclose(values, getattr(wanted, column), rtol=1e-6, atol=NATS, err_msg=column)
        assert values.dtype == np.float32
    np.testing.assert_allclose(margins(measured), margins(wanted), rtol=1e-6, atol=NATS)
    np.testing.assert_array_equal(measured.top_token_id, wanted.top_token_id)
    np.testing.assert_array_equal(measured.end_rank, wanted.end_rank)
    assert measured.top_token_id.dtype == measured.end_rank.dtype == np.int32
