"""Entropy and end-marker signals of logits rows.

`EntropyProbe` measures with NumPy and torch on the CPU, on a GPU with a CUDA kernel or, without CuPy, with torch's
operations; `reference` is the float64 NumPy definition that all of them are tested against. Nothing here knows of
policy, and importing it touches neither torch, CuPy nor a GPU.
"""

from meridian_kernels.definition import EntropySignal, RowSignals, reference
from meridian_kernels.errors import KernelError
from meridian_kernels.probe import EntropyProbe, Pending

__all__ = ["EntropyProbe", "EntropySignal", "KernelError", "Pending", "RowSignals", "reference"]
