"""Count the lines of a package that a call runs, to show without a clock that the work does not grow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_run(package: str, call: Callable[[], object]) -> int:
    """Return the number of the package's lines that a call runs; a line in a loop counts each time."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if package not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return count
