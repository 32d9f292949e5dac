"""The public API of the package: measures rows of logits on the CPU or on a GPU, and returns their signals as NumPy
columns, with the EAT of the requests that the rows belong to.

Everything runs on the caller's thread, but `Pending.result` may run on another thread.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from meridian_kernels import checks, cpu, cuda, torch_ops
from meridian_kernels.definition import COLUMNS, EntropySignal, columns, of_columns
from meridian_kernels.eat import EatHistory
from meridian_kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_kernels.definition import RowSignals
    from meridian_kernels.one_pass import OnePass, Repeated

Backend = Literal["cpu", "cuda"]


class Pending(Protocol):
    """A measurement that has begun."""

    def result(self) -> RowSignals:
        """Wait for this measurement only and return its signals. Raises KernelError if too many measurements have begun
        since."""

    def columns(self) -> NDArray[np.float32]:
        """Return the same as `result` as one array [6, rows], which takes fewer calls: the columns of RowSignals in
        their order; the memory of the integer columns holds int32."""


class _Done:
    """A measurement that the CPU has completed already."""

    def __init__(self, columns: NDArray[np.float32]) -> None:
        self._columns = columns

    def result(self) -> RowSignals:
        return of_columns(self._columns)

    def columns(self) -> NDArray[np.float32]:
        return self._columns


class EntropyProbe:
    """Measures rows of logits. `compute` and `compute_batch` measure rows of requests and keep each request's EAT from
    call to call; `begin` measures any rows, without waiting for a GPU.

    think_end_token_ids: the first token of the end-of-thinking marker, or the first tokens of up to four different
    markers, of which the likeliest counts; not all tokens of one marker. May be omitted if every `begin` names its own.
    backend: "cuda" measures on one GPU with a CUDA kernel, through CuPy. If the kernel cannot run, the probe warns and
    measures with torch's operations on the GPU, which is slower, or without a usable GPU on the CPU.
    ema_alpha: weight of the newest EAT sample, in (0, 1].
    strict: raise KernelError rather than measure a single row on the CPU; has an effect for "cuda" only.
    device: index of the GPU.
    max_rows: largest number of rows in one measurement on the GPU; the constructor allocates memory for them.

    Logits are NumPy, torch or CuPy arrays (or others with `__cuda_array_interface__`) of float32, bfloat16 or float16;
    float64 is rounded to float32. A "cuda" probe measures logits in the CPU's memory on the CPU, unless it is strict,
    and a "cuda" probe that had to fall back to the CPU copies logits from a GPU. A "cpu" probe refuses logits on a GPU.

    A wrong argument raises KernelError, which names the argument, before anything is measured or stored. A probe
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
        self._one_pass: OnePass | None = None
        # Reason why the probe measures with a slower backend than the caller asked for; empty if it does not.
        self.fallback = ""
        if self._wants_gpu:
            self._gpu = self._on_gpu(device, max_rows)
        if self.fallback:
            warnings.warn(self.fallback, RuntimeWarning, stacklevel=2)

    def _on_gpu(self, device: int, max_rows: int) -> cuda.Kernels | torch_ops.TorchOps | None:
        """Return the backend that measures on the GPU; None if no backend can use it. Raises KernelError instead of
        returning None if the probe is strict."""
        try:
            return cuda.Kernels(device, max_rows)
        except Exception as error:  # CuPy's layers raise exceptions of many types
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
        """The backend that measures: "cuda" is the CUDA kernel, "torch" is torch's operations on a GPU, "cpu" is
        compiled code on the CPU or, without `compile`, NumPy and torch."""
        if self._gpu is None:
            return "cpu"
        return "cuda" if isinstance(self._gpu, cuda.Kernels) else "torch"

    def compute(self, req_id: str, logits: Any, *, after_end_marker: bool = True) -> EntropySignal:
        """Measure one row of a request, logits [vocabulary], and return its signals, whose fields are single numbers.

        after_end_marker: as in `compute_batch`. Raises KernelError.
        """
        checks.request_id("req_id", req_id)
        checks.logits(logits, ("vocabulary",))
        after = checks.flag("after_end_marker", after_end_marker)
        return self.compute_batch([req_id], logits.reshape(1, -1), after_end_marker=after)[0]

    def compute_batch(
        self, req_ids: Sequence[str], logits_batch: Any, *, after_end_marker: bool | Sequence[bool] = True
    ) -> EntropySignal:
        """Measure one row of each request, logits_batch [requests, vocabulary], and return the signals in the order of
        `req_ids`.

        after_end_marker: whether the model predicts the row after an end-of-thinking marker that was appended to the
        reasoning, so that the row's entropy is a sample of EAT. One flag holds for all requests; a list has one flag
        for each. The logits alone do not show whether a marker was appended. Other rows, and rows that cannot be
        measured, do not change the request's EAT.

        The method waits for the result. Raises KernelError.
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
        """Drop the EAT state of a request that has ended; do nothing if there is none. The probe keeps the state of at
        most 65,536 requests; beyond that, it forgets the request that was sampled longest ago.

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
        """Begin to measure logits [rows, vocabulary] and return the pending measurement. The EAT of requests does not
        change.

        On a GPU this method does not wait. Work queued later on the logits' CUDA stream runs after the kernel has read
        the logits, even if that work overwrites them. But a CuPy array that torch's operations measure must not change
        until `result` has returned. For the CUDA kernel the logits of a row must be contiguous; on the CPU they may
        have any strides.

        think_end_token_ids: replaces the probe's own ids in this measurement. rows: indices of the rows to measure, in
        the order of the result; None measures all rows. Raises KernelError.
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
        measure = cpu.measure if self._one_pass is None else self._one_pass.measure
        return _Done(measure(self._on_cpu(logits), ends, selected))

    def repeated(
        self, logits: Any, think_end_token_ids: int | Sequence[int] | NDArray[np.integer], wanted: Sequence[int]
    ) -> Repeated | None:
        """Return an object that measures further logits [rows, vocabulary] of the computation that these come from,
        such as a model's steps, with fewer calls than `begin`; None if only `begin` can measure them.

        wanted: indices, among the columns of RowSignals, of the columns that the object returns, in this order. Raises
        KernelError.
        """
        checks.logits(logits, ("rows", "vocabulary"))
        ends = checks.end_tokens(think_end_token_ids, logits.shape[1])
        columns = checks.columns(wanted, COLUMNS)
        if self._one_pass is None or not (checks.is_tensor(logits) and logits.is_cpu):
            return None
        return self._one_pass.repeated(logits, ends, columns)

    def compile(self) -> None:
        """Compile the measurement on the CPU with numba, so that it takes a fraction of NumPy's time.

        Compiling takes a second or two, and 150 MB of memory for numba. If it fails, for example without numba, NumPy
        goes on measuring, and `fallback` gives the reason.
        """
        try:
            from meridian_kernels.one_pass import OnePass

            self._one_pass = OnePass()
        except Exception as error:  # numba's layers raise exceptions of many types
            reason = str(error).partition("\n")[0]
            self.fallback = f"NumPy measures, slower than compiled code: {type(error).__name__}: {reason}"

    def _on_cpu(self, logits: Any) -> Any:
        """Return the logits in the CPU's memory. Logits on a GPU are copied only if the probe was created with the
        backend "cuda"; otherwise they raise KernelError."""
        if self._wants_gpu and checks.is_on_gpu(logits):
            return logits.cpu() if checks.is_tensor(logits) else _from_gpu(logits)
        if not isinstance(logits, np.ndarray) and not (checks.is_tensor(logits) and logits.is_cpu):
            raise KernelError(f"logits must be on the CPU; got {checks.place_of(logits)}")
        return logits


def _from_gpu(array: Any) -> NDArray[Any]:
    if not hasattr(array, "get"):
        raise KernelError(f"logits must be a NumPy, torch or CuPy array; got {type(array).__name__}")
    copied: NDArray[Any] = array.get()
    return copied
