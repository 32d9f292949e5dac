"""Loads the CUDA source through CuPy and runs the kernel beside torch, with its own stream, events and pinned memory.

Creating a `Kernels` object allocates all memory and compiles and runs each kernel once. After that a measurement
allocates nothing on the GPU, and no call but `PendingRows.result` waits for it. Importing this module neither imports
CuPy nor touches a GPU. The module uses only the address, strides, dtype and stream of torch and CuPy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_kernels import checks
from meridian_kernels.definition import COLUMNS
from meridian_kernels.errors import KernelError
from meridian_kernels.pending import PendingRows, Ring, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("signals.cu")
THREADS, VECTORS, STAGES, BLOCKS_PER_SM = 256, 4, 2, 4
TILE_VECTORS = THREADS * VECTORS
OPTIONS = (
    "-std=c++17",
    f"-DTHREADS={THREADS}",
    f"-DVECTORS={VECTORS}",
    f"-DSTAGES={STAGES}",
    f"-DBLOCKS_PER_SM={BLOCKS_PER_SM}",
)
# Name of the kernel and bytes per entry, for each dtype.
KERNELS = {"float32": ("signals_f32", 4), "bfloat16": ("signals_bf16", 2), "float16": ("signals_f16", 2)}
# CUDA's handle of the legacy default stream.
LEGACY_STREAM = 1
# Size in bytes of the struct `State` in the CUDA source.
STATE_BYTES = 20


def plan(rows: int, vocab: int, entry_bytes: int, blocks: int, tile_vectors: int = TILE_VECTORS) -> tuple[int, int]:
    """Return the number of tiles of a row and the number of blocks to launch. blocks: number of blocks that the GPU
    runs at once, which is the upper limit."""
    vectors = vocab // (16 // entry_bytes)
    tiles = max(1, -(-vectors // tile_vectors))
    return tiles, min(blocks, rows * tiles)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of logits in the GPU's memory. stride: entries from the start of one row to the start of the next. count:
    number of rows to measure."""

    address: int
    stride: int
    count: int
    vocab: int
    dtype: str


def rows_of(logits: Any, count: int) -> DeviceRows:
    """Return where the rows of a torch tensor are. count: number of rows to measure. Raises KernelError."""
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise KernelError(f"a row's logits must be contiguous on a GPU; got strides {logits.stride()}")
    return DeviceRows(logits.data_ptr(), logits.stride(0), count, logits.shape[1], checks.dtype_of(logits))


