"""The public API: signals of a batch of logits rows, as NumPy columns.

Runs on the caller's thread. Owns no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Logits are shifted by their row maximum and then clipped here: exp(-1e4) is exactly 0 in float32, so -inf entries and
# the tail contribute 0 to both sums, never NaN.
_FLOOR = -1e4
# Elements of one chunk, so that temporaries stay far below the size of the logits.
_CHUNK_ELEMENTS = 1 << 19


class KernelError(ValueError):
    """The input cannot be measured: wrong shape, wrong device, or an end token outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class EntropySignal:
    """Signals of `rows` logits rows; every column has shape [rows].

    entropy_nats: entropy of softmax(row), float32.
    end_rank: 1 + number of logits strictly above the end token's, int32.
    end_logprob_nats: log-probability of the end token, float32.
    A row that holds NaN, or nothing but -inf, gives NaN entropy and log-probability.
    """

    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.int32]
    end_logprob_nats: NDArray[np.float32]


class EntropyProbe:
    """Measures logits rows. `end_token_id` is the first token of the end-of-thinking marker."""

    def compute_batch(self, logits: torch.Tensor, end_token_id: int) -> EntropySignal:
        """Signals of logits [rows, vocabulary] (float32, bfloat16 or float16, any stride, on the CPU).

        H = ln Z - sum(e^x * x) / Z with x shifted by the row maximum. Raises KernelError.
        """
        rows, vocab = _check(logits, end_token_id)
        out = EntropySignal(np.empty(rows, np.float32), np.empty(rows, np.int32), np.empty(rows, np.float32))
        step = max(1, _CHUNK_ELEMENTS // vocab)
        for begin in range(0, rows, step):
            _measure(logits[begin : begin + step], end_token_id, out, begin)
        return out


def _check(logits: torch.Tensor, end_token_id: int) -> tuple[int, int]:
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise KernelError(f"logits must be [rows, vocabulary]; got shape {tuple(logits.shape)}")
    if logits.device.type != "cpu":
        raise KernelError(f"logits must be on the CPU; got {logits.device}")
    if not 0 <= end_token_id < logits.shape[1]:
        raise KernelError(f"end_token_id must be in [0, {logits.shape[1]}); got {end_token_id}")
    return logits.shape[0], logits.shape[1]


def _measure(chunk: torch.Tensor, end: int, out: EntropySignal, begin: int) -> None:
    x = chunk.float()
    at = slice(begin, begin + x.shape[0])
    out.end_rank[at] = (x > x[:, end : end + 1]).sum(dim=1).numpy() + 1
    x = x - x.amax(dim=1, keepdim=True)
    end_x = x[:, end].clone()
    weight = x.clamp_(min=_FLOOR).exp()
    total = weight.sum(dim=1)
    log_total = total.log()
    out.end_logprob_nats[at] = (end_x - log_total).numpy()
    out.entropy_nats[at] = (log_total - weight.mul_(x).sum(dim=1) / total).numpy()
