"""Measures with torch's own operations on the tensor's device, for GPUs without CuPy. These operations are slower than
the CUDA kernel, because they read each row several times.

Everything runs on torch's current stream, so torch's later operations on the same logits run after the measurement.
Creating a `TorchOps` object allocates the buffers, and the rows are measured in chunks that fit in them. The columns
are copied to pinned memory, followed by an event, and only `PendingRows.result` waits for the device. On the CPU the
same code runs without streams and events.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from meridian_kernels import checks
from meridian_kernels.definition import COLUMNS
from meridian_kernels.errors import KernelError
from meridian_kernels.pending import PendingRows, Ring, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

# Logits of one chunk; the two buffers together take 8 bytes for each logit.
CHUNK_LOGITS = 1 << 23
# Shifted logits are clipped to at least this value: exp(-1e4) is exactly 0 in float32, so -inf contributes 0, not NaN.
FLOOR = -1e4


class TorchOps:
    """Measures with torch's operations on one device, at most `max_rows` rows at once. The constructor raises torch's
    own exceptions if the device cannot be used."""

    def __init__(self, device: str, max_rows: int, chunk_logits: int = CHUNK_LOGITS) -> None:
        import torch

        self._torch = torch
        self.device, self.max_rows, self._chunk_logits = torch.device(device), max_rows, chunk_logits
        self._is_on_gpu = self.device.type != "cpu"
        # A tensor created in inference mode could not be written to outside of inference mode.
        with torch.inference_mode(False):
            empty = functools.partial(torch.empty, device=self.device)
            # The memory of the weights first holds the selected rows, until the weights are computed.
            self._shifted, self._weights = (empty(chunk_logits, dtype=torch.float32) for _ in range(2))
            self._out = empty(COLUMNS * max_rows, dtype=torch.float32)
            self._selected = empty(max_rows, dtype=torch.int32)
            self._ring = Ring(self._slot)
        # This event follows the newest measurement. The next measurement waits for the event, because both measurements
        # use the same buffers and may run on different streams.
        self._used = self._event()
        for dtype in checks.DTYPES:
            # The first run of an operation loads the operation's kernel, which may wait and allocate.
            self.begin(torch.zeros(1, 64, dtype=getattr(torch, dtype), device=self.device), (0,), None).result()

    def _event(self) -> Any:
        return self._torch.cuda.Event(blocking=True) if self._is_on_gpu else _Passed()

    def _slot(self, _: int) -> Slot:
        pinned = functools.partial(self._torch.empty, device="cpu", pin_memory=self._is_on_gpu)
        host = pinned(COLUMNS * self.max_rows, dtype=self._torch.float32).numpy()
        selected, copied = pinned(self.max_rows, dtype=self._torch.int32).numpy(), self._event()
        return Slot(host, selected, copied, copied.query)

    def begin(self, logits: Any, ends: Sequence[int], selected: NDArray[np.int32] | None) -> PendingRows:
        """Begin to measure rows of checked logits [rows, vocabulary] on this device. A CuPy array is measured without a
        copy. Raises KernelError."""
        torch = self._torch
        if hasattr(logits, "__dlpack__") and not checks.is_tensor(logits) and checks.is_on_gpu(logits):
            logits = torch.from_dlpack(logits)
        count, vocab = logits.shape[0] if selected is None else len(selected), logits.shape[1]
        self._check(logits, count, vocab)
        slot = self._ring.take()
        with torch.inference_mode(), torch.cuda.device(self.device) if self._is_on_gpu else contextlib.nullcontext():
            self._wait_for_buffers()
            if selected is not None:
                slot.selected[:count] = selected
                self._selected[:count].copy_(torch.from_numpy(slot.selected[:count]), non_blocking=True)
            out = self._out[: COLUMNS * count].view(COLUMNS, count)
            step = self._chunk_logits // vocab
            for begin in range(0, count, step):
                at = slice(begin, min(begin + step, count))
                self._measure(self._rows(logits, at, selected is not None), ends, out[:, at])
            torch.from_numpy(slot.host[: COLUMNS * count]).copy_(self._out[: COLUMNS * count], non_blocking=True)
            if self._is_on_gpu:
                slot.copied.record()
                self._used.record()
        return PendingRows(slot, count)

    def _check(self, logits: Any, count: int, vocab: int) -> None:
        if not checks.is_tensor(logits) or logits.device != self.device:
            raise KernelError(f"logits must be on {self.device}; got {checks.place_of(logits)}")
        if count > self.max_rows:
            raise KernelError(f"at most {self.max_rows} rows can be measured at once; got {count}")
        if vocab > self._chunk_logits:
            raise KernelError(f"a row may have at most {self._chunk_logits} logits; got {vocab}")
        if self._is_on_gpu and self._torch.cuda.is_current_stream_capturing():
            raise KernelError("logits cannot be measured while torch captures a graph: measure after its replay")

    def _wait_for_buffers(self) -> None:
        if self._is_on_gpu:
            self._torch.cuda.current_stream().wait_event(self._used)

    def _rows(self, logits: torch.Tensor, at: slice, picks: bool) -> torch.Tensor:
        """Return a slice of the rows, or of the selected rows if `picks` is true, in the logits' own dtype."""
        if not picks:
            return logits[at]
        shape = (at.stop - at.start, logits.shape[1])
        room = self._weights.view(logits.dtype)[: shape[0] * shape[1]].view(shape)
        return self._torch.index_select(logits, 0, self._selected[at], out=room)

    def _measure(self, x: torch.Tensor, ends: Sequence[int], out: torch.Tensor) -> None:
        """Fill the columns [COLUMNS, rows] for rows x [rows, vocabulary] of any dtype. A row that cannot be measured
        needs no special case: its maximum is NaN or infinite, so its sums become NaN."""
        torch = self._torch
        shifted, weights = (b[: x.numel()].view(x.shape) for b in (self._shifted, self._weights))
        top, top_id = x.max(dim=1)
        end = functools.reduce(torch.maximum, [x[:, token] for token in ends])
        # The comparison writes ones in float32, whose sum is exact up to 2^24. Torch would copy booleans before it sums
        # them.
        above = torch.gt(x, end[:, None], out=shifted).sum(dim=1)
        top = top.float()
        # The gap is computed before the weights overwrite the selected rows, because `end` may be a view of these rows.
        end_gap = end.float() - top
        torch.sub(x, top[:, None], out=shifted).clamp_(min=FLOOR)
        torch.exp(shifted, out=weights)
        total = weights.sum(dim=1)
        log_total = total.log()
        out[0] = log_total - weights.mul_(shifted).sum(dim=1) / total
        out[1] = top + log_total
        out[2] = -log_total
        out[3] = end_gap - log_total
        integers = out[4:].view(torch.int32)
        is_measured = top.isfinite()
        integers[0] = torch.where(is_measured, top_id, -1)
        integers[1] = torch.where(is_measured, above + 1, 0)


class _Passed:
    """Stands in for an event on the CPU, where each operation has finished when its call returns."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True
