"""Where a probe may be a row of its request, and what a step leaves behind. Tests on real engines check the values and
the tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import Directives
from meridian_agent.core.phases import FLAG_GOES_ON, FLAG_SENTENCE
from meridian_agent.core.probe_admission import Placed
from meridian_agent.core.step_record import Outcome
from meridian_agent.core.step_signals import PROBE_ROWS, PROBED
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.vllm_adapter import probe_rows
from meridian_agent.worker.probe_rows import ProbeRows, ProbeRowsV2
from tests.fakes.engine import MARKERS, opened

BLOCK = 16


def request(tokens: int, **changed: Any) -> Any:
    """Return a request of vLLM's that decodes: all its tokens but the newest one are computed."""
    decoding = {"num_computed_tokens": tokens - 1, "is_prefill_chunk": False, "structured_output_request": None}
    own = {"request_id": "r", "num_tokens": tokens, "mm_features": [], "spec_token_ids": []}
    own["status"] = SimpleNamespace(name="RUNNING")
    params = SimpleNamespace(all_stop_token_ids=set())
    return SimpleNamespace(**{**own, **decoding, "sampling_params": params, **changed})


def scheduler(connector: Any = None) -> Any:
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    return SimpleNamespace(connector=connector, block_size=BLOCK, max_model_len=100, vllm_config=config)


