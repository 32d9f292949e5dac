"""Tests of the benchmarks' arithmetic, and of the cache benchmark's alternative order of block reuse."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.bench.cache_load import reachable_blocks
from tests.bench.scheduling_load import GAMMA_CV, gaps, open_loop
from tests.bench.scheduling_metrics import Case, Run, figures, qoe, ratio
from tests.bench.streamed import Request, Timeline
from tests.needed import VLLM


def timeline(due_s: float, times_s: list[float], think: int) -> Timeline:
    request = Request("r", (4,), think, len(times_s) - think - 1)
    return Timeline(request, due_s, tuple(range(len(times_s))), tuple(times_s))


def test_figures_of_two_requests() -> None:
    """Each request has two thinking tokens, the end marker and answers; one was submitted late, which counts as
    latency."""
    found = figures(
        [timeline(0.0, [1.0, 2.0, 3.0, 3.5, 3.6, 4.0], 2), timeline(-1.0, [1.0, 2.0, 3.0, 3.5, 3.6, 4.0], 2)],
        [timeline(0.0, [1.0, 2.0, 3.0, 3.5, 3.6, 5.0], 2)],
        began_s=0.0,
        pace_s=1.0,
    )
    assert found["ttft_p50_ms"] == pytest.approx(1500)
    assert found["ttot_p99_ms"] == pytest.approx(500)
    assert found["ttfvt_p50_ms"] == pytest.approx(4000)
    assert found["itl_p50_ms"] == pytest.approx(250)
    assert found["throughput_tokens_per_s"] == pytest.approx(6 / 5)


def test_qoe() -> None:
    """QoE is 1 for a token per pace or sooner, and less for a late start or a stall; a stall behind a lead costs
    nothing."""
    pace = [0.1 * i for i in range(1, 11)]
    assert qoe(pace, 0.0, 0.1) == pytest.approx(1.0)
    assert qoe([0.01] * 10, 0.0, 0.1) == pytest.approx(1.0)
    # Ten tokens are each two tenths of a second late and are read until 1.3 s, which gives areas of 5.5 and 7.5.
    assert qoe([t + 0.2 for t in pace], 0.0, 0.1) == pytest.approx(5.5 / 7.5)
    assert qoe([0.01] * 5 + [0.6] * 5, 0.0, 0.1) == pytest.approx(1.0)
    assert qoe([0.01] * 5 + [0.8] * 5, 0.0, 0.1) < 1.0


def test_arrivals_have_the_stated_rate_and_variation() -> None:
    for process, cv in ("poisson", 1.0), ("gamma", GAMMA_CV):
        drawn = gaps(process, 4.0, 20_000, 1)  # type: ignore[arg-type]
        assert drawn.mean() == pytest.approx(0.25)
        assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.1)
    run = open_loop("poisson", 2.0, 3, 5, 40)
    assert [a.counted for a in run] == [False] * 5 + [True] * 40
    assert run[-1].at_s == pytest.approx(20)
    assert all(a.at_s <= b.at_s for a, b in pairwise(run))
    assert run == open_loop("poisson", 2.0, 3, 5, 40)


def test_ratios_are_paired_by_seed() -> None:
    case = Case("poisson", 1.0, True)
    runs = [Run("a", case, seed, {"x": float(seed + 1)}) for seed in range(3)]
    runs += [Run("b", case, seed, {"x": 2.0 * (seed + 1)}) for seed in range(3)]
    found = ratio(runs, "b", "a", case, "x")
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert np.isnan(ratio(runs, "c", "a", case, "x").median)


def test_a_larger_load_needs_more_blocks() -> None:
    assert reachable_blocks(9) > reachable_blocks(8)


@pytest.mark.filterwarnings("ignore")
def test_never_hit_blocks_are_reused_first() -> None:
    """Unhashed blocks are reused first, then blocks never hit, then blocks that were; least recently used first in
    each."""
    VLLM.require()
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    from tests.bench.cache_never_hit import TwoClassQueue

    blocks = [KVCacheBlock(i) for i in range(6)]
    queue = TwoClassQueue(FreeKVCacheBlockQueue(blocks))
    assert queue.popleft_n(6) == blocks
    queue.were_hit |= {0, 3}
    queue.append_n([blocks[0], blocks[1]])
    queue.append_n([blocks[2], blocks[3], blocks[4]])
    queue.prepend_n([blocks[5]])
    queue.remove(blocks[2])
    assert queue.num_free_blocks == 5
    assert [b.block_id for b in queue.popleft_n(3)] == [5, 1, 4]
    assert [b.block_id for b in queue.popleft_n(2)] == [0, 3]
    assert not queue.were_hit
    queue.append_n([blocks[0]])
    assert queue.popleft_n(1) == [blocks[0]]
