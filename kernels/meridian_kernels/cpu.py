"""What the signals are, and two ways to compute them on the CPU: for engines without a GPU, and in float64
NumPy, slow and plain, which is the definition that every other path is tested against.

Importing this touches neither torch nor a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

# Logits are shifted by their row maximum and then clipped here: exp(-1e4) is exactly 0 in float32, so -inf entries and
# the tail contribute 0 to both sums, never NaN.
_FLOOR = -1e4
# Elements of one chunk, so that temporaries stay far below the size of the logits.
_CHUNK_ELEMENTS = 1 << 19
# From so many on torch's threads are worth the calls.
_MANY_ELEMENTS = 1 << 16


class KernelError(ValueError):
    """The input cannot be measured, or not here: wrong shape, dtype or device, an end token outside the vocabulary, a
    GPU that cannot be used."""


@dataclass(frozen=True, slots=True)
class EntropySignal:
    """Signals of `rows` logits rows; every column has shape [rows]. Logarithms are natural.

    entropy_nats: entropy of softmax(row), float32.
    log_sum_exp_nats: log of the sum of e^logit, float32.
    top_logprob_nats: log-probability of the likeliest token, float32.
    end_logprob_nats: log-probability of the end token, of the likeliest if there are several, float32.
    top_token_id: the likeliest token, the first of equal ones; -1 in a row that cannot be measured. int32.
    end_rank: 1 + number of logits strictly above the end token's, int32.

    A row that holds NaN or +inf, or nothing but -inf, cannot be measured: its float columns are NaN, and its rank means
    nothing. Other rows are not affected.
    """

    entropy_nats: NDArray[np.float32]
    log_sum_exp_nats: NDArray[np.float32]
    top_logprob_nats: NDArray[np.float32]
    end_logprob_nats: NDArray[np.float32]
    top_token_id: NDArray[np.int32]
    end_rank: NDArray[np.int32]


def measure(logits: torch.Tensor, ends: Sequence[int], selected: NDArray[np.int32] | None) -> EntropySignal:
    """Signals of a tensor [rows, vocabulary] on the CPU, of the selected rows or all, a chunk of rows at a time."""
    # To pick some rows out of little takes longer than to measure all.
    all_of_few = selected is not None and len(selected) > 0 and logits.numel() <= _MANY_ELEMENTS
    picked = None if all_of_few else selected
    count, vocab = logits.shape[0] if picked is None else len(picked), logits.shape[1]
    floats, integers = np.empty((4, count), np.float32), np.empty((2, count), np.int32)
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for begin in range(0, count, step):
        at = slice(begin, begin + step)
        _measure(_rows(logits, at, picked), list(ends), floats[:, at], integers[:, at])
    if all_of_few:
        floats, integers = floats[:, selected], integers[:, selected]
    return EntropySignal(*floats, *integers)


def _rows(logits: torch.Tensor, at: slice, picked: NDArray[np.int32] | None) -> torch.Tensor:
    """Some of the rows, or of those that are picked, in float32."""
    import torch

    return (logits[at] if picked is None else logits.index_select(0, torch.from_numpy(picked[at]))).float()


def _measure(x: torch.Tensor, ends: list[int], floats: NDArray[np.float32], integers: NDArray[np.int32]) -> None:
    """NumPy, whose calls cost less, and torch on all its threads where there is much to compute. Few calls: between two
    steps of a large model their code has left the caches, and each costs ten times what it computes."""
    plain = x.numpy()
    top = np.maximum.reduce(plain, axis=1)
    if not math.isfinite(sum(top.tolist())):
        _leave_out(x, np.isfinite(top), ends, floats, integers)
        return
    end = plain[:, ends[0]] if len(ends) == 1 else plain[:, ends].max(axis=1)
    shifted = plain - top[:, None]
    np.maximum(shifted, _FLOOR, out=shifted)
    weight = _exp(shifted)
    total = np.add.reduce(weight, axis=1)
    log_total = np.log(total)
    np.multiply(weight, shifted, out=shifted)
    floats[0] = log_total - np.add.reduce(shifted, axis=1) / total
    floats[1] = top + log_total
    floats[2] = -log_total
    floats[3] = end - top - log_total
    integers[0] = plain.argmax(axis=1)
    np.add.reduce(plain > end[:, None], axis=1, out=integers[1])
    integers[1] += 1


def _leave_out(
    x: torch.Tensor, fit: NDArray[np.bool_], ends: list[int], floats: NDArray[np.float32], integers: NDArray[np.int32]
) -> None:
    """Measure the rows that can be."""
    measured, counted = np.empty((4, fit.sum()), np.float32), np.empty((2, fit.sum()), np.int32)
    _measure(x[fit], ends, measured, counted)
    floats[:], integers[:] = np.nan, -1
    floats[:, fit], integers[:, fit] = measured, counted


def _exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    if x.size < _MANY_ELEMENTS:
        return np.exp(x)
    import torch

    return torch.from_numpy(x).exp().numpy()  # type: ignore[no-any-return]


def reference(
    logits: NDArray[np.floating], end_token_ids: Sequence[int], selected: NDArray[np.int32] | None = None
) -> EntropySignal:
    """The definition, in float64."""
    x = np.asarray(logits if selected is None else logits[selected], dtype=np.float64)
    rows = np.arange(len(x))
    top = x.argmax(axis=1)
    end = x[:, list(end_token_ids)].max(axis=1)
    with np.errstate(invalid="ignore"):
        shifted = x - x[rows, top][:, None]
        weight = np.exp(shifted)
        total = weight.sum(axis=1)
        product = np.where(weight > 0, weight * np.where(np.isneginf(shifted), 0.0, shifted), weight)
        log_total = np.log(total)
        end_logprob = end - x[rows, top] - log_total
    return EntropySignal(
        (log_total - product.sum(axis=1) / total).astype(np.float32),
        (x[rows, top] + log_total).astype(np.float32),
        (-log_total).astype(np.float32),
        end_logprob.astype(np.float32),
        np.where(np.isnan(total), -1, top).astype(np.int32),
        (1 + (x > end[:, None]).sum(axis=1)).astype(np.int32),
    )
