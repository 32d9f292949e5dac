"""The CPU's compiled code, NumPy and torch's operations against the float64 definition: every dtype, odd sizes, masks,
ties, and rows that cannot be measured. Torch's operations, which measure on GPUs without CuPy, run here in the CPU's
memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meridian_kernels import EntropyProbe, KernelError, RowSignals, reference
from meridian_kernels.definition import COLUMNS, FLOATS
from meridian_kernels.pending import SLOTS
from meridian_kernels.torch_ops import TorchOps

from tests.unit.kernels.expected import DTYPES, KINDS, NATS, compare, rows_of

VOCABULARIES = [2, 33, 32000, 128256, 151936, 262144]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one torch thread, because threads that wait for each other on shared cores cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def torch_ops() -> TorchOps:
    """Return torch's operations with chunks of a few of the longest rows."""
    return TorchOps("cpu", 1024, 1 << 19)


@functools.cache
def compiled() -> EntropyProbe:
    """Return a probe that has compiled its code."""
    probe = EntropyProbe()
    probe.compile()
    assert not probe.fallback
    return probe


def measured(logits: Any, end: int | list[int], rows: Sequence[int] | None = None) -> RowSignals:
    """Measure with NumPy and with the compiled code, compare both, and return what the compiled code measured."""
    got = compiled().begin(logits, end, rows).result()
    compare(got, EntropyProbe().begin(logits, end, rows).result())
    return got


def check(logits: torch.Tensor, end: int | list[int], rows: Sequence[int] | None = None) -> RowSignals:
    """Measure on the CPU and with torch's operations, and compare with the reference on the given values."""
    before = logits.clone()
    ends = end if isinstance(end, list) else [end]
    chosen = None if rows is None else np.array(rows, np.int32)
    want = reference(logits.double().numpy(), ends, chosen)
    numpy = EntropyProbe().begin(logits, end, rows).result()
    got = compiled().begin(logits, end, rows).result()
    for one in (got, numpy, torch_ops().begin(logits, ends, chosen).result()):
        compare(one, want)
    assert torch.equal(torch.nan_to_num(before, nan=7.0), torch.nan_to_num(logits, nan=7.0)), "logits must not change"
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_against_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Rows of every kind are drawn anew in each run; the output of a failure has the seed."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rows = torch.cat([rows_of(kind, 4 if vocab < 100_000 else 1, vocab, seed) for kind in KINDS])
    check(rows.to(dtype), vocab // 3)


@given(
    st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(
                st.one_of(st.floats(-80, 80, width=32), st.sampled_from([0.0, 1.0, -math.inf])),
                min_size=width,
                max_size=width,
            ).filter(lambda row: any(x > -math.inf for x in row)),
            min_size=1,
            max_size=4,
        )
    ),
    st.integers(0, 4),
)
def test_any_small_rows(rows: list[list[float]], end: int) -> None:
    check(torch.tensor(rows, dtype=torch.float32), end % len(rows[0]))


def test_selected_rows() -> None:
    """Rows are measured in the order asked for, also twice, over several chunks, or none at all."""
    logits = rows_of("random", 30, 32000)
    for rows in ([3], [29, 0, 7, 7], list(range(29, -1, -1)), []):
        check(logits, 5, rows)


def test_several_end_tokens() -> None:
    """If there are several end tokens, the likeliest one counts."""
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    got = check(logits, [1, 3])
    assert got.end_rank.tolist() == [3, 1]
    check(rows_of("random", 4, 1000), [1, 10, 100, 999])


def test_known_values() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 1.0, 1.0, 1.0]]))
    got = check(logits, 3)
    np.testing.assert_allclose(got.entropy_nats, [1.75 * math.log(2), math.log(4)], atol=NATS)
    np.testing.assert_allclose(got.end_logprob_nats, [math.log(0.125), math.log(0.25)], atol=NATS)
    np.testing.assert_allclose(got.top_logprob_nats, [math.log(0.5), math.log(0.25)], atol=NATS)
    np.testing.assert_allclose(got.log_sum_exp_nats, [0.0, math.log(4)], atol=NATS)
    assert got.end_rank.tolist() == [3, 1]
    assert got.top_token_id.tolist() == [0, 0]


