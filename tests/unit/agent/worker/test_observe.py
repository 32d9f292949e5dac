"""The worker role in cases that tests on a real engine do not reach: outputs that are read a step later, and workers
that cannot measure. The runner is a fake that has only vLLM's attributes."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meridian_kernels import EntropyProbe, RowSignals, reference, torch_ops
from numpy.typing import NDArray

from meridian_agent.core import guard
from meridian_agent.core.step_signals import (
    BACKEND,
    OF_THE_START,
    PROBE_ROWS,
    REQUEST,
    RESULT,
    StepSignals,
    WorkerRequest,
    WorkerRequestDecoder,
    WorkerRequestEncoder,
    expected_backend,
)
from meridian_agent.worker.attach import attach
from meridian_agent.worker.observer import Observer
from meridian_agent.worker.probe_rows import ProbeRows
from tests.fakes.worker import END_TOKEN, asked, step, worker


def signals_of(batch: torch.Tensor) -> RowSignals:
    """Return the signals of all rows, from a probe like the worker's."""
    probe = EntropyProbe()
    probe.compile()
    return probe.begin(batch, END_TOKEN).result()


def observed(own: Any) -> Any:
    """Return the worker with an observer, and without rows for probes."""
    attach(own, lambda v2_runner: "", lambda v2_runner: "no rows")
    return own


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_each_output_carries_its_own_step(later: bool, v2: bool) -> None:
    """An output has the signals of its own step, even if it is read after the next step has begun, and although
    sampling changes the logits."""
    own = observed(worker(later=later, v2=v2))
    batches = [torch.randn(2, 50) for _ in range(3)]
    outputs = [step(own, asked(batch)) for batch in batches]
    for batch, output in zip(reversed(batches), reversed(outputs), strict=True):
        signals = StepSignals.decode(getattr(output.get_output() if later else output, RESULT))
        want = signals_of(batch)
        np.testing.assert_array_equal(signals.entropy_nats, want.entropy_nats)
        np.testing.assert_array_equal(signals.end_rank, want.end_rank)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_steps_without_a_request_are_left_alone(later: bool, v2: bool) -> None:
    """A step that asks for nothing carries nothing, and the next one that asks is measured by its own logits."""
    own = observed(worker(later=later, v2=v2))
    for excluded_ids in (frozenset[str](), None, None, frozenset("b"), None, frozenset("ab")):
        batch = torch.randn(2, 50)
        output = step(own, asked(batch, excluded_ids))
        told = vars(output.get_output() if later else output)
        if excluded_ids is None:
            assert told.keys() == {"req_ids", "sampled"}
            continue
        signals, want = StepSignals.decode(told[RESULT]), signals_of(batch)
        measured = ["a" not in excluded_ids, "b" not in excluded_ids]
        np.testing.assert_array_equal(signals.entropy_nats, np.where(measured, want.entropy_nats, np.nan))


def test_a_worker_is_idle_once_nothing_is_left_to_do() -> None:
    observer = Observer(SimpleNamespace())
    assert observer.begins_idle(SimpleNamespace())
    assert not observer.begins_idle(SimpleNamespace(**{REQUEST: (END_TOKEN, 1, (), None)}))
    assert not observer.begins_idle(SimpleNamespace(**{PROBE_ROWS: {"a": [END_TOKEN]}}))
    # The logits of a step with probes, which take a GPU's memory, are released in the step after it.
    rows = observer.probe_rows = ProbeRows(SimpleNamespace(_prepare_inputs=None, execute_model_state=None))
    rows.logits = torch.zeros(3, 50)
    assert not observer.begins_idle(SimpleNamespace())
    rows.split()
    assert observer.begins_idle(SimpleNamespace())


