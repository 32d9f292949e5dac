"""On PYTHONPATH of a soak's server: a hook of the agent's fails once when a file names it, and the file is gone then.

Runs wherever the hook does.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "MERIDIAN_SOAK_HARM" in os.environ:
    from meridian_agent.core import guard

    ASKED = Path(os.environ["MERIDIAN_SOAK_HARM"])
    # As it is, a soak would be over before the agent came back, and it would not come back from more than three faults.
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
