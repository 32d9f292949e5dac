"""The CPU kernel against its float64 definition: every dtype, odd sizes, masks, ties, and what cannot be measured."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian_kernels import EntropyProbe, EntropySignal, KernelError, reference

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARIES = [2, 33, 32000, 151936]
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


def check(logits: torch.Tensor, end: int) -> EntropySignal:
    """Measure, and compare with the reference on the values the kernel was given."""
    before = logits.clone()
    got = EntropyProbe().compute_batch(logits, end)
    assert torch.equal(torch.nan_to_num(before, nan=7.0), torch.nan_to_num(logits, nan=7.0)), "the logits are vLLM's"
    want = reference.compute_batch(logits.double().numpy(), end)
    np.testing.assert_allclose(got.entropy_nats, want.entropy_nats, rtol=0, atol=NATS)
    np.testing.assert_allclose(got.end_logprob_nats, want.end_logprob_nats, rtol=1e-6, atol=NATS)
    np.testing.assert_array_equal(got.end_rank, want.end_rank)
    assert [c.dtype.name for c in (got.entropy_nats, got.end_rank, got.end_logprob_nats)] == [
        "float32",
        "int32",
        "float32",
    ]
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_against_the_reference(vocab: int, kind: str, dtype: torch.dtype) -> None:
    rows = 7 if vocab < 100_000 else 5
    check(rows_of(kind, rows, vocab).to(dtype), vocab // 3)


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


def test_known_values() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 1.0, 1.0, 1.0]]))
    got = check(logits, 3)
    np.testing.assert_allclose(got.entropy_nats, [1.75 * math.log(2), math.log(4)], atol=NATS)
    np.testing.assert_allclose(got.end_logprob_nats, [math.log(0.125), math.log(0.25)], atol=NATS)
    assert got.end_rank.tolist() == [3, 1]


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
    assert np.isnan(got.end_logprob_nats).tolist() == [False, True, False]


def test_a_row_of_masks_only() -> None:
    got = EntropyProbe().compute_batch(torch.full((1, 33), -math.inf), 5)
    assert np.isnan(got.entropy_nats[0])
    assert np.isnan(got.end_logprob_nats[0])
    want = reference.compute_batch(np.full((1, 33), -np.inf), 5)
    assert np.isnan(want.entropy_nats[0])


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


def test_importing_the_package_imports_no_torch() -> None:
    code = "import meridian_kernels, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
