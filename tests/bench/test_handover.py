"""The figures of the handover benchmark, from times that are written down."""

from __future__ import annotations

from typing import Any

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from tests.bench import handover_pools, scheduling_load
from tests.bench.handover_pools import MIXED, SPLIT, Load, Run, Table, Timing

CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning": "a"}}]},
    {"choices": [{"delta": {"content": "b"}}]},
    {"choices": [{"delta": {"content": "c"}}]},
    {"choices": [], "usage": {"completion_tokens": 4}},
]


def test_chunks_are_read_by_what_they_carry() -> None:
    timing = Timing(0.0, [], 0)
    for now_s, chunk in enumerate(CHUNKS):
        timing = handover_pools.read(timing, chunk, now_s)
    assert timing == (1.0, [2.0, 3.0], 4)
    with pytest.raises(RuntimeError, match="a stream failed"):
        handover_pools.read(timing, {"error": "gone"}, 9.0)


def test_figures_of_a_run() -> None:
    timings = [Timing(1.0, [1.5, 1.6, 1.8], 10), Timing(2.0, [2.25], 30)]
    found = handover_pools.figures(timings, 0.0, 4.0)
    # The gaps are 100 and 200 ms, and the first chunks come after 500 and 250 ms.
    assert found == pytest.approx({"itl_p99": 199.0, "ttot_p99": 497.5, "throughput": 10.0})


def test_ratios_are_medians_over_pairs() -> None:
    def run(arm: str, seed: int, value: float) -> Run:
        return Run(arm, seed, dict.fromkeys(handover_pools.FIGURES, value))

    pairs = [(1.0, 0.5), (2.0, 0.2), (1.0, 3.0)]
    runs = [run(arm, seed, v) for seed, pair in enumerate(pairs) for arm, v in zip((MIXED, SPLIT), pair, strict=True)]
    table = Table({("l", MIXED): 2.0}, {("l", 1.0): runs})
    assert table.ratios("l", 1.0) == dict.fromkeys(handover_pools.FIGURES, 0.5)
    assert any("| l | 1 | mixed | 1 | 1 | 1 |" in line for line in table.lines())


def test_answers_have_the_loads_length() -> None:
    usual, longer = scheduling_load.requests(1, 50), handover_pools.drawn(Load("l", 100), 1, 50)
    assert [(r.prompt, r.think_tokens) for r in longer] == [(r.prompt, r.think_tokens) for r in usual]
    assert all(abs(b.answer_tokens - 2.5 * a.answer_tokens) <= 0.5 for a, b in zip(usual, longer, strict=True))
