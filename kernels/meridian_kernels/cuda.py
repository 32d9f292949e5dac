"""Loads the CUDA source through CuPy and runs the kernel on the stream of the logits, with its own events and pinned
memory.

Creating a `Kernels` object allocates all memory and compiles and runs each kernel once. After that a measurement is one
launch and one event: it allocates nothing on the GPU, and no call but `PendingRows.result` waits for it. Importing this
module neither imports CuPy nor touches a GPU. The module uses only the address, strides, dtype and stream of torch and
CuPy arrays.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_kernels import checks
from meridian_kernels.definition import COLUMNS
from meridian_kernels.errors import KernelError
from meridian_kernels.pending import SLOTS, PendingRows, Ring, Slot

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
# The kernel's arguments that differ from launch to launch; the addresses of pieces, tickets and columns follow.
ARGUMENTS = struct.Struct("10q")


def plan(rows: int, vocab: int, entry_bytes: int, blocks: int, tile_vectors: int = TILE_VECTORS) -> tuple[int, int]:
    """Return the number of tiles of a row and the number of blocks to launch. blocks: number of blocks that the GPU
    runs at once, which is the upper limit."""
    vectors = vocab // (16 // entry_bytes)
    tiles = max(1, -(-vectors // tile_vectors))
    return tiles, min(blocks, rows * tiles)


@dataclass(slots=True)
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


class Arguments:
    """The memory from which launches of one slot read the kernel's arguments, of eight bytes each."""

    def __init__(self, selected: int, *fixed: int) -> None:
        """selected: address in the GPU's memory for the indices of selected rows. fixed: the last arguments, which are
        the same in each launch."""
        self.selected = selected
        self._values = np.zeros(ARGUMENTS.size // 8 + len(fixed), np.int64)
        self._values[-len(fixed) :] = fixed
        self._memory = self._values.data.cast("B")
        self._pointers = self._values.ctypes.data + 8 * np.arange(len(self._values))
        # CUDA reads the arguments' addresses here.
        self.address: int = self._pointers.ctypes.data

    def fill(self, *first: int) -> None:
        ARGUMENTS.pack_into(self._memory, 0, *first)


class Kernels:
    """The CUDA kernels on one GPU, for at most `max_rows` rows in one measurement. The constructor raises CuPy's own
    exceptions if the GPU cannot be used."""

    def __init__(self, device: int, max_rows: int) -> None:
        import cupy

        self._cuda, self._driver, self._runtime = cupy.cuda, cupy.cuda.driver, cupy.cuda.runtime
        self.device, self.max_rows = device, max_rows
        with cupy.cuda.Device(device) as gpu:
            module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
            # The object that CuPy returns keeps the kernel loaded.
            self._loaded = [module.get_function(name).kernel for name, _ in KERNELS.values()]
            sizes = [size for _, size in KERNELS.values()]
            self._functions = dict(zip(KERNELS, zip((k.ptr for k in self._loaded), sizes, strict=True), strict=True))
            self._blocks = gpu.attributes["MultiProcessorCount"] * BLOCKS_PER_SM
            self._pieces_bytes = (self._blocks + max_rows) * STATE_BYTES
            # Measurements on two streams may run at once, so each slot has its own memory.
            self._pieces = cupy.empty((SLOTS, self._pieces_bytes), np.uint8)
            self._tickets = cupy.zeros((SLOTS, max_rows), np.uint32)
            self._selected = cupy.empty((SLOTS, max_rows), np.int32)
            logits = cupy.zeros(64, np.float32)
            self._ring = Ring(self._slot)
            # The first launch of a kernel loads the kernel, which may wait and allocate.
            stream = cupy.cuda.get_current_stream()
            for dtype in KERNELS:
                self._begin(DeviceRows(logits.data.ptr, 64, 1, 64, dtype), (0,), None, stream.ptr).result()

    def _slot(self, number: int) -> Slot:
        def pinned(count: int, dtype: type) -> Any:
            return np.frombuffer(self._cuda.alloc_pinned_memory(4 * count), dtype, count)

        copied = self._cuda.Event(block=True, disable_timing=True)
        host, selected = pinned(COLUMNS * self.max_rows, np.float32), pinned(self.max_rows, np.int32)
        arguments = Arguments(
            self._selected.data.ptr + 4 * number * self.max_rows,
            self._pieces.data.ptr + number * self._pieces_bytes,
            self._tickets.data.ptr + 4 * number * self.max_rows,
            # The GPU writes into pinned memory under the same address, so no copy follows the kernel.
            host.ctypes.data,
        )
        return Slot(host, selected, copied, lambda: bool(copied.done), arguments)

    def begin(self, logits: Any, ends: Sequence[int], selected: NDArray[np.int32] | None) -> PendingRows:
        """Begin to measure rows of checked logits [rows, vocabulary] on this GPU, on the logits' stream: after the work
        that is queued there now, and before work that is queued later. This stream is torch's current stream for a
        tensor, and the stream that CuPy names for a CuPy array. Raises KernelError."""
        count = logits.shape[0] if selected is None else len(selected)
        if count > self.max_rows:
            raise KernelError(f"at most {self.max_rows} rows can be measured at once; got {count}")
        rows, stream = self._tensor(logits, count) if checks.is_tensor(logits) else self._array(logits, count)
        runtime = self._runtime
        before = runtime.getDevice()
        # On a new thread this also makes the GPU's context the current one, which the launch needs.
        runtime.setDevice(self.device)
        try:
            return self._begin(rows, ends, selected, stream)
        finally:
            if before != self.device:
                runtime.setDevice(before)

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
        if rows.count:
            chosen = 0
            if selected is not None:
                # Each block reads indices of its rows, which would take long from the host's memory.
                slot.selected[: rows.count] = selected
                chosen, start = slot.arguments.selected, slot.selected.ctypes.data
                self._runtime.memcpyAsync(chosen, start, 4 * rows.count, self._runtime.memcpyHostToDevice, stream)
            self._launch(stream, rows, ends, chosen, slot.arguments)
        self._runtime.eventRecord(slot.copied.ptr, stream)
        return PendingRows(slot, rows.count)

    def _launch(self, stream: int, rows: DeviceRows, ends: Sequence[int], chosen: int, arguments: Arguments) -> None:
        """Launch the kernel on a stream. chosen: address of the selected rows' indices, or 0 for all rows."""
        function, entry_bytes = self._functions[rows.dtype]
        count, vocab = rows.count, rows.vocab
        tiles, grid = plan(count, vocab, entry_bytes, self._blocks)
        if max(count * tiles, vocab) >= 1 << 31:
            raise KernelError(f"{count} rows of {vocab} logits are too many for one launch")
        four = (*ends, *(ends[-1],) * (checks.MAX_END_TOKENS - len(ends)))
        arguments.fill(rows.address, rows.stride, chosen, count, vocab, tiles, *four)
        self._driver.launchKernel(function, grid, 1, 1, THREADS, 1, 1, 0, stream, arguments.address, 0)