def test_rows_that_are_not_contiguous() -> None:
    wide = rows_of("random", 6, 999)
    for view in (wide[::2], wide[:, ::3], wide[:, 100:500], wide.t(), wide.flip(0)):
        check(view, view.shape[1] // 2)
    assert not wide.t().is_contiguous()


@pytest.mark.parametrize("make", [torch.Tensor.t, lambda tensor: tensor.numpy().T], ids=["torch", "numpy"])
def test_long_rows_that_are_not_contiguous(make: Any) -> None:
    """NumPy adds the numbers of such rows one by one, which would lose digits."""
    logits = make(rows_of("random", 3, 262_144).t().contiguous())
    compare(measured(logits, 7), reference(np.asarray(logits), [7]))


def test_zero_rows() -> None:
    got = measured(torch.empty(0, 33), 4)
    assert got.entropy_nats.shape == got.end_rank.shape == got.end_logprob_nats.shape == (0,)


def test_rank_counts_what_is_strictly_more_likely() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 1.0, 2.0, 1.0]])
    assert [int(measured(logits, end).end_rank[0]) for end in range(6)] == [1, 4, 1, 4, 3, 4]


def test_one_finite_value() -> None:
    logits = torch.full((1, 33), -math.inf)
    logits[0, 7] = 3.5
    for end, rank, logprob in ((7, 1, 0.0), (8, 2, -math.inf)):
        got = check(logits, end)
        assert (got.entropy_nats[0], got.end_rank[0], got.end_logprob_nats[0]) == (0.0, rank, logprob)


