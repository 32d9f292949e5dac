"""A vLLM worker without a model: a model runner of either kind with vLLM's attributes, whose logits the test supplies.

The runner samples the likeliest token of each row and then overwrites the logits, as masks and sampling in place do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_agent.core.step_signals import REQUEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

END_TOKEN = 3


def asked(logits: torch.Tensor, excluded_ids: frozenset[str] | None = frozenset(), **drafts: list[int]) -> Any:
    """Return the engine core's message for a step.

    excluded_ids: requests whose rows the engine core does not request; None for all.
    """
    wanted = {} if excluded_ids is None else {REQUEST: (END_TOKEN, 1, tuple(excluded_ids), None)}
    return SimpleNamespace(logits=logits.clone(), scheduled_spec_decode_tokens=drafts, **wanted)


class Runner:
    """A model runner.

    v2: Model Runner V2, which computes its logits while it samples; V1 keeps them from the forward pass until then.
    later: asynchronous outputs.
    """

    def __init__(self, *, v2: bool = False, later: bool = False) -> None:
        self._v2, self._later = v2, later
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.execute_model_state: Any = None
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)

    def get_model(self) -> Any:
        return self.model

    def _prepare_inputs(self, scheduler_output: Any) -> None:
        """Stands for V1's method, which probe rows wrap; no step here has such rows."""

    def execute_model(self, scheduler_output: Any) -> None:
        given = {"logits": scheduler_output.logits, "scheduler_output": scheduler_output}
        if self._v2:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            rows = np.cumsum([0, *(1 + len(drafts.get(r, ())) for r in self.input_batch.req_ids)])
            batch = SimpleNamespace(req_ids=self.input_batch.req_ids, cu_num_logits_np=rows.astype(np.int32))
            given = {"hidden": scheduler_output.logits, "input_batch": batch}
        self.execute_model_state = SimpleNamespace(**given)

    def sample_tokens(self) -> Any:
        state, self.execute_model_state = self.execute_model_state, None
        logits = self.model.compute_logits(state.hidden) if self._v2 else state.logits
        output = SimpleNamespace(req_ids=self.input_batch.req_ids, sampled=logits.argmax(-1).tolist())
        logits.fill_(0.0)
        return SimpleNamespace(get_output=lambda: output) if self._later else output


def worker(device: str = "cpu", *, v2: bool = False, later: bool = False) -> Any:
    return SimpleNamespace(
        rank=0,
        device=SimpleNamespace(type=device, index=0),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        vllm_config=SimpleNamespace(
            speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=2, async_scheduling=False)
        ),
        use_v2_model_runner=v2,
        model_runner=Runner(v2=v2, later=later),
    )


def step(of: Any, scheduler_output: Any, req_ids: Sequence[str] = ("a", "b")) -> Any:
    """Run a worker's step and return its output to the engine core."""
    runner = of.model_runner
    runner.input_batch.req_ids = list(req_ids)
    runner.execute_model(scheduler_output)
    return runner.sample_tokens()
