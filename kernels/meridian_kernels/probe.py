"""The public API: signals of logits rows, as NumPy columns, on the CPU or on a GPU.

Runs on the caller's thread; `Pending.result` may run on another.
"""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from meridian_kernels import cpu, cuda
from meridian_kernels.cpu import EntropySignal, KernelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

Backend = Literal["cpu", "cuda"]


class Pending(Protocol):
    """A measurement that was begun."""

    def result(self) -> EntropySignal:
        """The signals; waits for this measurement alone. Raises KernelError when read too late."""


class _Done:
    """What the CPU measured at once."""

    def __init__(self, signal: EntropySignal) -> None:
        self._signal = signal

    def result(self) -> EntropySignal:
        return self._signal


class EntropyProbe:
    """Measures logits rows.

    backend: "cuda" measures tensors on one GPU through CuPy. Where that cannot be had it warns once, is a "cpu" probe
    from then on (see `backend`), and copies logits that are on a GPU; with `strict` it raises KernelError instead.
    device: number of the GPU. max_rows: rows of a measurement there, for which memory is taken at once.
    """

    def __init__(
        self, backend: Backend = "cpu", *, strict: bool = False, device: int = 0, max_rows: int = 1024
    ) -> None:
        if backend not in ("cpu", "cuda"):
            raise KernelError(f"backend must be 'cpu' or 'cuda'; got {backend!r}")
        self.backend: Backend = backend
        self._copies = False
        self._kernels: cuda.Kernels | None = None
        if backend == "cuda":
            try:
                self._kernels = cuda.Kernels(device, max_rows)
            except Exception as error:  # CuPy raises what its many layers raise
                reason = f"no entropy on cuda:{device}: {type(error).__name__}: {error}"
                if strict:
                    raise KernelError(reason) from error
                warnings.warn(f"{reason}; measuring on the CPU", RuntimeWarning, stacklevel=2)
                self.backend, self._copies = "cpu", True

    def compute(self, logits: torch.Tensor, end_token_id: int | Sequence[int]) -> EntropySignal:
        """Signals of one row, logits [vocabulary], as columns of one entry. Raises KernelError."""
        if logits.ndim != 1:
            raise KernelError(f"logits must be [vocabulary]; got shape {tuple(logits.shape)}")
        return self.compute_batch(logits[None], end_token_id)

    def compute_batch(
        self,
        logits: torch.Tensor,
        end_token_id: int | Sequence[int],
        rows: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> EntropySignal:
        """Signals of logits [rows, vocabulary] (float32, bfloat16 or float16), of all rows or those named, in that
        order.

        H = ln Z - sum(e^x * x) / Z with x shifted by the row maximum. On the CPU any strides will do, on a GPU a row's
        logits lie side by side. end_token_id: first token of the end-of-thinking marker, or of up to four markers, of
        which the likeliest counts. Raises KernelError.
        """
        return self.begin(logits, end_token_id, rows).result()

    def begin(
        self,
        logits: torch.Tensor,
        end_token_id: int | Sequence[int],
        rows: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> Pending:
        """The same without waiting for a GPU. What torch does next on its current stream, also to these logits, comes
        after they were read. Raises KernelError."""
        ends, selected = _checked(logits, end_token_id, rows)
        if self._kernels is not None:
            if logits.device.type != "cuda":
                raise KernelError(f"logits must be on cuda:{self._kernels.device}; got {logits.device}")
            return self._kernels.begin(logits, ends, selected)
        if logits.device.type == "cuda" and self._copies:
            logits = logits.cpu()
        if logits.device.type != "cpu":
            raise KernelError(f"logits must be on the CPU; got {logits.device}")
        return _Done(cpu.measure(logits, ends, selected))


def _checked(
    logits: torch.Tensor, end_token_id: int | Sequence[int], rows: Sequence[int] | NDArray[np.int32] | None
) -> tuple[tuple[int, ...], NDArray[np.int32] | None]:
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise KernelError(f"logits must be [rows, vocabulary]; got shape {tuple(logits.shape)}")
    if str(logits.dtype).removeprefix("torch.") not in cuda.KERNELS:
        raise KernelError(f"logits must be {', '.join(cuda.KERNELS)}; got {logits.dtype}")
    count, vocab = logits.shape
    given = (end_token_id,) if isinstance(end_token_id, (int, np.integer)) else end_token_id
    # CuPy hands a NumPy number to the kernel in its own width, which is not that of the parameter.
    ends = tuple(map(operator.index, given))
    if not 1 <= len(ends) <= cuda.MAX_END_TOKENS:
        raise KernelError(f"there must be 1 to {cuda.MAX_END_TOKENS} end tokens; got {len(ends)}")
    for end in ends:
        if not 0 <= end < vocab:
            raise KernelError(f"end_token_id must be in [0, {vocab}); got {end}")
    if rows is None:
        return ends, None
    selected = np.asarray(rows, dtype=np.int32)
    if selected.ndim != 1:
        raise KernelError(f"rows must be a list of numbers; got shape {selected.shape}")
    listed = selected.tolist()
    if listed and not (min(listed) >= 0 and max(listed) < count):
        raise KernelError(f"rows must be in [0, {count}); got {min(listed)} to {max(listed)}")
    return ends, selected
