"""The demo's paced worker with a meter. Runs in the engine's worker process, through vLLM's own `--worker-cls`."""

from __future__ import annotations

import time
from typing import Any

from tests.demo.pace import PacedWorker


class MeteredWorker(PacedWorker):
    """Counts the processor time of its steps; the pause that stretches a step is slept and does not count."""

    _busy_s = 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        began_s = time.process_time()
        try:
            return super().execute_model(scheduler_output)
        finally:
            self._busy_s += time.process_time() - began_s

    def sample_tokens(self, grammar_output: Any) -> Any:
        began_s = time.process_time()
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self._busy_s += time.process_time() - began_s

    def busy_seconds(self) -> float:
        """Return the processor time of all steps so far; the benchmark's process calls this."""
        return self._busy_s
