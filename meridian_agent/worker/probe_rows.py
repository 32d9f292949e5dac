"""Computes EAT probes as further rows of logits in Model Runner V1, behind the rows that vLLM samples from.

vLLM never sees these rows: it samples from the same rows, in the same order, as without probes. Runs on the worker's
thread.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from meridian_agent.core.step_signals import PROBE_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ProbeRows:
    """The probe rows of one model runner, whose `_prepare_inputs` it wraps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # All rows of the newest step, those of its probes at the end; and the number of these.
        self.logits: Any = None
        self.count = 0
        prepare_inputs = runner._prepare_inputs

        @functools.wraps(prepare_inputs)
        def with_probes(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            probes = getattr(scheduler_output, PROBE_ROWS, None)
            if not probes:
                return prepare_inputs(scheduler_output, *args, **kwargs)
            rows = self._write(probes)
            last, *others = prepare_inputs(scheduler_output, *args, **kwargs)
            return self._indices(last, rows, [len(tokens) for tokens in probes.values()]), *others

        runner._prepare_inputs = with_probes

    def _write(self, probes: Mapping[str, Sequence[int]]) -> list[int]:
        """Write the tokens of each probe behind those of its request; return the rows of these requests."""
        batch = self._runner.input_batch
        rows = [batch.req_id_to_index[request_id] for request_id in probes]
        for row, tokens in zip(rows, probes.values(), strict=True):
            known = batch.num_tokens_no_spec[row]
            batch.token_ids_cpu[row, known : known + len(tokens)] = tokens
        self.count = len(rows)
        return rows

    @staticmethod
    def _indices(last: Any, rows: Sequence[int], tokens: Sequence[int]) -> Any:
        """Return the indices of the hidden states from which logits are computed: of each request's newest token, and
        then of each probe's last token. last: [requests] index of each request's last token in the step."""
        own, probed = len(last), list(rows)
        indices = last.new_empty(own + len(probed))
        indices[:own], indices[own:] = last, last[probed]
        indices[probed] -= last.new_tensor(list(tokens))
        return indices

    def split(self) -> None:
        """Keep all rows of the step's logits here, and leave vLLM those of its requests."""
        self.logits, count, self.count = None, self.count, 0
        state = self._runner.execute_model_state
        if not count or state is None or state.logits is None:
            return
        self.logits, own = state.logits, len(state.logits) - count
        hidden = state.sample_hidden_states[:own]
        self._runner.execute_model_state = state._replace(logits=self.logits[:own], sample_hidden_states=hidden)
