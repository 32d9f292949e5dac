"""Computes EAT probes as further rows of logits in a model runner, behind the rows that vLLM samples from.

vLLM never sees these rows: it samples from the same rows, in the same order, as without probes. Runs on the worker's
thread.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_agent.core.step_signals import PROBE_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


class ProbeRows:
    """The probe rows of one Model Runner V1, whose `_prepare_inputs` it wraps."""

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
                # A step with probes that ended with an error has not been sampled.
                self.count = 0
                return prepare_inputs(scheduler_output, *args, **kwargs)
            rows = self._write(probes)
            last, *others = prepare_inputs(scheduler_output, *args, **kwargs)
            indices = self._indices(len(last), rows, [len(tokens) for tokens in probes.values()])
            return last.new_tensor(indices), *others

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

    def _indices(self, own: int, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.int32]:
        """Return the indices of the hidden states from which logits are computed: of the newest token of each of the
        step's `own` requests, and then of each probe's last token.

        Operations on tensors would take several times as long between two steps of a large model, or wait for the GPU.
        """
        indices = np.empty(own + len(rows), np.int32)
        np.subtract(self._runner.query_start_loc.np[1 : own + 1], 1, out=indices[:own])
        for place, (row, count) in enumerate(zip(rows, tokens, strict=True), own):
            indices[place] = indices[row]
            indices[row] -= count
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


class ProbeRowsV2:
    """The probe rows of one Model Runner V2, whose `prepare_inputs` and `sample` it wraps, and its model's
    `compute_logits`.

    V2 knows of no draft tokens, so it takes a request's last place in the step for the place of its newest token, and
    all places for computed. `prepare_inputs` gets the places right, and `sample` says that the probes' tokens are
    rejected, so that the worker's count of computed tokens stays the engine core's.
    """

    def __init__(self, runner: Any) -> None:
        # All rows of the newest logits, those of the step's probes at the end; None if there are no such rows.
        self.logits: Any = None
        # The step's probes: the index of each one's hidden state, and the number of appended tokens of each request of
        # the batch; None without probes. The hidden states are there while vLLM samples.
        self._step: tuple[Any, Any] | None = None
        self._hidden: Any = None
        prepare_inputs, sample, compute_logits = runner.prepare_inputs, runner.sample, runner.model.compute_logits

        @functools.wraps(prepare_inputs)
        def prepare_with_probes(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            batch = prepare_inputs(scheduler_output, *args, **kwargs)
            probes = getattr(scheduler_output, PROBE_ROWS, None)
            self._step = self._append(batch, probes) if probes else None
            return batch

        @functools.wraps(sample)
        def sample_without_probes(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            step, self._step = self._step, None
            if step is None:
                return sample(hidden_states, *args, **kwargs)
            places, appended = step
            self._hidden = hidden_states[places]
            output, sampled, rejected = sample(hidden_states, *args, **kwargs)
            return output, sampled, rejected + appended

        @functools.wraps(compute_logits)
        def compute_with_probes(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            hidden, self._hidden, self.logits = self._hidden, None, None
            if hidden is None:
                return compute_logits(hidden_states, *args, **kwargs)
            own = len(hidden_states)
            both = hidden_states.new_empty(own + len(hidden), hidden_states.shape[-1])
            both[:own], both[own:] = hidden_states, hidden
            self.logits = compute_logits(both, *args, **kwargs)
            return self.logits[:own]

        runner.prepare_inputs, runner.sample = prepare_with_probes, sample_without_probes
        runner.model.compute_logits = compute_with_probes

    @staticmethod
    def _append(batch: Any, probes: Mapping[str, Sequence[int]]) -> tuple[Any, Any]:
        """Write the tokens of each probe behind the newest token of its request, and let vLLM sample from the latter's
        row. Return the index of each probe's hidden state, and the number of appended tokens of each request."""
        row_of = {request_id: row for row, request_id in enumerate(batch.req_ids)}
        rows, counts = [row_of[request_id] for request_id in probes], [len(tokens) for tokens in probes.values()]
        ends = [int(batch.query_start_loc_np[row + 1]) for row in rows]
        newest = [end - count - 1 for end, count in zip(ends, counts, strict=True)]
        own, ids = batch.logits_indices, batch.input_ids
        last, first, of = own.new_tensor([end - 1 for end in ends]), own.new_tensor(newest), own.new_tensor(rows)
        # V2 has written the newest token to the last place.
        ids[first] = ids[last]
        places = [start + i for start, count in zip(newest, counts, strict=True) for i in range(1, count + 1)]
        ids[own.new_tensor(places)] = ids.new_tensor([token for tokens in probes.values() for token in tokens])
        own[of] = first
        appended = batch.seq_lens.new_zeros(len(batch.req_ids))
        appended[of] = appended.new_tensor(counts)
        return last, appended
