"""A worker whose steps last as long as those of a large model.

The demo's model needs about half a millisecond for a step, a large served model 10 to 50. Without a pace the engine
finishes a request before a client or a control plane on the same two cores has read a token of it, and no latency means
anything. The class runs in the engine's worker process, through vLLM's own `--worker-cls`; it changes nothing of vLLM.

On a GPU `execute_model` returns once the kernels are queued, and the engine waits when it needs the sampled tokens.
The worker waits at the same place, so other threads of the engine run while a step computes, as they do on a GPU.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_MS = "MERIDIAN_DEMO_STEP_MS"


class PacedWorker(CPUWorker):  # type: ignore[misc]
    """Stretches each step that computes tokens to MERIDIAN_DEMO_STEP_MS milliseconds."""

    _ends_s = 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._ends_s = time.perf_counter() + float(os.environ[STEP_MS]) / 1e3
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        time.sleep(max(0.0, self._ends_s - time.perf_counter()))
        return super().sample_tokens(grammar_output)
