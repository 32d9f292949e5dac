"""The kernels' public API: a request's EAT from call to call, arrays of every kind, every wrong argument, and a missing
GPU."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meridian_kernels import EntropyProbe, EntropySignal, KernelError, cuda, eat, reference, torch_ops
from numpy.typing import NDArray

from meridian_control.engine.request_table import RequestTable
from tests.fakes.tables import add_sample

NATS = 1e-5
VOCAB = 1000
RNG = np.random.default_rng(7)


def logits_of(rows: int, scale: float = 4.0) -> NDArray[np.float32]:
    return (scale * RNG.standard_normal((rows, VOCAB))).astype(np.float32)


def entropy(row: NDArray[Any]) -> float:
    """Compute H = -sum p ln p in float64, without the code under test."""
    x = row.astype(np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


# ---------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("ema_alpha", [0.075, 0.2, 1.0])
def test_eat_and_its_variance_follow_a_request(ema_alpha: float) -> None:
    """Two requests match the recurrence in float64, one row at a time and in batches."""
    probe = EntropyProbe(think_end_token_ids=[7, 8], ema_alpha=ema_alpha)
    mean, variance = [math.nan, math.nan], [math.nan, math.nan]
    for n in range(30):
        rows = logits_of(2, 1 + n % 5)
        for r in range(2):
            x = entropy(rows[r])
            mean[r] = x if n == 0 else ema_alpha * x + (1 - ema_alpha) * mean[r]
            variance[r] = 0.0 if n == 0 else ema_alpha * (x - mean[r]) ** 2 + (1 - ema_alpha) * variance[r]
        if n % 2:
            batch = probe.compute_batch(["a", "b"], rows)
            assert len(batch) == 2
            got = list(batch)
        else:
            got = [probe.compute("a", rows[0]), probe.compute("b", torch.from_numpy(rows[1]))]
        for r in range(2):
            assert isinstance(got[r], EntropySignal)
            assert float(got[r].token_entropy) == pytest.approx(entropy(rows[r]), abs=NATS)
            assert float(got[r].eat) == float(got[r].token_entropy) == float(got[r].entropy_nats)
            assert float(got[r].eat_ema_variance) == pytest.approx(variance[r], abs=NATS)
            assert int(got[r].end_rank) == reference(rows[[r]], [7, 8]).end_rank[0]


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_doubles_are_rounded_to_singles(make: Any) -> None:
    """NumPy makes doubles unless it is told otherwise, so the probe takes doubles and rounds them."""
    row = logits_of(1, 3)[0].astype(np.float64)
    got = EntropyProbe(0).compute("a", make(row))
    assert float(got.token_entropy) == pytest.approx(entropy(row), abs=NATS)


def test_the_numbers_are_the_control_planes() -> None:
    """EAT is bit for bit what `meridian_control.engine.signals` computes from the samples that an agent would
    report."""
    probe, table = EntropyProbe(0, ema_alpha=0.2), RequestTable(window_tokens=8)
    for n in range(40):
        row = logits_of(1, 1 + n % 7)[0]
        if n == 11:
            row[3] = math.nan
        got = probe.compute("a", row)
        add_sample(table, 0, float(got.entropy_nats), 0.2, 1)
        assert float(got.eat) == table.eat_nats[0]
        assert float(got.eat_ema_variance) == table.eat_ema_variance[0]


def test_rows_that_come_after_no_end_marker_are_no_samples() -> None:
    """A row after no end marker has a token entropy and leaves EAT as it is, which is NaN before the first sample. A
    row with NaN in it also leaves EAT as it is."""
    probe, rows = EntropyProbe(0), logits_of(4)
    first = probe.compute("a", rows[0], after_end_marker=False)
    assert float(first.token_entropy) == pytest.approx(entropy(rows[0]), abs=NATS)
    assert math.isnan(first.eat)
    assert math.isnan(first.eat_ema_variance)
    sample = probe.compute("a", rows[1])
    mixed = probe.compute_batch(["a", "b"], rows[2:], after_end_marker=[False, True])
    assert mixed.eat.tolist() == [float(sample.eat), float(mixed.entropy_nats[1])]
    assert mixed.eat_ema_variance.tolist() == [0.0, 0.0]
    rows[3, 5] = math.nan
    unfit = probe.compute("a", rows[3])
    assert math.isnan(unfit.token_entropy)
    assert (float(unfit.eat), float(unfit.eat_ema_variance)) == (float(sample.eat), 0.0)


def test_a_request_is_forgotten() -> None:
    """A request is forgotten when the caller says so, or when more requests are sampled than are kept; the others keep
    their values."""
    probe, rows = EntropyProbe(0), logits_of(2, 1)
    for req_id in ("a", "b"):
        probe.compute(req_id, rows[0])
    probe.forget("a")
    probe.forget("never seen")
    assert probe.compute("a", rows[1]).eat_ema_variance == 0
    assert probe.compute("b", rows[1]).eat_ema_variance > 0
    history = eat.EatHistory(0.2, max_requests=3)
    for req_id in ("a", "b", "c", "a", "d"):
        history.add(req_id, 1.0)
    assert [math.isnan(history.of(r).newest) for r in "abcd"] == [False, True, False, False]


def test_what_is_refused_leaves_no_trace() -> None:
    probe, rows = EntropyProbe(0), logits_of(2, 1)
    before = probe.compute_batch(["a", "b"], rows)
    for req_ids, flags in ((["a"], True), (["a", "a"], True), (["a", "b"], [True]), (["a", 3], True)):
        with pytest.raises(KernelError):
            probe.compute_batch(req_ids, rows[::-1].copy(), after_end_marker=flags)  # type: ignore[arg-type]
    after = probe.compute_batch(["a", "b"], rows, after_end_marker=False)
    assert after.eat_ema_variance.tolist() == before.eat_ema_variance.tolist() == [0.0, 0.0]
    assert after.eat.tolist() == before.eat.tolist()


# ------------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_arrays(dtype: type, compiles: bool) -> None:
    """NumPy arrays are measured like tensors, also with any strides, if they are read-only, or with negative strides,
    which torch does not know."""
    whole: NDArray[Any] = logits_of(6).astype(dtype)
    whole[2, 3], whole[4, 5] = math.nan, -math.inf
    whole.flags.writeable = False
    probe = EntropyProbe(5)
    if compiles:
        probe.compile()
    for view in (whole, whole[::-1], whole[:, ::3], whole[:, 100:500], np.asfortranarray(whole)):
        got = probe.begin(view).result()
        want = reference(view, 5)
        np.testing.assert_allclose(got.entropy_nats, want.entropy_nats, rtol=0, atol=NATS)
        np.testing.assert_array_equal(got.top_token_id, want.top_token_id)
        some = probe.begin(view, rows=[5, 0, 0]).result()
        np.testing.assert_allclose(some.entropy_nats, want.entropy_nats[[5, 0, 0]], rtol=0, atol=NATS)
    large = np.tile(whole, (1, 200))
    want = reference(large, 5)
    np.testing.assert_allclose(probe.begin(large).result().entropy_nats, want.entropy_nats, atol=NATS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_vllm_can_start_another_engine_in_a_process_that_compiled() -> None:
    """vLLM's search through all modules fails on objects that give something else for their instance dictionary."""
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")
    probe = EntropyProbe(5)
    probe.compile()
    assert not probe.fallback
    dispatcher._rebind_kernels([])


