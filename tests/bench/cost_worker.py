"""A worker that counts the processor time of each of its steps, and the agent's part of it.

The worker runs in the engine's worker process, through vLLM's own `--worker-cls`.
"""

from __future__ import annotations

import functools
import time
from itertools import pairwise
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
    """Counts the processor time of all steps, of each step, and the agent's part of it."""

    def init_device(self) -> None:
        super().init_device()
        # Seconds of all steps before each step.
        self._before_s: list[float] = []

    def execute_model(self, scheduler_output: Any) -> Any:
        self._before_s.append(self.busy_seconds())
        return super().execute_model(scheduler_output)

    def step_seconds(self) -> list[float]:
        """Return the seconds of each step since the last call; the benchmark's process calls this."""
        edges, self._before_s = [*self._before_s, self.busy_seconds()], []
        return [after - before for before, after in pairwise(edges)]

    def counted(self) -> tuple[float, float]:
        """Return the seconds so far of the steps and of the agent; the benchmark's process calls this."""
        return self.busy_seconds(), _observe_s
