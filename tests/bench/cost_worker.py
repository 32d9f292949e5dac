"""A worker that counts what its steps take, and what the agent takes of that. Runs in the engine's worker process,
through vLLM's own `--worker-cls`."""

from __future__ import annotations

import functools
import time
from typing import Any

from meridian_agent.worker import observer as observe
from tests.bench.metered import MeteredWorker

# What the agent does in a worker's step, one inside another nowhere.
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
    """Processor time of all steps, and of the agent's part in them."""

    def counted(self) -> tuple[float, float]:
        """Seconds so far: steps, the agent; called from the benchmark's process."""
        return self.busy_seconds(), _observe_s