@pytest.mark.parametrize("missing", ["numba", "meridian_kernels.one_pass"])
def test_numpy_measures_where_nothing_can_be_compiled(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "meridian_kernels.one_pass", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    probe, rows = EntropyProbe(5), logits_of(3)
    probe.compile()
    assert probe.fallback.startswith("NumPy measures, slower than compiled code: ModuleNotFoundError: ")
    assert missing in probe.fallback
    np.testing.assert_array_equal(
        probe.begin(rows).result().entropy_nats, EntropyProbe(5).begin(rows).result().entropy_nats
    )


class GpuArray:
    """An array like CuPy's: it states an address on a GPU, and can be copied from there. Its memory is really the
    CPU's."""

    def __init__(self, host: NDArray[Any], stream: int | None = None) -> None:
        self._host, self.shape, self.dtype = host, host.shape, host.dtype
        self.__cuda_array_interface__ = {**host.__array_interface__, "version": 3, "stream": stream}

    def get(self) -> NDArray[Any]:
        return self._host

    def reshape(self, *shape: int) -> GpuArray:
        return GpuArray(self._host.reshape(*shape))


def test_gpu_arrays_where_the_gpu_cannot_be_used() -> None:
    """A probe that was to measure on the GPU copies GPU arrays; a probe on the CPU refuses them as misplaced."""
    rows = logits_of(2)
    with pytest.raises(KernelError, match="logits must be on the CPU; got an array on a GPU"):
        EntropyProbe(0).compute_batch(["a", "b"], GpuArray(rows))
    if torch.cuda.is_available():
        return
    with pytest.warns(RuntimeWarning, match="measuring on the CPU"):
        probe = EntropyProbe(0, backend="cuda")
    got = probe.compute_batch(["a", "b"], GpuArray(rows))
    assert got.token_entropy.tolist() == EntropyProbe(0).compute_batch(["a", "b"], rows).token_entropy.tolist()
    assert float(probe.compute("c", GpuArray(rows[0])).eat) == float(got.eat[0])


def test_where_the_rows_of_a_gpu_array_are() -> None:
    """The launch gets the address, the row distance and the stream that the array's interface states."""
    rows = logits_of(6)
    found, stream = cuda.rows_of_interface(GpuArray(rows, stream=77), 6)
    assert found == cuda.DeviceRows(rows.ctypes.data, VOCAB, 6, VOCAB, "float32")
    assert stream == 77
    view = rows.astype(np.float16)[1::2, 10:500]
    found, stream = cuda.rows_of_interface(GpuArray(view), 2)
    assert found == cuda.DeviceRows(view.ctypes.data, 2 * VOCAB, 2, 490, "float16")
    assert stream == cuda.LEGACY_STREAM
    for bad in (rows[:, ::2], np.asfortranarray(rows)):
        with pytest.raises(KernelError, match="must be contiguous on a GPU; got strides of"):
            cuda.rows_of_interface(GpuArray(bad), 6)


# ---------------------------------------------------------------------------------------------------- wrong arguments

X = np.zeros((3, 9), np.float32)
DTYPES = "logits must be float32, bfloat16, float16 or float64"
ENDS = "think_end_token_ids must be"
# End tokens that neither a probe nor a call takes.
ENDS_REFUSED: list[tuple[Any, str]] = [
    *((ends, f"{ENDS} a token id or a list of them; got {ends!r}") for ends in (1.5, True, "12", {7}, np.nan)),
    (np.True_, f"{ENDS} a token id or a list of them; got "),
    (np.array([[1]]), f"{ENDS} a token id or a list of them; got array([[1]])"),
    (torch.tensor([1]), f"{ENDS} a token id or a list of them; got tensor([1])"),
    ([[1]], f"{ENDS} integers; got [1]"),
    ([1, 2.0], f"{ENDS} integers; got 2.0"),
    ([1, True], f"{ENDS} integers; got True"),
    ([None], f"{ENDS} integers; got None"),
    (np.array([1.0]), f"{ENDS} integers; got 1.0"),
    ([], f"{ENDS} 1 to 4 token ids; got 0"),
    (range(5), f"{ENDS} 1 to 4 token ids; got 5"),
    ([3, 4, 3], "think_end_token_ids must differ from each other; got [3, 4, 3]"),
]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        *(({"think_end_token_ids": ends}, complaint) for ends, complaint in ENDS_REFUSED),
        ({"think_end_token_ids": -1}, f"{ENDS} in [0, 2147483647); got -1"),
        ({"think_end_token_ids": 1 << 40}, f"{ENDS} in [0, 2147483647); got 1099511627776"),
        ({"backend": "tpu"}, "backend must be 'cpu' or 'cuda'; got 'tpu'"),
        ({"backend": None}, "backend must be 'cpu' or 'cuda'; got None"),
        ({"backend": ["cpu"]}, "backend must be 'cpu' or 'cuda'; got ['cpu']"),
        *(
            ({"ema_alpha": value}, f"ema_alpha must be in (0, 1]; got {value!r}")
            for value in (0, -0.1, 1.5, math.nan, math.inf, True, "0.2", None)
        ),
        ({"strict": 1}, "strict must be true or false; got 1"),
        ({"device": -1}, "device must be an integer in [0, 2147483647]; got -1"),
        ({"device": "cuda:0"}, "device must be an integer in [0, 2147483647]; got 'cuda:0'"),
        ({"device": True}, "device must be an integer in [0, 2147483647]; got True"),
        ({"max_rows": 0}, "max_rows must be an integer in [1, 2147483647]; got 0"),
        ({"max_rows": 1.5}, "max_rows must be an integer in [1, 2147483647]; got 1.5"),
    ],
)
def test_what_a_probe_is_made_with(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(KernelError) as refused:
        EntropyProbe(**arguments)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("logits", "complaint"),
    [
        (None, "logits must be a NumPy, torch or CuPy array; got NoneType"),
        ([[1.0, 2.0]], "logits must be a NumPy, torch or CuPy array; got list"),
        (3.5, "logits must be a NumPy, torch or CuPy array; got float"),
        (np.float32(3.5), "logits must be a NumPy, torch or CuPy array; got float32"),
        (np.ma.masked_array(X), "logits must be a NumPy, torch or CuPy array; got MaskedArray"),  # type: ignore[no-untyped-call]
        (np.zeros(3, np.float32), "logits must be [rows, vocabulary]; got shape (3,)"),
        (torch.zeros(1, 2, 3), "logits must be [rows, vocabulary]; got shape (1, 2, 3)"),
        (torch.tensor(1.0), "logits must be [rows, vocabulary]; got shape ()"),
        (torch.zeros(3, 0), "logits must be [rows, vocabulary]; got shape (3, 0)"),
        (GpuArray(np.zeros(3, np.float32)), "logits must be [rows, vocabulary]; got shape (3,)"),
        (X.astype(">f4"), f"{DTYPES}; got >f4"),
        (X.astype(np.int64), f"{DTYPES}; got int64"),
        (X.astype(object), f"{DTYPES}; got object"),
        (X.astype(bool), f"{DTYPES}; got bool"),
        (X.astype(np.longdouble), f"{DTYPES}; got float128"),
        (torch.zeros(3, 9, dtype=torch.int64), f"{DTYPES}; got int64"),
        (
            torch.zeros(3, 9, dtype=torch.complex64),
            f"{DTYPES}; got complex64",
        ),
        (torch.zeros(3, 9).to_sparse(), "logits must be dense; got a tensor of layout torch.sparse_coo"),
        (torch.zeros(3, 9, device="meta"), "logits must be on the CPU; got meta"),
    ],
)
def test_what_logits_may_be(logits: Any, complaint: str) -> None:
    """Every method that takes logits refuses bad logits."""
    probe = EntropyProbe(0)
    with pytest.raises(KernelError) as refused:
        probe.begin(logits)
    assert complaint in str(refused.value)
    with pytest.raises(KernelError, match="logits must"):
        probe.compute_batch(["a", "b", "c"], logits)
    if getattr(logits, "shape", ()) != (3,):
        with pytest.raises(KernelError, match="logits must"):
            probe.compute("a", logits)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="logits must be dense; got a nested tensor"):
        EntropyProbe(0).begin(torch.nested.nested_tensor([torch.zeros(9)] * 3))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_sign_that_torch_keeps_in_a_bit_counts(compiles: bool) -> None:
    probe, logits = EntropyProbe(0), np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32)
    if compiles:
        probe.compile()
    negative = torch._neg_view(torch.from_numpy(logits))
    assert negative.is_neg()
    measured, expected = probe.begin(negative).result(), reference(-logits, 0)
    np.testing.assert_allclose(measured.entropy_nats, expected.entropy_nats, atol=1e-5)
    assert measured.end_rank.tolist() == expected.end_rank.tolist()


