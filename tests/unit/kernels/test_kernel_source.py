"""The CUDA source without a GPU: it compiles for every architecture without spills. Run on the host, it reads each
entry once and agrees with the definition, whatever the sizes, strides, alignments, selections and order of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian_kernels import RowSignals, cuda, reference

from tests import nvrtc
from tests.cuda_host import COMPILER, HostKernels
from tests.needed import COMPILER as NEEDED
from tests.needed import NVRTC
from tests.unit.kernels import expected
from tests.unit.kernels.expected import DTYPES, KINDS, rows_of


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Compiler:
    try:
        return nvrtc.Compiler()
    except OSError as error:
        pytest.skip(f"{error}; {NVRTC.reason}")


def test_compiles_without_spills(compiler: nvrtc.Compiler) -> None:
    """No kernel spills registers."""
    found = []
    for architecture in nvrtc.ARCHITECTURES:
        code, log = compiler.compile(architecture)
        assert code.startswith(b"\x7fELF")
        found += nvrtc.resources(architecture, log)
    assert len(found) == len(nvrtc.ARCHITECTURES) * len(cuda.KERNELS)
    for one in found:
        assert (one.stack_bytes, one.spill_bytes) == (0, 0), one
        # The blocks that the launch counts on fit into a multiprocessor's registers and shared memory.
        assert one.registers * cuda.THREADS * cuda.BLOCKS_PER_SM <= 65536, one
        assert (one.shared_bytes + 1024) * cuda.BLOCKS_PER_SM <= 164 << 10, one


def compare(measured: RowSignals, logits: torch.Tensor, ends: Sequence[int], selected: Sequence[int] | None) -> None:
    chosen = None if selected is None else np.array(selected, np.int32)
    expected.compare(measured, reference(logits.double().numpy(), ends, chosen))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """Kernels with tiles so small that rows of a few thousand entries have many tiles."""
    return _built(tmp_path_factory, threads=64, vectors=2, stages=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """Kernels with the tiles that the GPU gets."""
    return _built(tmp_path_factory, threads=cuda.THREADS, vectors=cuda.VECTORS, stages=cuda.STAGES)


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return _built(tmp_path_factory, threads=32, vectors=1, stages=3)


def _built(factory: pytest.TempPathFactory, **sizes: int) -> HostKernels:
    if COMPILER is None:
        pytest.skip(NEEDED.reason)
    return HostKernels(factory.mktemp("host"), **sizes)


def placed(rows: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
    """Copy the rows to `offset` entries after a 16-byte boundary, with `pad` entries between rows and NaN all
    around."""
    count, vocab = rows.shape
    stride = vocab + pad
    buffer = torch.full((count * stride + offset + 8,), math.nan, dtype=rows.dtype)
    aligned = -buffer.data_ptr() % 16 // rows.element_size()
    view = buffer[aligned + offset :].as_strided((count, vocab), (stride, 1))
    view.copy_(rows)
    return view


VOCABULARIES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 511, 512, 513, 1023, 1024, 1031, 3001, 4096]


@settings(max_examples=40)
@given(data=st.data())
def test_any_shape(small: HostKernels, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    vocab, count = data.draw(st.sampled_from(VOCABULARIES)), data.draw(st.integers(1, 5))
    kind = data.draw(st.sampled_from(KINDS))
    seed = data.draw(st.integers(0, 1 << 16))
    rows = rows_of(kind, count, vocab, seed).to(dtype)
    logits = placed(rows, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 7)))
    selected = data.draw(st.none() | st.lists(st.integers(0, count - 1), unique=True, min_size=1))
    ends = data.draw(st.lists(st.integers(0, vocab - 1), unique=True, min_size=1, max_size=4))
    blocks = data.draw(st.sampled_from([1, 2, 3, 5, 7, 64]))
    compare(small.measure(logits, ends, selected, blocks=blocks, seed=seed), logits, ends, selected)


@pytest.mark.parametrize("tiles", ["smallest", "whole"])
def test_other_tiles(tiles: str, request: pytest.FixtureRequest) -> None:
    """The kernels agree with the definition for other tile sizes, from the smallest to the GPU's."""
    kernels = request.getfixturevalue(tiles)
    for dtype in DTYPES:
        for vocab in (5, 1000, 9001):
            logits = placed(rows_of("random", 3, vocab, vocab).to(dtype), 3, 1)
            compare(kernels.measure(logits, [vocab // 2], blocks=4, seed=1), logits, [vocab // 2], None)


# Largest relative error of ex2.approx, by the PTX manual: two units in the last place.
EXP2_ERROR = 2.0**-22


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [33, 32_000, 262_144])
def test_powers_of_two_may_be_off(whole: HostKernels, vocab: int, kind: str) -> None:
    """Powers of two may be off by a GPU's largest error: all in one direction, or those near the maximum against the
    others, which moves the mean distance from the maximum most."""
    logits, ends = rows_of(kind, 1, vocab, 5), [vocab // 3]
    try:
        for turn in (-math.inf, -30.0, -20.0, -10.0, -3.0):
            whole.set_exp2_error(EXP2_ERROR, turn)
            compare(whole.measure(logits, ends, blocks=4), logits, ends, None)
    finally:
        whole.set_exp2_error(0.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_in_a_row(small: HostKernels, dtype: torch.dtype) -> None:
    """Rows with masks of every form, with extremes, and rows that cannot be measured beside rows that can."""
    low = torch.finfo(dtype).min
    rows = rows_of("random", 12, 1500, 3).to(dtype)
    rows[1, 700:] = -math.inf
    rows[2, :-1] = -math.inf
    rows[3, 5:] = low
    rows[4] = low
    rows[5] = -math.inf
    rows[6, 1499] = math.nan
    rows[7, 0] = math.inf
    rows[8] = torch.finfo(dtype).max
    rows[9, ::2] = low
    rows[9, 1::2] = -math.inf
    rows[10] = math.nan
    for blocks in (1, 3, 40):
        for end in (0, 699, 1499):
            got = small.measure(rows, [end], blocks=blocks, seed=blocks)
            compare(got, rows, [end], None)
            assert np.flatnonzero(np.isnan(got.entropy_nats)).tolist() == [5, 6, 7, 10]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equal_entries_is_the_top(small: HostKernels, dtype: torch.dtype) -> None:
    """The first of equal entries is found wherever it lies: before the first aligned vector, within one, or after the
    last."""
    for first in (0, 1, 6, 7, 8, 500, 1300, 1330, 1332):
        rows = torch.zeros(1, 1333, dtype=dtype)
        rows[0, first:] = 1.0
        for offset in range(4):
            for blocks in (1, 3):
                got = small.measure(placed(rows, 0, offset), [0], blocks=blocks)
                assert got.top_token_id.tolist() == [first]


def test_the_order_of_blocks_changes_nothing(small: HostKernels) -> None:
    """Not one bit of the results changes, because the block that comes last combines the pieces in their own order."""
    logits = rows_of("random", 3, 5000, 5)
    once = small.measure(logits, [17], blocks=11)
    for seed in range(5):
        again = small.measure(logits, [17], blocks=11, seed=seed)
        for column in ("entropy_nats", "log_sum_exp_nats", "top_logprob_nats", "end_logprob_nats", "end_rank"):
            np.testing.assert_array_equal(getattr(again, column), getattr(once, column))


@given(st.integers(1, 3000), st.integers(1, 300_000), st.sampled_from([2, 4]), st.integers(1, 2000))
def test_plan(rows: int, vocab: int, entry_bytes: int, blocks: int) -> None:
    """The tiles of a row cover the row, no tile is empty unless it is the row's only one, and no block is without a
    tile."""
    tiles, grid = cuda.plan(rows, vocab, entry_bytes, blocks)
    per_tile = cuda.THREADS * cuda.VECTORS * 16 // entry_bytes
    edge = 16 // entry_bytes - 1
    assert (tiles - 1) * per_tile < vocab <= tiles * per_tile + 2 * edge
    assert 1 <= grid <= min(blocks, rows * tiles)