@pytest.mark.parametrize(
    "unfit",
    [
        {"num_computed_tokens": 30},
        {"num_computed_tokens": 0},
        {"is_prefill_chunk": True},
        {"status": SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")},
        {"structured_output_request": object()},
        {"mm_features": [object()]},
    ],
)
def test_only_plain_requests_that_decode_get_rows(unfit: dict[str, Any]) -> None:
    assert probe_rows.fits(scheduler(), request(40), 1)
    assert not probe_rows.fits(scheduler(), request(40, **unfit), 1)


def test_a_row_stays_within_the_longest_request() -> None:
    assert probe_rows.fits(scheduler(), request(97), 2)
    assert not probe_rows.fits(scheduler(), request(98), 2)


@pytest.mark.parametrize("tokens", range(30, 66))
def test_beside_a_connector_no_row_fills_a_block(tokens: int) -> None:
    """The place of the appended token is number `tokens`, counted from 0."""
    last_of_block = tokens % BLOCK == BLOCK - 1
    assert probe_rows.fits(scheduler(object()), request(tokens), 1) == (not last_of_block)
    assert probe_rows.fits(scheduler(), request(tokens), 1)


@pytest.mark.parametrize("computed", [0, 1, 2])
def test_a_step_takes_back_what_it_computes(computed: int) -> None:
    """vLLM may cut the appended tokens, or leave the request out of the step."""
    one, engine = request(40), scheduler()
    engine.requests, engine.running, engine.num_spec_tokens = {"r": one}, [one], 0
    probe_rows.append(one, (7, 8))
    assert one.spec_token_ids == [7, 8]
    drafts = {"r": [7, 8][:computed]} if computed else {}
    one.num_computed_tokens += 1 + computed
    output = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    assert probe_rows.take_back(engine, output) == drafts
    assert output.scheduled_spec_decode_tokens == {}
    assert getattr(output, PROBE_ROWS, {}) == drafts
    assert probe_rows.take_back(engine, output) == {}
    probe_rows.forget(engine)
    assert (one.num_computed_tokens, one.spec_token_ids) == (40, [])


def test_draft_tokens_stay_in_vllms_books() -> None:
    output = SimpleNamespace(scheduled_spec_decode_tokens={"r": [7]})
    assert probe_rows.take_back(SimpleNamespace(num_spec_tokens=1), output) == {}
    assert output.scheduled_spec_decode_tokens == {"r": [7]}


class Runner:
    """A model runner with three requests, which computes the logits of the rows that it is told to."""

    def __init__(self) -> None:
        ids = torch.zeros(3, 64, dtype=torch.int32).numpy()
        self.input_batch = SimpleNamespace(
            req_id_to_index={"a": 0, "b": 1, "c": 2}, num_tokens_no_spec=[10, 20, 30], token_ids_cpu=ids
        )
        self.execute_model_state: Any = None
        # The places after the requests' own say where the step ends, as in vLLM.
        self.query_start_loc = SimpleNamespace(np=np.zeros(6, np.int32))

    def _prepare_inputs(self, output: Any, tokens: list[int]) -> tuple[Any, None, int]:
        starts = self.query_start_loc.np
        starts[1:4] = np.cumsum(tokens)
        starts[4:] = starts[3]
        return torch.from_numpy(starts[1:4].copy()) - 1, None, 1


class State(SimpleNamespace):
    def _replace(self, **changed: Any) -> State:
        return State(**{**vars(self), **changed})


def test_the_worker_samples_from_the_rows_of_the_requests() -> None:
    runner: Any = Runner()
    rows = ProbeRows(runner)
    output = SimpleNamespace(scheduled_spec_decode_tokens={}, **{PROBE_ROWS: {"c": [7, 8], "a": [7]}})
    indices, metadata, most = runner._prepare_inputs(output, [2, 1, 3])
    # The step has 6 tokens: a's newest one and 7, b's newest one, c's newest one and 7 and 8.
    assert indices.tolist() == [0, 2, 3, 5, 1]
    assert (metadata, most) == (None, 1)
    written = runner.input_batch.token_ids_cpu
    assert (written[0, 10], written[2, 30], written[2, 31], written.sum()) == (7, 7, 8, 22)
    logits = torch.arange(10).reshape(5, 2)
    runner.execute_model_state = State(logits=logits, sample_hidden_states=logits)
    rows.split()
    assert torch.equal(rows.logits, logits)
    assert torch.equal(runner.execute_model_state.logits, logits[:3])
    assert torch.equal(runner.execute_model_state.sample_hidden_states, logits[:3])


def test_a_step_without_probes_is_left_alone() -> None:
    runner: Any = Runner()
    rows = ProbeRows(runner)
    output = SimpleNamespace(scheduled_spec_decode_tokens={})
    indices, *_ = runner._prepare_inputs(output, [1, 1, 4])
    assert indices.tolist() == [0, 1, 5]
    state = runner.execute_model_state = State(logits=torch.zeros(3, 2))
    rows.split()
    assert rows.logits is None
    assert runner.execute_model_state is state


class RunnerV2:
    """A Model Runner V2 that puts each request's newest token in its last place of the step and samples from there."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(compute_logits=lambda hidden: 10 * hidden)
        self.sampled: Any = None

    def prepare_inputs(self, output: Any, tokens: dict[str, int]) -> Any:
        ends = torch.tensor([0, *tokens.values()]).cumsum(0)
        last, ids = ends[1:] - 1, torch.zeros(8, dtype=torch.int32)
        ids[last] = torch.tensor([100 + row for row in range(len(tokens))], dtype=torch.int32)
        lengths = torch.tensor(list(tokens.values()), dtype=torch.int32)
        return SimpleNamespace(
            req_ids=list(tokens), query_start_loc_np=ends.numpy(), logits_indices=last, input_ids=ids, seq_lens=lengths
        )

    def sample(self, hidden: Any, batch: Any) -> Any:
        self.sampled = self.model.compute_logits(hidden[batch.logits_indices])
        return "output", torch.ones(3), torch.zeros(3, dtype=torch.int32)


def test_runner_v2_samples_from_the_newest_token_and_rejects_the_probes() -> None:
    runner: Any = RunnerV2()
    rows = ProbeRowsV2(runner)
    hidden = torch.arange(6.0).reshape(6, 1)
    output = SimpleNamespace(**{PROBE_ROWS: {"c": [7, 8], "a": [9]}})
    # V2 orders requests by their tokens: b's newest token; a's and 9; c's, 7 and 8.
    batch = runner.prepare_inputs(output, {"b": 1, "a": 2, "c": 3})
    assert batch.input_ids.tolist() == [100, 101, 9, 102, 7, 8, 0, 0]
    assert batch.logits_indices.tolist() == [0, 1, 3]
    said, sampled, rejected = runner.sample(hidden, batch)
    assert (said, sampled.tolist(), rejected.tolist()) == ("output", [1, 1, 1], [0, 1, 2])
    assert runner.sampled.flatten().tolist() == [0, 10, 30]
    assert rows.logits.flatten().tolist() == [0, 10, 30, 50, 20], "the probes' rows come in the engine core's order"
    # The next step has no probes.
    batch = runner.prepare_inputs(SimpleNamespace(), {"b": 1, "a": 1, "c": 1})
    assert batch.logits_indices.tolist() == [0, 1, 2]
    assert runner.sample(hidden, batch)[2].tolist() == [0, 0, 0]
    assert rows.logits is None


def test_a_probe_of_a_request_that_was_aborted_during_its_step_is_over() -> None:
    """The sentence goes on, so that the probe would wait for another end, which never comes."""
    tracker = Tracker(MARKERS)
    live, directives = opened(tracker, "r", ref=request(40)), Directives(tracker)
    probing = ProbeRunner(tracker, directives, BLOCK, True)
    probing.computed.append(Placed(5, live, 1, 0, cost_tokens=1, flags=FLAG_SENTENCE))
    tracker.sentences = cast("Any", SimpleNamespace(step=lambda *_: 0, flags=[FLAG_GOES_ON]))
    tracker.close(live, agent_pb2.FINISH_REASON_ABORT)
    step = {"req_id_to_index": {"r": 0}, "sampled_token_ids": [[3]], PROBED: [(0.5, 7)]}
    assert not probing.collect_rows(SimpleNamespace(**step))
    assert not directives.probes
    assert [outcome for _, outcome, *_ in tracker.record.outcomes] == [Outcome.REQUEST_GONE]


def test_a_probe_whose_request_is_left_out_of_the_step_waits_for_it() -> None:
    tracker = Tracker(MARKERS)
    live, directives = opened(tracker, "r", ref=request(40)), Directives(tracker)
    tracker.feed(live, [3], 0)
    probing = ProbeRunner(tracker, directives, BLOCK, True)
    probing.rows_possible = True
    engine = scheduler()
    engine.requests, engine.running, engine.num_spec_tokens = {"r": live.ref}, [live.ref], 0
    engine.max_num_scheduled_tokens, engine.current_step = 512, 1
    engine.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 100))
    directives.probes.add(agent_pb2.EatProbe(decision_id=5, slot=live.slot), live)
    for step in range(2):
        assert probing.place(engine, True) == []
        assert list(probing.rows) == ["r"]
        assert live.ref.spec_token_ids == [2]
        scheduled = {"r": live.ref.spec_token_ids} if step else {}
        live.ref.num_computed_tokens += 2 * step
        probing.take_rows(engine, SimpleNamespace(scheduled_spec_decode_tokens=scheduled))
        assert len(directives.probes) == 1 - step
        live.ref.spec_token_ids = []
    assert tracker.record.outcomes == []
    directives.probes.add(agent_pb2.EatProbe(decision_id=6, slot=live.slot, hold_ms=5), live)
    assert not probing.place_rows(engine, {live: 0}), "the request is to wait for the decision"
    assert [decision_id for decision_id, *_ in directives.probes] == [6], "a full look places it"
    probing.collect_rows(SimpleNamespace(**{PROBED: [(0.5, 7)]}))
    assert [outcome for _, outcome, *_ in tracker.record.outcomes] == [Outcome.APPLIED]
    assert [(slot, eat_nats) for _, slot, _, eat_nats, *_ in tracker.record.probes] == [(live.slot, 0.5)]