def rows_of_interface(logits: Any, count: int) -> tuple[DeviceRows, int]:
    """Return where the rows of an array with `__cuda_array_interface__` are, for example of a CuPy array, and the
    array's stream; CUDA's legacy default stream if the array names none. Raises KernelError."""
    interface, dtype = logits.__cuda_array_interface__, checks.dtype_of(logits)
    vocab, size = logits.shape[1], KERNELS[dtype][1]
    strides = interface.get("strides") or (vocab * size, size)
    if (vocab > 1 and strides[1] != size) or strides[0] % size:
        raise KernelError(f"a row's logits must be contiguous on a GPU; got strides of {strides} bytes")
    rows = DeviceRows(interface["data"][0], strides[0] // size, count, vocab, dtype)
    return rows, interface.get("stream") or LEGACY_STREAM


class Kernels:
    """The CUDA kernels on one GPU, for at most `max_rows` rows in one measurement. The constructor raises CuPy's own
    exceptions if the GPU cannot be used."""

    def __init__(self, device: int, max_rows: int) -> None:
        import cupy

        self._cuda, self._runtime = cupy.cuda, cupy.cuda.runtime
        self.device, self.max_rows = device, max_rows
        with cupy.cuda.Device(device) as gpu:
            module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
            self._functions = {dtype: (module.get_function(name), size) for dtype, (name, size) in KERNELS.items()}
            self._blocks = gpu.attributes["MultiProcessorCount"] * BLOCKS_PER_SM
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._given, self._read = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
            with self._stream:
                self._pieces = cupy.empty((self._blocks + max_rows) * STATE_BYTES, np.uint8)
                self._tickets = cupy.zeros(max_rows, np.uint32)
                self._out = cupy.empty(COLUMNS * max_rows, np.float32)
                self._selected = cupy.empty(max_rows, np.int32)
                logits = cupy.zeros(64, np.float32)
            self._ring = Ring(self._slot)
            # The first launch of a kernel loads the kernel, which may wait and allocate.
            for dtype in KERNELS:
                self._begin(DeviceRows(logits.data.ptr, 64, 1, 64, dtype), (0,), None, self._stream.ptr).result()

    def _slot(self) -> Slot:
        def pinned(count: int, dtype: type) -> Any:
            return np.frombuffer(self._cuda.alloc_pinned_memory(4 * count), dtype, count)

        copied = self._cuda.Event(block=True, disable_timing=True)
        host, selected = pinned(COLUMNS * self.max_rows, np.float32), pinned(self.max_rows, np.int32)
        return Slot(host, selected, copied, lambda: bool(copied.done))

    def begin(self, logits: Any, ends: Sequence[int], selected: NDArray[np.int32] | None) -> PendingRows:
        """Begin to measure rows of checked logits [rows, vocabulary] on this GPU. The measurement runs after the work
        that is queued on the logits' stream now, and before work that is queued later. This stream is torch's current
        stream for a tensor, and the stream that CuPy names for a CuPy array. Raises KernelError."""
        count = logits.shape[0] if selected is None else len(selected)
        if count > self.max_rows:
            raise KernelError(f"at most {self.max_rows} rows can be measured at once; got {count}")
        rows, stream = self._tensor(logits, count) if checks.is_tensor(logits) else self._array(logits, count)
        with self._cuda.Device(self.device):
            return self._begin(rows, ends, selected, stream)

    def _tensor(self, logits: Any, count: int) -> tuple[DeviceRows, int]:
        import torch

        if logits.device.index != self.device:
            raise KernelError(f"logits must be on cuda:{self.device}; got {logits.device}")
        if torch.cuda.is_current_stream_capturing():
            raise KernelError("logits cannot be measured while torch captures a graph: measure after its replay")
        return rows_of(logits, count), torch.cuda.current_stream(self.device).cuda_stream

    def _array(self, logits: Any, count: int) -> tuple[DeviceRows, int]:
        if not hasattr(logits, "__cuda_array_interface__"):
            raise KernelError(f"logits must be on cuda:{self.device}; got {checks.place_of(logits)}")
        rows, stream = rows_of_interface(logits, count)
        if count and (device := self._runtime.pointerGetAttributes(rows.address).device) != self.device:
            raise KernelError(f"logits must be on cuda:{self.device}; got cuda:{device}")
        return rows, stream

    def _begin(
        self, rows: DeviceRows, ends: Sequence[int], selected: NDArray[np.int32] | None, stream: int
    ) -> PendingRows:
        slot = self._ring.take()
        runtime, own, count = self._runtime, self._stream, rows.count
        if count:
            runtime.eventRecord(self._given.ptr, stream)
            runtime.streamWaitEvent(own.ptr, self._given.ptr)
            chosen = 0
            if selected is not None:
                slot.selected[:count] = selected
                chosen = self._selected.data.ptr
                self._copy(chosen, slot.selected.ctypes.data, 4 * count, runtime.memcpyHostToDevice)
            self.launch(own, rows, ends, chosen)
            runtime.eventRecord(self._read.ptr, own.ptr)
            runtime.streamWaitEvent(stream, self._read.ptr)
            self._copy(slot.host.ctypes.data, self._out.data.ptr, 4 * COLUMNS * count, runtime.memcpyDeviceToHost)
        runtime.eventRecord(slot.copied.ptr, own.ptr)
        return PendingRows(slot, count)

    def launch(self, stream: Any, rows: DeviceRows, ends: Sequence[int], chosen: int) -> None:
        """Launch the kernel on a CuPy stream, without copying its results. chosen: address of the selected rows'
        indices, or 0 for all rows."""
        function, entry_bytes = self._functions[rows.dtype]
        count, vocab = rows.count, rows.vocab
        tiles, grid = plan(count, vocab, entry_bytes, self._blocks)
        if max(count * tiles, vocab) >= 1 << 31:
            raise KernelError(f"{count} rows of {vocab} logits are too many for one launch")
        four = (*ends, *(ends[-1],) * (checks.MAX_END_TOKENS - len(ends)))
        buffers = (self._pieces.data.ptr, self._tickets.data.ptr, self._out.data.ptr)
        with stream:
            function((grid,), (THREADS,), (rows.address, rows.stride, chosen, count, vocab, tiles, *four, *buffers))

    def _copy(self, to: int, start: int, count: int, kind: int) -> None:
        self._runtime.memcpyAsync(to, start, count, kind, self._stream.ptr)
