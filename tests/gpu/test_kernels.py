"""The kernels on a GPU, and torch's operations in their place.

The tests compare the whole table with the definition, check the order against torch's streams in both directions, check
that measuring neither allocates nor waits, and run CUDA graphs beside it. kernels/README.md says how to run them.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from meridian_kernels import EntropyProbe, KernelError, RowSignals, reference

from tests.bench.kernels import why_not
from tests.needed import GPU
from tests.unit.kernels.expected import DTYPES, KINDS, NATS, margins

if reason := why_not():
    pytest.skip(f"{reason}: {GPU.how}", allow_module_level=True)

import cupy
from meridian_kernels.pending import SLOTS

from tests.bench.kernels_arms import arms

VOCABULARIES = [1, 2, 33, 1023, 32000, 128256, 151936, 262144]
# Clock cycles of a kernel that does nothing for about a tenth of a second.
LONG = 200_000_000


@pytest.fixture(scope="module", params=["cuda", "torch"])
def probe(request: pytest.FixtureRequest) -> EntropyProbe:
    """Return a probe, once with the kernel, and once as it is without CuPy."""
    return made("cuda") if request.param == "cuda" else made("torch")


@pytest.fixture(scope="module")
def kernel() -> EntropyProbe:
    return made("cuda")


def made(backend: str) -> EntropyProbe:
    if backend == "cuda":
        probe = EntropyProbe(backend="cuda", strict=True, max_rows=1024)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", None)
            with pytest.warns(RuntimeWarning, match="slower"):
                probe = EntropyProbe(backend="cuda", strict=True, max_rows=1024)
    assert probe.backend == backend
    return probe


def rows_of(kind: str, count: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows of logits, drawn anew in every run."""
    x = 4 * torch.randn(count, vocab, device="cuda")
    if kind == "peaked":
        x[:, vocab // 2] += 60.0
    elif kind == "flat":
        x *= 1e-3
    elif kind == "tied":
        x = torch.round(x)
    elif kind == "masked":
        x[torch.rand(count, vocab, device="cuda") < 0.9] = -math.inf
        x[:, vocab // 3] = 1.0
    elif kind == "equal":
        x[:] = x[:, :1]
    return x.to(dtype)


def compare(got: RowSignals, logits: torch.Tensor, ends: Sequence[int], rows: Sequence[int] | None = None) -> None:
    chosen = None if rows is None else np.array(rows, np.int32)
    want = reference(logits.double().cpu().numpy(), ends, chosen)
    np.testing.assert_allclose(got.entropy_nats, want.entropy_nats, rtol=0, atol=NATS)
    for column in ("log_sum_exp_nats", "top_logprob_nats", "end_logprob_nats"):
        np.testing.assert_allclose(getattr(got, column), getattr(want, column), rtol=1e-6, atol=NATS, err_msg=column)
    np.testing.assert_allclose(margins(got), margins(want), rtol=1e-6, atol=NATS)
    measurable = want.top_token_id >= 0
    np.testing.assert_array_equal(got.top_token_id, want.top_token_id)
    np.testing.assert_array_equal(got.end_rank[measurable], want.end_rank[measurable])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_against_the_reference(probe: EntropyProbe, vocab: int, kind: str, dtype: torch.dtype) -> None:
    logits = rows_of(kind, 7, vocab, dtype)
    compare(probe.begin(logits, vocab // 3).result(), logits, [vocab // 3])


@pytest.mark.parametrize("rows", [0, 1, 3, 128, 512, 1024])
def test_any_number_of_rows(probe: EntropyProbe, rows: int) -> None:
    logits = rows_of("random", rows, 32001, torch.bfloat16)
    got = probe.begin(logits, 5).result()
    assert got.entropy_nats.shape == (rows,)
    if rows:
        compare(got, logits, [5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_alignments_selections(probe: EntropyProbe, dtype: torch.dtype) -> None:
    wide = rows_of("random", 40, 4099, dtype)
    for offset in range(9):
        view = wide[1:, offset : offset + 3001 + offset]
        compare(probe.begin(view, [0, 7, 3000]).result(), view, [0, 7, 3000])
        rows = [38, 0, 17, 17]
        compare(probe.begin(view, 3, rows).result(), view, [3], rows)


def test_rows_that_cannot_be_measured(probe: EntropyProbe) -> None:
    logits = rows_of("random", 9, 50_000)
    logits[1, 49_999], logits[3, 0], logits[5] = math.nan, math.inf, -math.inf
    logits[6], logits[7, 1:] = torch.finfo(torch.float32).min, -math.inf
    got = probe.begin(logits, 2).result()
    compare(got, logits, [2])
    assert np.flatnonzero(np.isnan(got.entropy_nats)).tolist() == [1, 3, 5]


def test_the_same_bits_every_time(probe: EntropyProbe) -> None:
    logits = rows_of("random", 5, 151_936)
    first = probe.begin(logits, 9).result()
    for _ in range(50):
        again = probe.begin(logits, 9).result()
        np.testing.assert_array_equal(again.entropy_nats, first.entropy_nats)
        np.testing.assert_array_equal(again.end_logprob_nats, first.end_logprob_nats)


@pytest.mark.parametrize("side", [False, True])
def test_order_against_torch(probe: EntropyProbe, side: bool) -> None:
    """The probe measures the logits as written before it, however late the write is, and not those written
    afterwards."""
    before, after = rows_of("random", 64, 151_936), rows_of("peaked", 64, 151_936)
    logits = torch.empty_like(before)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            logits.copy_(before)
            pending = probe.begin(logits, 9)
            logits.copy_(after)
        compare(pending.result(), before, [9])
        torch.cuda.synchronize()
        assert torch.equal(logits, after)


def test_begin_does_not_wait(probe: EntropyProbe) -> None:
    """The call returns while the stream is still busy with earlier work."""
    logits = rows_of("random", 8, 32_000)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    pending = probe.begin(logits, 9)
    assert not busy.query()
    compare(pending.result(), logits, [9])


def test_no_allocation_while_measuring(kernel: EntropyProbe) -> None:
    logits = {dtype: rows_of("random", 1024, 3001, dtype) for dtype in DTYPES}
    torch.cuda.synchronize()
    pools = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()

    def held() -> tuple[int, ...]:
        free, _ = torch.cuda.mem_get_info()
        counted = torch.cuda.memory_stats()["allocation.all.allocated"]
        return free, counted, pools[0].total_bytes(), pools[0].used_bytes(), pools[1].n_free_blocks()

    before = held()
    for dtype in DTYPES:
        for count in (1, 100, 1024):
            kernel.begin(logits[dtype][:count], 9).result()
            kernel.begin(logits[dtype], 9, list(range(count))).result()
    assert held() == before


def test_torch_operations_never_wait_and_hold_the_memory_they_had() -> None:
    """In this mode torch raises an error if one of its operations waits for the GPU."""
    probe = made("torch")
    logits = {dtype: rows_of("random", 1024, 3001, dtype) for dtype in DTYPES}

    def measure() -> None:
        for batch in logits.values():
            for count in (1, 100, 1024):
                torch.cuda.set_sync_debug_mode("error")
                pending = [probe.begin(batch[:count], [9, 12]), probe.begin(batch, 9, list(range(count)))]
                torch.cuda.set_sync_debug_mode("default")
                for one in pending:
                    one.result()

    try:
        measure()
        held = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        for _ in range(5):
            measure()
        assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == held
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cupy_arrays(probe: EntropyProbe) -> None:
    """CuPy arrays on a stream of CuPy's own are measured before CuPy's next work on them; views with gaps are, too."""
    for dtype in (torch.float32, torch.float16):
        tensor = rows_of("random", 6, 5000, dtype)
        torch.cuda.synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            array = cupy.asarray(tensor).copy()
            got = [probe.begin(array, 9), probe.begin(array[::2, 8:4008], 9)]
            if probe.backend == "torch":
                # Torch reads the array on its own stream, for which CuPy does not wait, so the caller does.
                results = [one.result() for one in got]
                array[:] = 0
            else:
                array[:] = 0
                results = [one.result() for one in got]
            stream.synchronize()
        compare(results[0], tensor, [9])
        compare(results[1], tensor[::2, 8:4008], [9])
        one = EntropyProbe(9, backend="cuda").compute("a", cupy.asarray(tensor[0]))
        assert float(one.token_entropy) == pytest.approx(float(results[0].entropy_nats[0]), abs=NATS)


def test_beside_cuda_graphs(probe: EntropyProbe) -> None:
    """A graph may be captured and replayed around measurements.

    Measuring within a capture is an error that leaves the capture as it is.
    """
    weight, hidden = torch.randn(256, 32_000, device="cuda"), torch.randn(16, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        hidden @ weight
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = hidden @ weight
        with pytest.raises(KernelError, match="captures a graph"):
            probe.begin(logits, 9)
        scaled = logits * 0.5
    for _ in range(3):
        hidden.copy_(torch.randn(16, 256, device="cuda"))
        graph.replay()
        first, second = probe.begin(logits, 9), probe.begin(scaled, 9)
        kept = logits.clone(), scaled.clone()
        graph.replay()
        compare(first.result(), kept[0], [9])
        compare(second.result(), kept[1], [9])


def test_results_are_read_later_and_elsewhere(probe: EntropyProbe) -> None:
    """As many results as there are slots can be read on another thread; older ones are an error, never another's
    result."""
    batches = [rows_of("random", 4, 5000) for _ in range(SLOTS)]
    pending = [probe.begin(b, 9) for b in batches]
    results: list[RowSignals] = []
    reader = threading.Thread(target=lambda: results.extend(p.result() for p in pending))
    reader.start()
    reader.join()
    for batch, result in zip(batches, results, strict=True):
        compare(result, batch, [9])
    probe.begin(batches[0], 9).result()
    with pytest.raises(KernelError, match="must be read before"):
        pending[0].result()


def test_errors(kernel: EntropyProbe) -> None:
    logits = rows_of("random", 2, 100)
    for bad, complaint in (
        (logits.cpu(), "logits must be on cuda:0; got cpu"),
        (logits.t(), "must be contiguous on a GPU"),
        (logits[:1].expand(1025, 100), "at most 1024 rows"),
    ):
        with pytest.raises(KernelError, match=complaint):
            kernel.begin(bad, 1).result()
    with pytest.raises(KernelError, match="logits must be on the CPU"):
        EntropyProbe().begin(logits, 1).result()


def test_the_benchmark_compares_the_same_function(kernel: EntropyProbe) -> None:
    logits = rows_of("random", 6, 32_000, torch.bfloat16)
    found, _ = arms(kernel, 6, 32_000, logits.device)
    want = reference(logits.double().cpu().numpy(), [9]).entropy_nats
    for name, arm in found.items():
        got = arm.entropy(arm.begin(logits, 9))
        got = got if isinstance(got, np.ndarray) else got.float().cpu().numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4, err_msg=name)
