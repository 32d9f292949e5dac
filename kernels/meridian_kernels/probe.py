"""The public API: signals of logits rows, as NumPy columns, on the CPU or on a GPU; of a request's rows, with its EAT.

Runs on the caller's thread; `Pending.result` may run on another.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from meridian_kernels import checks, cpu, cuda, torch_ops
from meridian_kernels.definition import EntropySignal, columns
from meridian_kernels.eat import EatHistory
from meridian_kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_kernels.definition import RowSignals

Backend = Literal["cpu", "cuda"]


class Pending(Protocol):
    """A measurement that was begun."""

    def result(self) -> RowSignals:
        """The signals; waits for this measurement alone. Raises KernelError when read too late."""


class _Done:
    """A result that the CPU measured at once."""

    def __init__(self, signals: RowSignals) -> None:
        self._signals = signals

    def result(self) -> RowSignals:
        return self._signals


class EntropyProbe:
    """Measures logits: `compute` and `compute_batch` the rows of requests, whose EAT they follow from call to call;
    `begin` rows of any origin, without waiting for a GPU.

    think_end_token_ids: the first token of the end-of-thinking marker, or of up to four different markers, of which the
    likeliest counts; not the tokens of one marker. May be left out where every `begin` names its own.
    backend: "cuda" measures on one GPU with a CUDA kernel, through CuPy. Where that cannot be had the probe warns, and
    measures with torch's operations on the GPU, which is slower, or without a usable GPU on the CPU.
    ema_alpha: weight of the newest EAT sample, in (0, 1].
    strict: raise KernelError rather than measure a single row on the CPU; only for "cuda".
    device: number of the GPU. max_rows: rows of a measurement there, for which memory is taken at once.

    Logits are NumPy, torch or CuPy arrays (or others with `__cuda_array_interface__`) of float32, bfloat16 or float16;
    float64 is rounded to float32.
    A "cpu" probe takes none that lie on a GPU, unless it was to be a "cuda" one: then it copies them. A "cuda" probe
    measures what is in the CPU's memory on the CPU, unless it is strict.

    Every argument that is wrong raises KernelError, which names it; nothing was measured or remembered then. A probe
    belongs to one thread.
    """

    def __init__(
        self,
        think_end_token_ids: int | Sequence[int] | NDArray[np.integer] | None = None,
        backend: Backend = "cpu",
        ema_alpha: float = 0.2,
        *,
        strict: bool = False,
        device: int = 0,
        max_rows: int = 1024,
    ) -> None:
        self._ends = None if think_end_token_ids is None else checks.end_tokens(think_end_token_ids)
        if not isinstance(backend, str) or backend not in ("cpu", "cuda"):
            raise KernelError(f"backend must be 'cpu' or 'cuda'; got {backend!r}")
        self._eat = EatHistory(checks.fraction("ema_alpha", ema_alpha))
        self._strict = checks.flag("strict", strict) and backend == "cuda"
        device, max_rows = checks.whole("device", device, 0), checks.whole("max_rows", max_rows, 1)
        self._wants_gpu = backend == "cuda"
        self._gpu: cuda.Kernels | torch_ops.TorchOps | None = None
        # Why it does not measure as it was asked to; empty when it does.
        self.fallback = ""
        if self._wants_gpu:
            self._gpu = self._on_gpu(device, max_rows)
        if self.fallback:
            warnings.warn(self.fallback, RuntimeWarning, stacklevel=2)

    def _on_gpu(self, device: int, max_rows: int) -> cuda.Kernels | torch_ops.TorchOps | None:
        """The backend that measures on the GPU; None where there is none. Raises KernelError for that when strict."""
        try:
            return cuda.Kernels(device, max_rows)
        except Exception as error:  # CuPy raises what its many layers raise
            without_kernel = f"{type(error).__name__}: {error}"
        try:
            operations = torch_ops.TorchOps(f"cuda:{device}", max_rows)
        except Exception as error:
            reason = f"no entropy on cuda:{device}: {without_kernel}; nor with torch: {type(error).__name__}: {error}"
            if self._strict:
                raise KernelError(reason) from error
            self.fallback = f"{reason}; measuring on the CPU"
            return None
        self.fallback = f"torch's operations measure on cuda:{device}, slower than the CUDA kernel: {without_kernel}"
        return operations

    @property
    def backend(self) -> Literal["cpu", "cuda", "torch"]:
        """The backend that measures: "cuda", the kernel; "torch", its operations on a GPU; "cpu"."""
        if self._gpu is None:
            return "cpu"
        return "cuda" if isinstance(self._gpu, cuda.Kernels) else "torch"

    def compute(self, req_id: str, logits: Any, *, after_end_marker: bool = True) -> EntropySignal:
        """Signals of one row of a request, logits [vocabulary]; the signals' fields are single numbers.

        after_end_marker: as in `compute_batch`. Raises KernelError.
        """
        checks.request_id("req_id", req_id)
        checks.logits(logits, ("vocabulary",))
        after = checks.flag("after_end_marker", after_end_marker)
        return self.compute_batch([req_id], logits.reshape(1, -1), after_end_marker=after)[0]

    def compute_batch(
        self, req_ids: Sequence[str], logits_batch: Any, *, after_end_marker: bool | Sequence[bool] = True
    ) -> EntropySignal:
        """Signals of one row of each request, logits_batch [requests, vocabulary], in the order of `req_ids`.

        after_end_marker: whether the row is what the model predicts after an end-of-thinking marker that was appended
        to the reasoning, so that its entropy is a sample of EAT; for all requests, or for each. The logits alone do not
        tell. A row that is not leaves the request's EAT as it is, and so does a row that cannot be measured.

        Waits for the result. Raises KernelError.
        """
        checks.logits(logits_batch, ("requests", "vocabulary"))
        checks.request_ids(req_ids, logits_batch.shape[0])
        samples = checks.flags("after_end_marker", after_end_marker, len(req_ids))
        signals = self.begin(logits_batch).result()
        eat, variance = np.empty((2, len(req_ids)), np.float64)
        for row, (req_id, entropy) in enumerate(zip(req_ids, signals.entropy_nats.tolist(), strict=True)):
            if samples[row]:
                self._eat.add(req_id, entropy)
            now = self._eat.of(req_id)
            eat[row], variance[row] = now.newest, now.variance
        return EntropySignal(**columns(signals), eat=eat, eat_ema_variance=variance)

    def forget(self, req_id: str) -> None:
        """Drop what is known of a request's EAT, once it has ended; nothing happens if there is nothing. The state of
        at most 65,536 requests is kept: beyond that the request that was sampled longest ago is forgotten.

        Raises KernelError.
        """
        checks.request_id("req_id", req_id)
        self._eat.forget(req_id)

    def begin(
        self,
        logits: Any,
        think_end_token_ids: int | Sequence[int] | NDArray[np.integer] | None = None,
        rows: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> Pending:
        """Begin to measure logits [rows, vocabulary], all rows or those named, in that order; touches no request's EAT.

        On a GPU this does not wait. What the stream of the logits is given next, also to the same memory, comes after
        they were read; but a CuPy array that torch's operations measure must stay as it is until `result`. For the CUDA
        kernel a row's logits lie side by side, on the CPU any strides will do.
        think_end_token_ids: instead of the probe's own. Raises KernelError.
        """
        checks.logits(logits, ("rows", "vocabulary"))
        logits = checks.narrowed(logits)
        given = self._ends if think_end_token_ids is None else think_end_token_ids
        if given is None:
            raise KernelError("think_end_token_ids must be given to the probe or to the call; got None")
        ends = checks.end_tokens(given, logits.shape[1])
        selected = None if rows is None else checks.row_numbers(rows, logits.shape[0])
        if self._gpu is not None and (self._strict or checks.is_on_gpu(logits)):
            return self._gpu.begin(logits, ends, selected)
        return _Done(cpu.measure(self._on_cpu(logits), ends, selected))

    def _on_cpu(self, logits: Any) -> Any:
        """The logits, which are copied from a GPU only where the probe was asked to measure there."""
        if self._wants_gpu and checks.is_on_gpu(logits):
            return logits.cpu() if checks.is_tensor(logits) else _from_gpu(logits)
        if not isinstance(logits, np.ndarray) and not (checks.is_tensor(logits) and logits.device.type == "cpu"):
            raise KernelError(f"logits must be on the CPU; got {checks.place_of(logits)}")
        return logits


def _from_gpu(array: Any) -> NDArray[Any]:
    if not hasattr(array, "get"):
        raise KernelError(f"logits must be a NumPy, torch or CuPy array; got {type(array).__name__}")
    copied: NDArray[Any] = array.get()
    return copied
