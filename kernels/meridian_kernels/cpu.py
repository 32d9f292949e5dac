"""Measures logits on the CPU, for engines without a GPU, with NumPy and, for many elements, with torch's threads.

The logits may be NumPy arrays or torch tensors. Importing this module neither imports torch nor touches a GPU.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_kernels.definition import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

# Logits are shifted by their row maximum and then clipped to at least this value. exp(-1e4) is exactly 0 in float32, so
# -inf entries and the tail contribute 0 to both sums, never NaN.
_FLOOR = -1e4
# Elements of one chunk; small enough that temporaries stay far below the size of the logits.
_CHUNK_ELEMENTS = 1 << 19
# Number of elements from which torch's threads save more time than the calls to torch cost.
_MANY_ELEMENTS = 1 << 16


def measure(
    logits: torch.Tensor | NDArray[Any], ends: Sequence[int], selected: NDArray[np.int32] | None
) -> NDArray[np.float32]:
    """Return the columns, as in `of_columns`, of logits [rows, vocabulary] in the CPU's memory, for the selected rows
    or, if `selected` is None, for all rows. The rows are measured in chunks."""
    count, vocab = logits.shape
    # With few elements, selecting rows takes longer than measuring all of them.
    all_of_few = selected is not None and len(selected) > 0 and count * vocab <= _MANY_ELEMENTS
    picked = None if all_of_few else selected
    if picked is not None:
        count = len(picked)
    columns = np.empty((COLUMNS, count), np.float32)
    floats, integers = columns[:4], columns[4:].view(np.int32)
    for at, rows in chunks(logits, picked):
        _measure(rows, list(ends), floats[:, at], integers[:, at])
    return columns[:, selected] if all_of_few else columns


def chunks(
    logits: torch.Tensor | NDArray[Any], picked: NDArray[np.int32] | None
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield the rows, or the picked rows, in float32 and in chunks, each with its place among them."""
    count, step = len(logits if picked is None else picked), max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for begin in range(0, count, step):
        at = slice(begin, begin + step)
        yield at, _rows(logits, at, picked)


def _rows(logits: torch.Tensor | NDArray[Any], at: slice, picked: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """Return a slice of the rows, or of the picked rows, in float32, one row after another, because NumPy
    adds the numbers of such rows in pairs and those of other rows one by one, which loses digits. The result shares the
    logits' memory if possible."""
    if isinstance(logits, np.ndarray):
        return np.ascontiguousarray(logits[at] if picked is None else logits[picked[at]], np.float32)
    import torch

    rows = logits[at] if picked is None else logits.index_select(0, torch.from_numpy(picked[at]))
    return np.ascontiguousarray(rows.detach().float().numpy())


def _measure(
    plain: NDArray[np.float32], ends: list[int], floats: NDArray[np.float32], integers: NDArray[np.int32]
) -> None:
    """Fill the columns of these rows. NumPy's calls cost less than torch's, so torch computes only what is large enough
    for its threads. The function makes few calls, because between two steps of a large model their code has left the
    CPU's caches, and then each call costs ten times what it computes."""
    top = np.maximum.reduce(plain, axis=1)
    if not math.isfinite(sum(top.tolist())):
        _leave_out(plain, np.isfinite(top), ends, floats, integers)
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
    plain: NDArray[np.float32],
    fit: NDArray[np.bool_],
    ends: list[int],
    floats: NDArray[np.float32],
    integers: NDArray[np.int32],
) -> None:
    """Measure the rows that can be measured and fill the columns of the others with NaN, -1 and 0. fit: for each
    row, whether it can be measured."""
    measured, counted = np.empty((4, fit.sum()), np.float32), np.empty((2, fit.sum()), np.int32)
    _measure(plain[fit], ends, measured, counted)
    floats[:], integers[0], integers[1] = np.nan, -1, 0
    floats[:, fit], integers[:, fit] = measured, counted


def _exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    torch = sys.modules.get("torch")
    if torch is None or x.size < _MANY_ELEMENTS:
        return np.exp(x)
    return torch.from_numpy(x).exp().numpy()  # type: ignore[no-any-return]