@pytest.mark.parametrize(
    ("ends", "rows", "complaint"),
    [
        (None, None, "think_end_token_ids must be given to the probe or to the call; got None"),
        (9, None, f"{ENDS} in [0, 9); got 9"),
        (-1, None, f"{ENDS} in [0, 9); got -1"),
        ([1, 9], None, f"{ENDS} in [0, 9); got 9"),
        *((ends, None, complaint) for ends, complaint in ENDS_REFUSED),
        (0, [0, 3], "rows must be in [0, 3); got 0 to 3"),
        (0, [-1], "rows must be in [0, 3); got -1 to -1"),
        (0, [1 << 70], "rows must be in [0, 3); got 1180591620717411303424"),
        (0, np.array([2**32], np.uint64), "rows must be in [0, 3); got 4294967296"),
        (0, [0.7], "rows must be integers; got 0.7"),
        (0, [1.0], "rows must be integers; got 1.0"),
        (0, [True, False, True], "rows must be integers; got True"),
        (0, ["1"], "rows must be integers; got '1'"),
        (0, [[1]], "rows must be integers; got [1]"),
        (0, np.array([0.7]), "rows must be integers; got an array of float64"),
        (0, np.array([True, False, True]), "rows must be integers; got an array of bool"),
        (0, np.array([[1]]), "rows must be a list of numbers; got shape (1, 1)"),
        (0, 1, "rows must be a list of numbers; got 1"),
        (0, "12", "rows must be a list of numbers; got '12'"),
        (0, {1}, "rows must be a list of numbers; got {1}"),
    ],
)
@pytest.mark.parametrize("logits", [X, torch.from_numpy(X)], ids=["numpy", "torch"])
def test_what_a_measurement_is_begun_with(logits: Any, ends: Any, rows: Any, complaint: str) -> None:
    with pytest.raises(KernelError) as refused:
        EntropyProbe().begin(logits, ends, rows)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("req_ids", "complaint"),
    [
        ("abc", "req_ids must be a list of strings; got 'abc'"),
        (None, "req_ids must be a list of strings; got None"),
        ({"a", "b", "c"}, "req_ids must be a list of strings; got {'a', 'b', 'c'}"),
        (["a", "b"], "req_ids must name each of the 3 rows of logits_batch; got 2 ids"),
        (["a", "b", "c", "d"], "req_ids must name each of the 3 rows of logits_batch; got 4 ids"),
        (["a", "b", "a"], "req_ids must differ from each other; got 'a' more than once"),
        (["a", 7, "c"], "req_ids[1] must be a string that is not empty; got 7"),
        (["a", "b", b"c"], "req_ids[2] must be a string that is not empty; got b'c'"),
        (["", "b", "c"], "req_ids[0] must be a string that is not empty; got ''"),
    ],
)
def test_whose_rows_they_are(req_ids: Any, complaint: str) -> None:
    with pytest.raises(KernelError) as refused:
        EntropyProbe(0).compute_batch(req_ids, X)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (1, "after_end_marker must be a boolean or a list of booleans; got 1"),
        (None, "after_end_marker must be a boolean or a list of booleans; got None"),
        ([True, 0, True], "after_end_marker must be a boolean or a list of booleans; got [True, 0, True]"),
        ([True], "after_end_marker must have a value for each of the 3 rows; got 1"),
    ],
)
def test_whether_they_come_after_an_end_marker(flags: Any, complaint: str) -> None:
    with pytest.raises(KernelError) as refused:
        EntropyProbe(0).compute_batch(["a", "b", "c"], X, after_end_marker=flags)
    assert complaint in str(refused.value)
    with pytest.raises(KernelError, match="after_end_marker must be true or false; got"):
        EntropyProbe(0).compute("a", X[0], after_end_marker=flags)