def test_a_fault_and_its_end_are_each_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no step asks for anything any more when the worker has recovered."""
    monkeypatch.setattr(guard, "RESTS_S", (0.0,))
    own = observed(worker())
    faulty = asked(torch.randn(2, 50))
    # The rows that vLLM samples from cannot be measured.
    faulty.scheduled_spec_decode_tokens = None
    own.model_runner.execute_model(faulty)
    own.model_runner.execute_model_state.scheduler_output = None
    assert "before_sampling" in getattr(own.model_runner.sample_tokens(), RESULT)
    told = [vars(step(own, asked(torch.randn(2, 50), None))).get(RESULT) for _ in range(3)]
    assert told == ["", None, None]


@pytest.mark.parametrize(
    ("drafts", "excluded_ids", "measured"),
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
    drafts: dict[str, list[int]], excluded_ids: str, measured: list[bool]
) -> None:
    """The rows that are measured stay at their places."""
    own = observed(worker())
    batch = torch.randn(len(measured), 50)
    # Measuring such a row would give NaN in all columns but the rank.
    batch[~torch.tensor(measured)] = float("nan")
    signals = StepSignals.decode(getattr(step(own, asked(batch, frozenset(excluded_ids), **drafts)), RESULT))
    want = signals_of(batch)
    np.testing.assert_array_equal(signals.entropy_nats, want.entropy_nats)
    np.testing.assert_array_equal(signals.end_logprob_nats, want.end_logprob_nats)
    np.testing.assert_array_equal(signals.top_logprob_nats, want.top_logprob_nats)
    np.testing.assert_array_equal(signals.end_rank, np.where(measured, want.end_rank, 0))
    assert [signals.row(i) for i in range(2)] == [0, 1 + len(drafts.get("a", []))]


@pytest.mark.parametrize("v2", [False, True])
def test_first_rows_are_told_of_only_where_there_are_drafts(v2: bool) -> None:
    """The engine core accounts an output without first rows as a whole."""
    own = observed(worker(v2=v2))
    steps: list[dict[str, list[int]]] = [{}, {"a": [7]}, {}]
    for drafts in steps:
        told = getattr(step(own, asked(torch.randn(2 + len(drafts), 50), frozenset(), **drafts)), RESULT)
        assert isinstance(told, tuple) == bool(drafts)
        assert [StepSignals.decode(told).row(i) for i in range(2)] == [0, 1 + len(drafts)]


def test_rows_are_those_of_the_drafts_that_the_runner_has() -> None:
    """Model Runner V1 counts the drafts that a GPU made itself, in a copy of the engine core's message, which may have
    fewer drafts."""
    own = worker()
    execute = own.model_runner.execute_model
    own.model_runner.execute_model = lambda sent: execute(
        SimpleNamespace(**{**vars(sent), "scheduled_spec_decode_tokens": {"b": [7]}})
    )
    observed(own)
    batch = torch.randn(3, 50)
    signals = StepSignals.decode(getattr(step(own, asked(batch, frozenset("a"), a=[7, 7], b=[7])), RESULT))
    want = signals_of(batch)
    assert [signals.row(i) for i in range(2)] == [0, 1]
    np.testing.assert_array_equal(signals.entropy_nats, np.where([False, True, True], want.entropy_nats, np.nan))


def test_rows_follow_the_requests_and_what_is_asked_of_them() -> None:
    """In most steps neither the requests nor the excluded ids change, and then one of the two does."""
    own, asking = observed(worker()), WorkerRequestEncoder()
    left_out = frozenset("a"), frozenset("b")
    steps = [("ab", 0), ("ab", 0), ("ba", 0), ("b", 0), ("bc", 0), ("bc", 1), ("bc", 1), ("cb", 1), ("cb", 0)]
    for req_ids, which in steps:
        begun = asked(torch.randn(len(req_ids), 50), None)
        setattr(begun, REQUEST, asking.request(END_TOKEN, {*req_ids}, left_out[which]))
        signals = StepSignals.decode(getattr(step(own, begun, req_ids), RESULT))
        measured = [r not in left_out[which] for r in req_ids]
        assert (~np.isnan(signals.entropy_nats)).tolist() == measured


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
    """A worker that cannot measure gives the reason with every output that has requests, and goes on serving."""
    own = observed(worker(device, later=later))
    output = step(own, asked(torch.randn(2, 50)))
    assert reason in getattr(output.get_output() if later else output, RESULT)
    output = step(own, asked(torch.randn(2, 50)), req_ids=())
    assert not hasattr(output.get_output() if later else output, RESULT)


@pytest.mark.parametrize(
    ("of", "feature", "name"),
    [
        (lambda own: own.parallel_config, {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        (
            lambda own: own.vllm_config,
            {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
            "adaptive verification",
        ),
        (lambda own: own.model_runner, {"batch_sharder": object()}, "batch-sharded sampling"),
    ],
)
def test_rows_whose_request_is_not_known_are_not_measured(
    of: Callable[[Any], Any], feature: dict[str, Any], name: str
) -> None:
    """Such rows are not measured rather than reported for another request, and the engine core gets the reason."""
    own = worker(v2=True)
    vars(of(own)).update(feature)
    observed(own)
    told = getattr(step(own, asked(torch.randn(2, 50))), RESULT)
    assert told == f"KernelError: with {name} a worker cannot tell which request a row of logits belongs to"


def test_what_can_be_told_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expected_backend("cpu") == ("cpu", "")
    assert expected_backend("xpu") == ("none", "there are no entropy kernels for xpu")
    for found, expected in ((None, "torch"), (object(), "cuda")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        backend, why = expected_backend("cuda")
        assert (backend, bool(why)) == (expected, found is None)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_a_gpu_without_cupy_is_measured_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, later: bool, v2: bool
) -> None:
    """Torch's operations give the same columns, and the engine core learns what measures. The test needs no GPU: it
    gives torch's operations the CPU as their device."""
    operations = torch_ops.TorchOps
    monkeypatch.setitem(sys.modules, "cupy", None)
    rows = list[int]()

    def on_the_cpu(device: str, max_rows: int) -> Any:
        rows.append(max_rows)
        return operations("cpu", max_rows, 1000)

    monkeypatch.setattr(torch_ops, "TorchOps", on_the_cpu)
    caplog.set_level(logging.INFO, "vllm.meridian")
    monkeypatch.setattr(logging.getLogger("vllm.meridian"), "propagate", True)
    own = observed(worker("cuda", later=later, v2=v2))
    assert "slower than the CUDA kernel: ModuleNotFoundError" in caplog.text
    assert rows == [2 * own.vllm_config.scheduler_config.max_num_seqs], "each request may have a probe as a row"
    batch = torch.randn(2, 50)
    output = step(own, asked(batch, frozenset("b")))
    output = output.get_output() if later else output
    signals, want = StepSignals.decode(getattr(output, RESULT)), reference(batch.numpy(), END_TOKEN)
    np.testing.assert_allclose(signals.entropy_nats, [want.entropy_nats[0], np.nan], rtol=0, atol=1e-5)
    assert signals.end_rank.tolist() == [want.end_rank[0], 0]
    backend, why, *_ = getattr(output, BACKEND)
    assert backend == "torch"
    assert "cupy" in why


