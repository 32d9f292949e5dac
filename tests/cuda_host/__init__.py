"""Build the CUDA source with a C++ compiler behind `host.cpp`, and launch it like a kernel on torch tensors in CPU
memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian_kernels import RowSignals
from meridian_kernels.checks import MAX_END_TOKENS
from meridian_kernels.cuda import KERNELS, SOURCE, STATE_BYTES, plan
from meridian_kernels.definition import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

COMPILER = shutil.which("g++") or shutil.which("clang++")
# Symbols are hidden, because two builds in one process would otherwise share the statics of their templates.
FLAGS = ["-fvisibility=hidden", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
FLAGS += ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"]


class HostKernels:
    """One build of the kernels. `blocks`: number of blocks that the imitated GPU holds at once."""

    def __init__(self, folder: Path, *, threads: int, vectors: int, stages: int) -> None:
        assert COMPILER is not None
        library = folder / f"signals-{threads}-{vectors}-{stages}.so"
        sizes = (f"-DTHREADS={threads}", f"-DVECTORS={vectors}", f"-DSTAGES={stages}", "-DBLOCKS_PER_SM=1")
        source = Path(__file__).with_name("host.cpp")
        subprocess.run(
            [COMPILER, *FLAGS, *sizes, f'-DSOURCE="{SOURCE}"', "-o", str(library), str(source)],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))
        self._launch = self._library.launch
        self._launch.restype = ctypes.c_char_p
        self._tile_vectors = threads * vectors
        self._tickets = np.zeros(4096, np.uint32)

    def set_exp2_error(self, error: float, turn: float) -> None:
        """Give powers of two this relative error: too large for exponents above `turn`, too small for all others."""
        self._library.set_exp2_error(ctypes.c_float(error), ctypes.c_float(turn))

    def measure(
        self,
        logits: torch.Tensor,
        ends: Sequence[int],
        selected: Sequence[int] | None = None,
        *,
        blocks: int,
        seed: int | None = None,
    ) -> RowSignals:
        """Launch over rows of `logits` with the blocks in a random order, and check the reads.

        Each entry of the requested rows must be read exactly once, and no other memory. Raises AssertionError.
        """
        dtype = str(logits.dtype).removeprefix("torch.")
        size = KERNELS[dtype][1]
        count, vocab = logits.shape
        rows = list(range(count)) if selected is None else list(selected)
        tiles, grid = plan(len(rows), vocab, size, blocks, self._tile_vectors)
        order = np.arange(grid, dtype=np.uint32)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        stride, low = logits.stride(0), logits.data_ptr()
        reads = np.zeros(((count - 1) * stride + vocab) * size if rows else 0, np.uint8)
        out = np.full(COLUMNS * len(rows), -7.0, np.float32)
        pieces = np.full((grid + len(rows)) * STATE_BYTES, 0xFF, np.uint8)
        chosen = None if selected is None else np.array(rows, np.int32)
        complaint = self._launch(
            list(KERNELS).index(dtype),
            ctypes.c_void_p(low),
            ctypes.c_longlong(stride),
            _pointer(chosen),
            *(ctypes.c_longlong(n) for n in (len(rows), vocab, tiles)),
            _pointer(np.array([*ends, *[ends[-1]] * (MAX_END_TOKENS - len(ends))], np.int64)),
            _pointer(pieces),
            _pointer(self._tickets),
            _pointer(out),
            ctypes.c_uint(grid),
            _pointer(order),
            ctypes.c_void_p(low),
            ctypes.c_void_p(low + len(reads)),
            _pointer(reads),
        )
        assert complaint is None, complaint.decode()
        assert not self._tickets.any(), "the kernel must reset its tickets"
        expected = np.zeros(len(reads), np.uint8)
        for row in rows:
            expected[row * stride * size : (row * stride + vocab) * size] += 1
        np.testing.assert_array_equal(reads, expected, "reads of each byte")
        columns = out.reshape(COLUMNS, len(rows))
        return RowSignals(*columns[:4], *columns[4:].view(np.int32))


def _pointer(array: Any) -> ctypes.c_void_p:
    # The array must outlive the call; every caller holds it or passes a temporary that the argument list holds.
    pointer = ctypes.c_void_p(None if array is None else array.ctypes.data)
    pointer._array = array  # type: ignore[attr-defined]
    return pointer
