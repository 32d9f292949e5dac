"""A worker with a gate before its steps. Runs in the engine's worker process, through vLLM's own `--worker-cls`."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.bench.gate import Gate


class GatedWorker(CPUWorker):  # type: ignore[misc]
    """Lets the steps that compute tokens pass the gate, and counts tokens; it changes nothing of vLLM."""

    @functools.cached_property
    def _gate(self) -> Gate:
        return Gate()

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._gate.step()
            self._gate.prompt_tokens += sum(len(new.prompt_token_ids) for new in scheduler_output.scheduled_new_reqs)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if output is not None and output.sampled_token_ids:
            self._gate.tokens += sum(map(len, output.sampled_token_ids))
        self._gate.done()
        return output
