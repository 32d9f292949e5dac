"""Finds out whether an error ends vLLM's engine core."""

from __future__ import annotations

import sys
import traceback


def core_fails() -> bool:
    """Return whether vLLM shuts the scheduler down because of an error, and nobody has told the engine core to end. A
    signal to all processes at once ends the workers first, which the core takes for an error."""
    error = sys.exception()
    if not isinstance(error, Exception):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "run_engine_core":
            # Older versions of vLLM raise SystemExit at a signal, and have no such state.
            state = getattr(frame.f_locals.get("engine_core"), "shutdown_state", None)
            return getattr(state, "name", "RUNNING") == "RUNNING"
    # The error belongs to a program that runs the engine core in its own process, or to something else of it.
    return False
