"""Predicts which backend measures entropy on an engine's workers, from the kind of device alone."""

from __future__ import annotations

import importlib.util


def expected_backend(device_type: str) -> tuple[str, str]:
    """Return the backend (cpu, cuda, torch or none) that is expected on this kind of device, without touching the
    device, and the reason if it is torch or none."""
    if device_type == "cpu":
        return "cpu", ""
    if device_type != "cuda":
        return "none", f"there are no entropy kernels for {device_type}"
    if importlib.util.find_spec("cupy") is None:
        return "torch", "CuPy is not installed (extras cuda12, cuda13)"
    return "cuda", ""
