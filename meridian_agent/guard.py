"""The guard: no exception of the agent's reaches vLLM.

Every hook runs through it. The first surprise trips it: the agent steps aside, the engine goes on as stock, one log
line and the fault in the next Hello say so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("vllm.meridian")

# Characters of a fault; it travels in every Hello.
MAX_FAULT = 1000


class Guard:
    """Runs hooks until one fails. `on_trip` is then called once, and may itself fail without harm."""

    def __init__(self) -> None:
        self.fault = ""
        self.on_trip: Callable[[], None] | None = None

    def run(self, hook: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The hook's result, or None when it failed or an earlier one had."""
        if self.fault:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            self.trip(getattr(hook, "__qualname__", str(hook)), error)
            return None

    def trip(self, hook: str, error: Exception) -> None:
        """Switch the agent off for good."""
        self.fault = f"{hook}: {type(error).__name__}: {error}"[:MAX_FAULT]
        logger.error("meridian: agent off, vLLM runs as stock; %s", self.fault, exc_info=error)
        if self.on_trip is not None:
            try:
                self.on_trip()
            except Exception:
                logger.exception("meridian: could not report the fault")
