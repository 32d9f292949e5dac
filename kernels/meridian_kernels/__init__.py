"""Entropy and end-marker signals of logits rows, in one pass per row.

`EntropyProbe` computes them with torch on the CPU; `reference` is the float64 NumPy definition every other path is
tested against. Nothing here knows of requests or policy, and importing it touches neither torch nor a GPU.
"""

from meridian_kernels.probe import EntropyProbe, EntropySignal, KernelError

__all__ = ["EntropyProbe", "EntropySignal", "KernelError"]
