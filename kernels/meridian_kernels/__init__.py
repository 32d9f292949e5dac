"""Entropy and end-marker signals of logits rows.

`EntropyProbe` measures with NumPy and torch on the CPU. On a GPU `EntropyProbe` measures with a CUDA kernel or, without
CuPy, with torch's operations. `reference` is the float64 NumPy definition against which all backends are tested.
Importing the package imports neither torch nor CuPy and touches no GPU.
"""

from meridian_kernels.definition import EntropySignal, RowSignals, reference
from meridian_kernels.errors import KernelError
from meridian_kernels.probe import EntropyProbe, Pending

__all__ = ["EntropyProbe", "EntropySignal", "KernelError", "Pending", "RowSignals", "reference"]
