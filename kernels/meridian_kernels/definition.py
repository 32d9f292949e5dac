"""Defines the signals: their columns, and a slow and simple computation in float64 NumPy against which every other way
to compute them is tested.

The module knows nothing about devices or policy. All functions of the module are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from meridian_kernels import checks
from meridian_kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# Number of columns of RowSignals, and how many of them, the first ones, are floats.
COLUMNS, FLOATS = 6, 4


@dataclass(frozen=True, slots=True)
class RowSignals:
    """Signals of logits rows; every column has shape [rows], or [] for a single row. Logarithms are natural.

    entropy_nats: entropy of softmax(row), H = ln Z - sum(e^x * x) / Z with x shifted by the row maximum, float32.
    log_sum_exp_nats: log of the sum of e^logit, float32.
    top_logprob_nats: log-probability of the likeliest token, float32.
    end_logprob_nats: log-probability of the end token, of the likeliest if there are several, float32.
    top_token_id: id of the likeliest token, the lowest id if several are equally likely; -1 in a row that cannot be
    measured, int32.
    end_rank: 1 + number of logits strictly above the end token's; 0 in a row that cannot be measured, int32.

    A row that holds NaN or +inf, or nothing but -inf, cannot be measured: its float columns are NaN. Other rows are not
    affected.
    """

    entropy_nats: NDArray[np.float32]
    log_sum_exp_nats: NDArray[np.float32]
    top_logprob_nats: NDArray[np.float32]
    end_logprob_nats: NDArray[np.float32]
    top_token_id: NDArray[np.int32]
    end_rank: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.entropy_nats)

    def __getitem__(self, row: int) -> Self:
        """Return one row's signals. Raises IndexError past the last row."""
        return type(self)(**{name: column[row] for name, column in columns(self).items()})

    def __iter__(self) -> Iterator[Self]:
        return (self[row] for row in range(len(self)))


def of_columns(columns: NDArray[np.float32]) -> RowSignals:
    """Return the signals in an array [COLUMNS, rows] with the columns of RowSignals in their order; the memory of the
    integer columns holds int32."""
    return RowSignals(*columns[:FLOATS], *columns[FLOATS:].view(np.int32))


def columns(signals: RowSignals) -> dict[str, NDArray[Any]]:
    """Return the columns of the signals by name."""
    return {column.name: getattr(signals, column.name) for column in fields(signals)}


@dataclass(frozen=True, slots=True)
class EntropySignal(RowSignals):
    """Signals of rows that belong to requests. EAT is the entropy after the end-of-thinking marker (arXiv 2509.26522).

    eat: the request's newest EAT sample in nats, float64: the entropy of its newest row that comes after an appended
    end marker; NaN before the first sample. If the measured row comes after an end marker, `eat` equals
    `token_entropy`.
    eat_ema_variance: exponential moving variance V_n of the request's EAT samples x_0 ... x_n, in nats squared,
    float64; 0 after the first sample, NaN before the first sample. With a = ema_alpha: M_0 = x_0,
    M_n = a * x_n + (1 - a) * M_{n-1}; V_0 = 0, V_n = a * (x_n - M_n)^2 + (1 - a) * V_{n-1}.
    """

    eat: NDArray[np.float64]
    eat_ema_variance: NDArray[np.float64]

    @property
    def token_entropy(self) -> NDArray[np.float32]:
        """Entropy of softmax(row) in nats over the whole vocabulary; another name of `entropy_nats`."""
        return self.entropy_nats


def reference(
    logits: NDArray[np.floating],
    think_end_token_ids: int | Sequence[int],
    rows: Sequence[int] | NDArray[np.integer] | None = None,
) -> RowSignals:
    """Compute the signals by their definition, in float64, for a NumPy array [rows, vocabulary] of any float dtype.
    Raises KernelError."""
    if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
        raise KernelError(
            f"logits must be a NumPy array of floats; got {getattr(logits, 'dtype', type(logits).__name__)}"
        )
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise KernelError(f"logits must be [rows, vocabulary]; got shape {logits.shape}")
    ends = list(checks.end_tokens(think_end_token_ids, logits.shape[1]))
    x = np.asarray(logits if rows is None else logits[checks.row_numbers(rows, len(logits))], dtype=np.float64)
    numbers = np.arange(len(x))
    top = x.argmax(axis=1)
    end = x[:, ends].max(axis=1)
    with np.errstate(invalid="ignore"):
        shifted = x - x[numbers, top][:, None]
        weight = np.exp(shifted)
        total = weight.sum(axis=1)
        product = np.where(weight > 0, weight * np.where(np.isneginf(shifted), 0.0, shifted), weight)
        log_total = np.log(total)
        end_logprob = end - x[numbers, top] - log_total
    return RowSignals(
        (log_total - product.sum(axis=1) / total).astype(np.float32),
        (x[numbers, top] + log_total).astype(np.float32),
        (-log_total).astype(np.float32),
        end_logprob.astype(np.float32),
        np.where(np.isnan(total), -1, top).astype(np.int32),
        np.where(np.isnan(total), 0, 1 + (x > end[:, None]).sum(axis=1)).astype(np.int32),
    )