def test_what_measures_is_told_with_the_first_output_after_names() -> None:
    """An agent sends the excluded ids when it begins; only the output after that names the backend."""
    own, asking = observed(worker()), WorkerRequestEncoder()
    told, left_out = [], frozenset("a")
    for agent in (asking, asking, WorkerRequestEncoder()):
        begun = asked(torch.randn(2, 50), None)
        setattr(begun, REQUEST, agent.request(END_TOKEN, {"a", "b"}, left_out))
        told.append(getattr(step(own, begun), BACKEND, None))
    assert told[1] is None
    assert told[0] == told[2] == ("cpu", "", False, OF_THE_START)


def request(
    asking: WorkerRequestEncoder, excluded_ids: str, ids: str = "abc", probes: str = "", end: int = 3
) -> WorkerRequest:
    """Return the request for a step of the requests `ids`, each of which has a letter as its id."""
    asked = asking.request(end, {*ids}, {*excluded_ids}, probes)
    assert asked is not None
    return asked


def test_names_go_out_when_they_have_changed() -> None:
    asking, asked = WorkerRequestEncoder(), WorkerRequestDecoder()
    sent = [request(asking, "ab"), request(asking, "ab"), request(asking, "ab", end=4), request(asking, "b", end=4)]
    assert [(end, names is None) for end, _, names, _ in sent] == [(3, False), (3, True), (4, True), (4, False)]
    assert [asked.excluded_ids(each) for each in sent] == [{"a", "b"}, {"a", "b"}, {"a", "b"}, {"b"}]
    assert request(asking, "b", end=4) is request(asking, "b", end=4)


