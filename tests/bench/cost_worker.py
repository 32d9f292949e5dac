"""A worker that counts the processor time of its steps and the agent's part of it.

The worker runs in the engine's worker process, through vLLM's own `--worker-cls`.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from meridian_agent.worker import observer as observe
from tests.bench.metered import MeteredWorker

# The observer's methods that run in a worker's step; no method of this list calls another one.
CALLS = ("begin", "before_sampling", "on_logits", "put")
_observe_s = 0.0


def _count(name: str) -> None:
    function = getattr(observe.Observer, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _observe_s
        began_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            _observe_s += time.thread_time() - began_s

    setattr(observe.Observer, name, counted)


for _name in CALLS:
    _count(_name)


class CountingWorker(MeteredWorker):
    """Counts the processor time of all steps, and the agent's part of it."""

    def counted(self) -> tuple[float, float]:
        """Return the seconds so far of the steps and of the agent; the benchmark's process calls this."""
        return self.busy_seconds(), _observe_s