@pytest.mark.parametrize("req_id", [None, 7, "", b"a", ["a"]])
def test_one_request(req_id: Any) -> None:
    for call in (lambda: EntropyProbe(0).compute(req_id, X[0]), lambda: EntropyProbe(0).forget(req_id)):
        with pytest.raises(KernelError, match="req_id must be a string that is not empty; got"):
            call()
    with pytest.raises(KernelError, match=r"logits must be \[vocabulary\]; got shape \(3, 9\)"):
        EntropyProbe(0).compute("a", X)
    with pytest.raises(KernelError, match="think_end_token_ids must be given"):
        EntropyProbe().compute("a", X[0])


# ----------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    """Without CuPy, or with CuPy and no driver, a probe warns once and measures on the CPU; a strict probe raises an
    error."""
    missing = "ModuleNotFoundError" if importlib.util.find_spec("cupy") is None else "CUDARuntimeError"
    with pytest.raises(KernelError, match=f"no entropy on cuda:0: {missing}.*; nor with torch: "):
        EntropyProbe(backend="cuda", strict=True)
    with pytest.warns(RuntimeWarning, match="measuring on the CPU") as warned:
        probe = EntropyProbe(7, backend="cuda")
    assert len(warned) == 1
    assert (probe.backend, str(warned[0].message)) == ("cpu", probe.fallback)
    assert warned[0].filename == __file__
    rows = logits_of(3)
    np.testing.assert_array_equal(
        probe.begin(rows).result().entropy_nats, EntropyProbe(7).begin(rows).result().entropy_nats
    )


def test_a_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CuPy, torch's operations replace the kernel, also for a strict probe, with a warning. The test needs no
    GPU: it makes the kernel unavailable and gives torch's operations the CPU as their device."""

    def no_cupy(*_: int) -> None:
        raise ModuleNotFoundError("No module named 'cupy'")

    made: list[str] = []
    operations = torch_ops.TorchOps

    def on_the_cpu(device: str, max_rows: int) -> torch_ops.TorchOps:
        made.append(device)
        return operations("cpu", max_rows, 5000)

    monkeypatch.setattr(cuda, "Kernels", type("Kernels", (), {"__new__": no_cupy}))
    monkeypatch.setattr(torch_ops, "TorchOps", on_the_cpu)
    with pytest.warns(RuntimeWarning, match="slower than the CUDA kernel: ModuleNotFoundError: No module named 'cupy'"):
        probe = EntropyProbe(7, backend="cuda", strict=True, device=1, max_rows=3)
    assert (probe.backend, made) == ("torch", ["cuda:1"])
    rows = torch.from_numpy(logits_of(3))
    got = probe.compute_batch(["a", "b", "c"], rows)
    want = reference(rows.numpy(), 7)
    np.testing.assert_allclose(got.token_entropy, want.entropy_nats, rtol=0, atol=NATS)
    np.testing.assert_array_equal(got.end_rank, want.end_rank)
    with pytest.raises(KernelError, match="at most 3 rows can be measured at once; got 4"):
        probe.begin(torch.zeros(4, 9))


def test_a_probe_that_is_not_strict_takes_what_is_in_the_cpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe on a GPU measures logits in the CPU's memory on the CPU; a strict probe takes the GPU."""
    refuse = SimpleNamespace(begin=lambda *_: pytest.fail("the GPU was asked for"))
    monkeypatch.setattr(EntropyProbe, "_on_gpu", lambda *_: refuse)
    rows = logits_of(2)
    want = reference(rows, 7).entropy_nats
    for given in (rows, torch.from_numpy(rows)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = EntropyProbe(7, backend="cuda").begin(given).result()
        np.testing.assert_allclose(got.entropy_nats, want, rtol=0, atol=NATS)
    with pytest.raises(pytest.fail.Exception, match="the GPU was asked for"):
        EntropyProbe(7, backend="cuda", strict=True).begin(rows)


def test_importing_the_package_touches_no_gpu() -> None:
    """Importing the package loads neither torch nor CuPy, and nor does measuring a NumPy array."""
    code = (
        "import meridian_kernels, numpy, sys; probe = meridian_kernels.EntropyProbe(1);"
        "probe.compute('a', numpy.ones(200_000, 'float32')); sys.exit(any(m in sys.modules for m in ('torch', 'cupy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
