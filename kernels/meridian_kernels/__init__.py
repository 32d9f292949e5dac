"""Entropy and end-marker signals of logits rows, each row read once.

`EntropyProbe` computes them with torch on the CPU or with a CUDA kernel on a GPU; `reference` is the float64 NumPy
definition both are tested against. Nothing here knows of requests or policy, and importing it touches neither torch,
CuPy nor a GPU.
"""

from meridian_kernels.cpu import EntropySignal, KernelError, reference
from meridian_kernels.probe import EntropyProbe, Pending

__all__ = ["EntropyProbe", "EntropySignal", "KernelError", "Pending", "reference"]
