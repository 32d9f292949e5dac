"""On PYTHONPATH of a soak's server, make one of the agent's hooks fail once when a file names it; the file is removed.

The code runs in the process of the hook.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "MERIDIAN_SOAK_HARM" in os.environ:
    from meridian_agent.core import guard

    ASKED = Path(os.environ["MERIDIAN_SOAK_HARM"])
    # With its usual rests the agent would come back only after the end of the soak, and not at all after more than
    # three faults.
    vars(guard)["RESTS_S"] = (2.0,) * 1000
    _run = guard.Guard.run

    def run(self: guard.Guard, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _run(self, _failing(hook) if ASKED.exists() else hook, *args, **kwargs)

    def _failing(hook: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(hook, "__name__", "").lstrip("_")

        @functools.wraps(hook)
        def fails(*args: Any, **kwargs: Any) -> Any:
            when, of = _asked()
            if of != name:
                return hook(*args, **kwargs)
            ASKED.unlink()
            if when == "after":
                hook(*args, **kwargs)
            raise RuntimeError(f"injected by the soak, {when} {of}")

        fails.__name__ = name
        return fails

    def _asked() -> list[str]:
        try:
            return ASKED.read_text().split()
        except FileNotFoundError:
            return ["", ""]

    guard.Guard.run = run  # type: ignore[method-assign]