def test_only_names_of_the_step_go_out() -> None:
    """Requests that wait cost a step nothing. In a pipeline the batches take turns, and need no new list each time."""
    asking = WorkerRequestEncoder()
    waiting = "vwxyz"
    assert asking.request(3, {"a", "v"}, {*"av", *waiting}) is None
    steps = [("abc", "a"), ("def", "ad"), ("abc", "ad"), ("def", "ad"), ("bcd", "d"), ("bcf", "f"), ("adg", "f")]
    names = [request(asking, excluded_ids + waiting, ids)[2] for ids, excluded_ids in steps]
    assert [None if each is None else {*each} for each in names] == [{"a"}, {"a", "d"}, None, None, None, {"f"}, None]


def test_rows_are_measured_whose_names_were_lost() -> None:
    asking, asked = WorkerRequestEncoder(), WorkerRequestDecoder()
    asked.excluded_ids(request(asking, "a"))
    request(asking, "b")
    assert asked.excluded_ids(request(asking, "b")) == frozenset()
    # Another agent in the same engine begins anew, and sends all its excluded ids.
    assert asked.excluded_ids(request(WorkerRequestEncoder(), "b")) == {"b"}


def test_sentence_flags_go_out_once() -> None:
    """The flags have a byte for each token id. Steps with a probe that is a request of its own ask for all tokens."""
    asking, asked = WorkerRequestEncoder(), WorkerRequestDecoder()
    assert asked.flags(request(asking, "a")) is None
    asking.flags = bytes([0, 5])
    sent = [request(asking, "a"), request(asking, "a"), request(asking, "a", probes="p"), request(asking, "a")]
    assert [(names is None, flags) for _, _, names, flags in sent] == [
        (False, asking.flags),
        (True, b""),
        (True, None),
        (True, b""),
    ]
    # No larger id ends a sentence.
    expected = [[0, 5, 0], [0, 5, 0], None, [0, 5, 0]]
    assert [None if (flags := asked.flags(each)) is None else flags.tolist() for each in sent] == expected
    assert [asked.excluded_ids(each) for each in sent] == [{"a"}] * 4
    assert WorkerRequestDecoder().flags(sent[1]) is None, "all tokens are measured if the flags never arrived"
    asking.flags = b""
    assert request(asking, "b") == (3, 3, ("b",), None)


@pytest.mark.parametrize("first_row", [None, np.array([0, 3], np.int32)])
def test_what_is_told_is_what_was_measured(first_row: NDArray[np.int32] | None) -> None:
    logprobs = np.array([[-1, 0], [-0.5, np.nan]], np.float32)
    columns = np.array([0.5, np.nan], np.float32), np.array([7, 2**31 - 1], np.int32), *logprobs
    told = StepSignals(first_row, *columns).encode()
    assert isinstance(told, bytes) == (first_row is None)
    found = StepSignals.decode(pickle.loads(pickle.dumps(told)))
    decoded = found.entropy_nats, found.end_rank, found.end_logprob_nats, found.top_logprob_nats
    for column, want in zip(decoded, columns, strict=True):
        np.testing.assert_array_equal(column, want)
        assert column.dtype == want.dtype
    assert [found.row(i) for i in range(2)] == ([0, 1] if first_row is None else [0, 3])
