"""The CPU path against its float64 definition: every dtype, odd sizes, masks, ties, and what cannot be measured; and
the public API where there is no GPU."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian_kernels import EntropyProbe, EntropySignal, KernelError, reference
from meridian_kernels.probe import _checked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOCABULARIES = [2, 33, 32000, 128256, 151936, 262144]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["random", "peaked", "flat", "tied", "masked"]
NATS = 1e-5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on shared cores cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        x[:, vocab // 2] += 60.0
    elif kind == "flat":
        x *= 1e-3
    elif kind == "tied":
        x = torch.round(x)
    elif kind == "masked":
        x[torch.rand(rows, vocab, generator=generator) < 0.9] = -math.inf
        x[:, 0] = 1.0
    else:
        x *= 4.0
    return x


def check(logits: torch.Tensor, end: int | list[int], rows: Sequence[int] | None = None) -> EntropySignal:
    """Measure, and compare with the reference on the values the kernel was given."""
    before = logits.clone()
    got = EntropyProbe().compute_batch(logits, end, rows)
    assert torch.equal(torch.nan_to_num(before, nan=7.0), torch.nan_to_num(logits, nan=7.0)), "the logits are vLLM's"
    chosen = None if rows is None else np.array(rows, np.int32)
    want = reference(logits.double().numpy(), end if isinstance(end, list) else [end], chosen)
    np.testing.assert_allclose(got.entropy_nats, want.entropy_nats, rtol=0, atol=NATS)
    for column in ("log_sum_exp_nats", "top_logprob_nats", "end_logprob_nats"):
        np.testing.assert_allclose(getattr(got, column), getattr(want, column), rtol=1e-6, atol=NATS, err_msg=column)
    for column in ("top_token_id", "end_rank"):
        np.testing.assert_array_equal(getattr(got, column), getattr(want, column), column)
        assert getattr(got, column).dtype == np.int32
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_against_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Rows of every kind, drawn anew each time; the seed is in what a failure shows."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rows = torch.cat([rows_of(kind, 4 if vocab < 100_000 else 1, vocab, seed) for kind in KINDS])
    check(rows.to(dtype), vocab // 3)


@settings(deadline=None, max_examples=60)
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
    """In the order asked for, also twice, also over several chunks, also none."""
    logits = rows_of("random", 30, 32000)
    for rows in ([3], [29, 0, 7, 7], list(range(29, -1, -1)), []):
        check(logits, 5, rows)


def test_several_end_tokens() -> None:
    """The likeliest of them counts."""
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    got = check(logits, [1, 3])
    assert got.end_rank.tolist() == [3, 1]
    check(rows_of("random", 4, 1000), [1, 10, 100, 999])


def test_one_row() -> None:
    logits = rows_of("random", 3, 100)
    alone, together = EntropyProbe().compute(logits[1], 7), EntropyProbe().compute_batch(logits, 7)
    assert alone.entropy_nats.shape == (1,)
    assert alone.entropy_nats[0] == pytest.approx(together.entropy_nats[1], abs=NATS)
    assert alone.top_token_id[0] == together.top_token_id[1]


def test_known_values() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 1.0, 1.0, 1.0]]))
    got = check(logits, 3)
    np.testing.assert_allclose(got.entropy_nats, [1.75 * math.log(2), math.log(4)], atol=NATS)
    np.testing.assert_allclose(got.end_logprob_nats, [math.log(0.125), math.log(0.25)], atol=NATS)
    np.testing.assert_allclose(got.top_logprob_nats, [math.log(0.5), math.log(0.25)], atol=NATS)
    np.testing.assert_allclose(got.log_sum_exp_nats, [0.0, math.log(4)], atol=NATS)
    assert got.end_rank.tolist() == [3, 1]
    assert got.top_token_id.tolist() == [0, 0]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 40])
def test_rows_do_not_mix_over_chunks(rows: int) -> None:
    """Several rows at once give what each gives alone (but for the order of summation)."""
    logits = rows_of("random", rows, 151936)
    together = EntropyProbe().compute_batch(logits, 5)
    for row in (0, rows // 2, rows - 1):
        alone = EntropyProbe().compute_batch(logits[row : row + 1], 5)
        np.testing.assert_allclose(together.entropy_nats[row], alone.entropy_nats[0], rtol=0, atol=2e-6)
        np.testing.assert_allclose(together.end_logprob_nats[row], alone.end_logprob_nats[0], rtol=0, atol=2e-6)
        assert together.end_rank[row] == alone.end_rank[0]


def test_rows_that_are_not_contiguous() -> None:
    wide = rows_of("random", 6, 999)
    for view in (wide[::2], wide[:, ::3], wide[:, 100:500], wide.t(), wide.flip(0)):
        check(view, view.shape[1] // 2)
    assert not wide.t().is_contiguous()


def test_zero_rows() -> None:
    got = EntropyProbe().compute_batch(torch.empty(0, 33), 4)
    assert got.entropy_nats.shape == got.end_rank.shape == got.end_logprob_nats.shape == (0,)


def test_rank_counts_what_is_strictly_more_likely() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 1.0, 2.0, 1.0]])
    assert [int(EntropyProbe().compute_batch(logits, end).end_rank[0]) for end in range(6)] == [1, 4, 1, 4, 3, 4]


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
    without = EntropyProbe().compute_batch(logits[:, :500], 0)
    np.testing.assert_allclose(got.entropy_nats, without.entropy_nats, rtol=0, atol=1e-6)


def test_entropy_lies_between_none_and_that_of_a_flat_row() -> None:
    for kind in KINDS:
        entropy = EntropyProbe().compute_batch(rows_of(kind, 5, 32000), 0).entropy_nats
        assert np.all((entropy > -NATS) & (entropy < math.log(32000) + NATS))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_cannot_be_measured_is_nan_and_alone(bad: float) -> None:
    logits = rows_of("random", 3, 33)
    logits[1, 4] = bad
    got = EntropyProbe().compute_batch(logits, 5)
    assert np.isnan(got.entropy_nats).tolist() == [False, True, False]
    for column in (got.end_logprob_nats, got.log_sum_exp_nats, got.top_logprob_nats):
        assert np.isnan(column).tolist() == [False, True, False]
    assert (got.top_token_id == -1).tolist() == [False, True, False]
    want = reference(logits.numpy(), [5])
    np.testing.assert_array_equal(got.top_token_id, want.top_token_id)
    np.testing.assert_array_equal(np.isnan(got.log_sum_exp_nats), np.isnan(want.log_sum_exp_nats))


def test_a_row_of_masks_only() -> None:
    logits = torch.full((1, 33), -math.inf)
    for got in (EntropyProbe().compute_batch(logits, 5), reference(logits.numpy(), [5])):
        for column in (got.entropy_nats, got.log_sum_exp_nats, got.top_logprob_nats, got.end_logprob_nats):
            assert np.isnan(column[0])
        assert got.top_token_id[0] == -1


@pytest.mark.parametrize(
    ("logits", "end", "complaint"),
    [
        (torch.zeros(3), 0, r"logits must be \[rows, vocabulary\]; got shape \(3,\)"),
        (torch.zeros(1, 2, 3), 0, r"got shape \(1, 2, 3\)"),
        (torch.zeros(3, 0), 0, r"got shape \(3, 0\)"),
        (torch.zeros(1, 33), 33, r"end_token_id must be in \[0, 33\); got 33"),
        (torch.zeros(1, 33), -1, r"end_token_id must be in \[0, 33\); got -1"),
        (torch.zeros(1, 33, device="meta"), 0, "logits must be on the CPU; got meta"),
    ],
)
def test_errors(logits: torch.Tensor, end: int, complaint: str) -> None:
    with pytest.raises(KernelError, match=complaint):
        EntropyProbe().compute_batch(logits, end)


@pytest.mark.parametrize(
    ("logits", "end", "rows", "complaint"),
    [
        (torch.zeros(3, 9), [], None, "there must be 1 to 4 end tokens; got 0"),
        (torch.zeros(3, 9), [0] * 5, None, "there must be 1 to 4 end tokens; got 5"),
        (torch.zeros(3, 9), [1, 9], None, r"end_token_id must be in \[0, 9\); got 9"),
        (torch.zeros(3, 9), 0, [0, 3], r"rows must be in \[0, 3\); got 0 to 3"),
        (torch.zeros(3, 9), 0, [-1], r"rows must be in \[0, 3\); got -1 to -1"),
        (torch.zeros(3, 9), 0, [[1]], r"rows must be a list of numbers; got shape \(1, 1\)"),
        (torch.zeros(3, 9, dtype=torch.int64), 0, None, "must be float32, bfloat16, float16; got torch.int64"),
        (torch.zeros(3, 9, dtype=torch.float64), 0, None, "must be float32, bfloat16, float16; got torch.float64"),
    ],
)
def test_more_errors(logits: torch.Tensor, end: list[int], rows: list[int] | None, complaint: str) -> None:
    with pytest.raises(KernelError, match=complaint):
        EntropyProbe().compute_batch(logits, end, rows)


@pytest.mark.parametrize("end", [np.int16(3), np.array([3, 7], np.uint16), [np.int64(3), 7]])
def test_end_tokens_are_plain_numbers(end: Any) -> None:
    """Whose width a kernel's launch knows."""
    ends, _ = _checked(torch.zeros(1, 9), end, None)
    assert [(type(token), token) for token in ends] == [(int, 3), (int, 7)][: len(ends)]


def test_errors_of_the_probe() -> None:
    with pytest.raises(KernelError, match="backend must be 'cpu' or 'cuda'; got 'tpu'"):
        EntropyProbe("tpu")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"logits must be \[vocabulary\]; got shape \(2, 3\)"):
        EntropyProbe().compute(torch.zeros(2, 3), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    """Without CuPy, or with it and no driver: one warning, then the CPU; strictly, an error."""
    missing = "ModuleNotFoundError" if importlib.util.find_spec("cupy") is None else "CUDARuntimeError"
    with pytest.raises(KernelError, match=f"no entropy on cuda:0: {missing}"):
        EntropyProbe("cuda", strict=True)
    with pytest.warns(RuntimeWarning, match="measuring on the CPU") as warned:
        probe = EntropyProbe("cuda")
    logits = rows_of("random", 3, 100)
    got = probe.compute_batch(logits, 7)
    assert len(warned) == 1
    assert probe.backend == "cpu"
    np.testing.assert_array_equal(got.entropy_nats, EntropyProbe().compute_batch(logits, 7).entropy_nats)


def test_importing_the_package_touches_no_gpu() -> None:
    code = "import meridian_kernels, sys; sys.exit(any(m in sys.modules for m in ('torch', 'cupy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
