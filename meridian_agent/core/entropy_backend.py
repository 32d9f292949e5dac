"""Tells what measures entropy on an engine's workers, from the kind of device alone."""

from __future__ import annotations

import importlib.util


def expected_backend(device_type: str) -> tuple[str, str]:
    """The backend of workers with this kind of device (cpu, cuda, torch or none), as far as can be told without
    touching one, and why it is not the CUDA kernel or nothing at all."""
    if device_type == "cpu":
        return "cpu", ""
    if device_type != "cuda":
        return "none", f"there are no entropy kernels for {device_type}"
    if importlib.util.find_spec("cupy") is None:
        return "torch", "CuPy is not installed (extras cuda12, cuda13)"
    return "cuda", ""
