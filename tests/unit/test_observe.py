"""The worker role where tests on a real engine do not reach: outputs read a step later, workers that cannot measure.
The runner is a fake that only has vLLM's attributes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meridian_kernels import EntropyProbe

from meridian_agent.observe import RESULT, attach, possible
from tests.fakes.worker import END_TOKEN, asked, step, worker


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_each_output_carries_its_own_step(later: bool, v2: bool) -> None:
    """Also when it is read after the next step was begun, and although sampling changes the logits."""
    own = worker(later=later, v2=v2)
    attach(own, lambda v2_runner: "")
    batches = [torch.randn(2, 50) for _ in range(3)]
    outputs = [step(own, asked(batch)) for batch in batches]
    for batch, output in zip(reversed(batches), reversed(outputs), strict=True):
        signals = getattr(output.get_output() if later else output, RESULT)
        want = EntropyProbe().compute_batch(batch, END_TOKEN)
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
    own = worker()
    attach(own, lambda v2_runner: "")
    batch = torch.randn(len(measured), 50)
    # Reading such a row would give NaN in all columns but the rank.
    batch[~torch.tensor(measured)] = float("nan")
    signals = getattr(step(own, asked(batch, frozenset(not_of), **drafts)), RESULT)
    want = EntropyProbe().compute_batch(batch, END_TOKEN)
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
    own = worker(device, later=later)
    attach(own, lambda v2_runner: "")
    output = step(own, asked(torch.randn(2, 50)))
    assert reason in getattr(output.get_output() if later else output, RESULT)
    output = step(own, asked(torch.randn(2, 50)), req_ids=())
    assert not hasattr(output.get_output() if later else output, RESULT)


def test_what_can_be_told_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert possible("cpu")
    assert not possible("xpu")
    for found in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert possible("cuda") == (found is not None)
