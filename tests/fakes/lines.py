"""How many lines of ours a call runs: what shows that work does not grow, where a time would depend on the machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def lines_run(package: str, call: Callable[[], object]) -> int:
    """Lines of a package's that a call runs; one that loops counts each time."""
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
