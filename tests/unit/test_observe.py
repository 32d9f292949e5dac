"""The worker role where tests on a real engine do not reach: outputs read a step later, workers that cannot measure.
The runner is a fake that only has vLLM's attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meridian_kernels import EntropyProbe

from meridian_agent.observe import REQUEST, RESULT, Wanted, attach, possible


class Runner:
    """Model Runner V1: logits wait in its state from the forward pass to sampling. later: asynchronous outputs."""

    def __init__(self, later: bool) -> None:
        self.later = later
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.execute_model_state: Any = None

    def execute_model(self, scheduler_output: Any) -> None:
        self.execute_model_state = SimpleNamespace(logits=scheduler_output.logits)

    def sample_tokens(self) -> Any:
        logits, self.execute_model_state = self.execute_model_state.logits, None
        logits.fill_(0.0)
        output = SimpleNamespace(req_ids=self.input_batch.req_ids)
        return SimpleNamespace(get_output=lambda: output) if self.later else output


def worker(later: bool, device: str) -> Any:
    return SimpleNamespace(
        rank=0,
        device=SimpleNamespace(type=device, index=0),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        vllm_config=SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=2)),
        model_runner=Runner(later),
    )


def step(runner: Runner, logits: torch.Tensor, not_of: frozenset[str] = frozenset(), **drafts: list[int]) -> Any:
    wanted = Wanted(3, not_of)
    runner.execute_model(
        SimpleNamespace(logits=logits.clone(), scheduled_spec_decode_tokens=drafts, **{REQUEST: wanted})
    )
    return runner.sample_tokens()


@pytest.mark.parametrize("later", [False, True])
def test_each_output_carries_its_own_step(later: bool) -> None:
    """Also when it is read after the next step was begun, and although sampling changes the logits."""
    own = worker(later, "cpu")
    attach(own, lambda v2_runner: "")
    batches = [torch.randn(2, 50) for _ in range(3)]
    outputs = [step(own.model_runner, batch) for batch in batches]
    for batch, output in zip(reversed(batches), reversed(outputs), strict=True):
        signals = getattr(output.get_output() if later else output, RESULT)
        want = EntropyProbe().compute_batch(batch, 3)
        np.testing.assert_array_equal(signals.entropy_nats, want.entropy_nats)
        np.testing.assert_array_equal(signals.end_rank, want.end_rank)


@pytest.mark.parametrize(
    ("drafts", "not_of", "measured"),
    [
        ({}, "b", [True, False]),
        ({}, "a", [False, True]),
        ({}, "ab", [False, False]),
        ({}, "x", [True, True]),
        ({"a": [7, 7]}, "a", [False, False, False, True]),
        ({"a": [7], "b": [7]}, "b", [True, True, False, False]),
        ({"b": [7]}, "", [True, True, True]),
    ],
)
def test_rows_that_nobody_asks_for_are_not_measured(
    drafts: dict[str, list[int]], not_of: str, measured: list[bool]
) -> None:
    """Those of the others are where they would be."""
    own = worker(False, "cpu")
    attach(own, lambda v2_runner: "")
    batch = torch.randn(len(measured), 50)
    # Reading such a row would give NaN in all columns but the rank.
    batch[~torch.tensor(measured)] = float("nan")
    signals = getattr(step(own.model_runner, batch, frozenset(not_of), **drafts), RESULT)
    want = EntropyProbe().compute_batch(batch, 3)
    np.testing.assert_array_equal(signals.entropy_nats, want.entropy_nats)
    np.testing.assert_array_equal(signals.end_logprob_nats, want.end_logprob_nats)
    np.testing.assert_array_equal(signals.end_rank, np.where(measured, want.end_rank, 0))
    assert [signals.row(i) for i in range(2)] == [0, 1 + len(drafts.get("a", []))]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("xpu", "there are no entropy kernels for xpu"),
        pytest.param(
            "cuda",
            "no entropy on cuda:0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_worker_that_cannot_measure_says_why(device: str, reason: str, later: bool) -> None:
    """On every output with requests, and serves on."""
    own = worker(later, device)
    attach(own, lambda v2_runner: "")
    output = step(own.model_runner, torch.randn(2, 50))
    assert reason in getattr(output.get_output() if later else output, RESULT)
    own.model_runner.input_batch.req_ids = []
    output = step(own.model_runner, torch.randn(2, 50))
    assert not hasattr(output.get_output() if later else output, RESULT)


def test_what_can_be_told_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert possible("cpu")
    assert not possible("xpu")
    for found in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert possible("cuda") == (found is not None)