@pytest.mark.parametrize("mask", [-math.inf, torch.finfo(torch.float32).min, -1e9, -3e4])
def test_whatever_masks_are_written_with(mask: float) -> None:
    logits = rows_of("random", 3, 1000)
    logits[:, 500:] = mask
    got = check(logits, 700)
    assert np.all(got.end_rank == 501)
    without = measured(logits[:, :500], 0)
    np.testing.assert_allclose(got.entropy_nats, without.entropy_nats, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_cannot_be_measured_is_nan_and_alone(bad: float) -> None:
    logits = rows_of("random", 3, 33)
    logits[1, 4] = bad
    got = measured(logits, 5)
    assert np.isnan(got.entropy_nats).tolist() == [False, True, False]
    for column in (got.end_logprob_nats, got.log_sum_exp_nats, got.top_logprob_nats):
        assert np.isnan(column).tolist() == [False, True, False]
    assert (got.top_token_id == -1).tolist() == [False, True, False]
    assert (got.end_rank == 0).tolist() == [False, True, False]
    want = reference(logits.numpy(), [5])
    np.testing.assert_array_equal(got.top_token_id, want.top_token_id)
    np.testing.assert_array_equal(np.isnan(got.log_sum_exp_nats), np.isnan(want.log_sum_exp_nats))


def test_a_row_of_masks_only() -> None:
    logits = torch.full((1, 33), -math.inf)
    for got in (measured(logits, 5), reference(logits.numpy(), [5])):
        for column in (got.entropy_nats, got.log_sum_exp_nats, got.top_logprob_nats, got.end_logprob_nats):
            assert np.isnan(column[0])
        assert got.top_token_id[0] == -1


def test_the_dtypes_of_unfit_rows_and_their_neighbours() -> None:
    """Rows with masks, NaN and infinities do not disturb other rows, in selections, in every dtype and over several
    chunks."""
    for dtype in DTYPES:
        logits = rows_of("random", 9, 151_936).to(dtype)
        logits[1, 151_935], logits[3, 0], logits[5] = math.nan, math.inf, -math.inf
        logits[6], logits[7, 1:] = torch.finfo(dtype).min, -math.inf
        got = check(logits, [2, 70_000])
        assert np.flatnonzero(np.isnan(got.entropy_nats)).tolist() == [1, 3, 5]
        check(logits, [2, 70_000], [8, 1, 1, 0, 7, 5])


def test_torch_operations_take_no_more_memory_with_time() -> None:
    """Every measurement, whatever its shape, uses the same buffers. A result stays valid while there are free slots,
    and is refused after that."""
    operations = torch_ops()
    batches = [rows_of("random", 3, 500 + n, n) for n in range(SLOTS)]
    buffers = [operations._shifted.data_ptr(), operations._weights.data_ptr(), operations._out.data_ptr()]
    pending = [operations.begin(batch, (9,), None) for batch in batches]
    for batch, one in zip(batches, pending, strict=True):
        compare(one.result(), reference(batch.double().numpy(), 9))
    operations.begin(batches[0], (9,), None)
    with pytest.raises(KernelError, match=f"must be read before {SLOTS} more"):
        pending[0].result()
    assert buffers == [operations._shifted.data_ptr(), operations._weights.data_ptr(), operations._out.data_ptr()]


def test_torch_operations_in_and_out_of_inference_mode() -> None:
    """vLLM's workers run in inference mode and other callers may not; logits that carry a gradient are measured as they
    are."""
    logits = rows_of("random", 3, 100).requires_grad_()
    want = reference(logits.detach().double().numpy(), 9)
    with torch.inference_mode():
        operations = TorchOps("cpu", 3, 200)
        compare(operations.begin(logits, (9,), None).result(), want)
    compare(operations.begin(logits, (9,), None).result(), want)
    compare(EntropyProbe(9).begin(logits).result(), want)


def test_torch_operations_say_what_they_cannot_take() -> None:
    operations = TorchOps("cpu", 2, 100)
    for logits, complaint in (
        (torch.zeros(3, 9), "at most 2 rows can be measured at once; got 3"),
        (torch.zeros(1, 101), "a row may have at most 100 logits; got 101"),
        (torch.zeros(1, 9, device="meta"), "logits must be on cpu; got meta"),
        (np.zeros((1, 9), np.float32), "logits must be on cpu; got a NumPy array"),
    ):
        with pytest.raises(KernelError, match=complaint):
            operations.begin(logits, (0,), None)


# -------------------------------------------------------------------------------------------- measured again and again


def bytes_of(logits: torch.Tensor, end: int, rows: Sequence[int] | None, wanted: Sequence[int]) -> bytes:
    """Return what a repeated measurement must return, from a measurement that is begun anew."""
    columns = np.full((COLUMNS, len(logits)), np.nan, np.float32)
    columns[FLOATS:] = 0
    at = slice(None) if rows is None else np.array(rows, int)
    columns[:, at] = compiled().begin(logits, end, rows).columns()
    return columns[list(wanted)].tobytes()


STEP = st.tuples(st.integers(1, 9), st.sampled_from(["all", "same", "some", "none"]), st.sampled_from([33, 40]))


@given(st.lists(STEP, min_size=1, max_size=12), st.permutations(range(COLUMNS)), st.integers(1, COLUMNS), st.data())
def test_a_repeated_measurement_returns_what_each_measurement_would(
    steps: list[tuple[int, str, int]], order: list[int], columns: int, data: st.DataObject
) -> None:
    """The rows, their number and their distance in memory change from step to step, and some rows cannot be
    measured. Each step has its own bytes, although the buffers are used again."""
    wanted, end, rows = order[:columns], 7, None
    repeated, told = compiled().repeated(rows_of("random", 2, 33), end, wanted), list[tuple[bytes | None, bytes]]()
    assert repeated is not None
    for number, (count, kind, width) in enumerate(steps):
        logits = rows_of("random", count, width, number)[:, :33]
        logits[number % count, 5] = (1.0, math.nan, math.inf)[number % 3]
        if kind != "same" or rows is None or rows.max(initial=-1) >= count:
            some = data.draw(st.sets(st.integers(0, count - 1))) if kind == "some" else ()
            rows = None if kind == "all" else np.array(sorted(some), np.int32)
        chosen = None if rows is None else rows.tolist()
        told.append((repeated.measure(logits, rows), bytes_of(logits, end, chosen, wanted)))
    for got, want in told:
        assert got == want


def test_what_cannot_be_measured_repeatedly() -> None:
    """Arrays of NumPy, other dtypes and rows that are not contiguous are left to `begin`; wrong arguments are refused
    as `begin` refuses them; nothing is measured outside of the logits."""
    logits, wanted = rows_of("random", 4, 33), range(COLUMNS)
    assert EntropyProbe().repeated(logits, 7, wanted) is None
    for other in (logits.numpy(), logits.bfloat16(), logits.double(), logits.T.contiguous().T):
        assert compiled().repeated(other, 7, wanted) is None
    with pytest.raises(KernelError, match="think_end_token_ids must be in"):
        compiled().repeated(logits, 33, wanted)
    repeated = compiled().repeated(logits, 7, wanted)
    assert repeated is not None
    for other in (logits[:, :32], logits.bfloat16(), logits.double(), logits.T.contiguous().T):
        assert repeated.measure(other) is None
    for rows in ([4], [-1]):
        with pytest.raises(KernelError, match="rows must be in"):
            repeated.measure(logits, np.array(rows, np.int32))
    assert repeated.measure(logits[:0]) == b""
    assert repeated.measure(torch._neg_view(logits)) is None
    for wrong in ((), (6,), (-1,), (0, 0), (0.5,), "ab", 3, None):
        with pytest.raises(KernelError, match="wanted must be"):
            compiled().repeated(logits, 7, wrong)  # type: ignore[arg-type]
    assert compiled().repeated(logits.to("meta"), 7, wanted) is None
    kept = np.array([0, 2], np.int32)
    assert repeated.measure(logits, kept) == bytes_of(logits, 7, [0, 2], wanted)
    many = rows_of("random", 500, 33)
    with pytest.raises(KernelError, match="rows must be in"):
        repeated.measure(many, np.array([500], np.int32))
    assert repeated.measure(logits, kept) == bytes_of(logits, 7, [0, 2], wanted), "the buffers have grown before"
    kept[:] = 1 << 20
    assert repeated.measure(logits, kept) == bytes_of(logits, 7, [0, 2], wanted)
