"""The figures of the benchmark with vLLM's own client, from result files that are written down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bench import serve
from tests.bench.program import BenchError
from tests.bench.serve import GOVERNED, LINES, STOCK, Figures, Pair


def result(throughput: float = 10.0, **others: float) -> Figures:
    """Return the figures of a run; a figure that is not named is 1."""
    return {**dict.fromkeys(LINES.values(), 1.0), "failed": 0.0, "request_throughput": throughput, **others}


def test_a_result_file_is_read_by_names() -> None:
    written: dict[str, Any] = {**result(11.5), "completed": 150, "date": "20260101-000000", "label": None}
    found = serve.figures(json.loads(json.dumps(written)))
    assert (found["request_throughput"], found["completed"]) == (11.5, 150.0)
    assert found.keys() == set(LINES.values())
    with pytest.raises(BenchError, match="no p99_ttft_ms, p99_itl_ms"):
        serve.figures({**written, "p99_itl_ms": None} | {"p99_ttft_ms": "slow"})


def test_a_ratio_is_the_mean_over_starts() -> None:
    """A pair that is twice as fast and a pair that is half as fast cancel out, however fast both runs are. Pairs of one
    start do not narrow the interval."""
    pairs = [Pair(result(10.0), result(20.0)), Pair(result(1.0), result(0.5), start=1)]
    found = serve.ratio(pairs, "request_throughput")
    assert found.value == pytest.approx(1.0)
    # The quantile of Student's distribution with one degree of freedom is 12.71, and the standard error log(2).
    assert [found.low, found.high] == pytest.approx([2**-12.706, 2**12.706], rel=1e-3)
    assert serve.ratio(pairs * 5, "request_throughput") == found
    with pytest.raises(BenchError, match="no p99_itl_ms"):
        serve.ratio([Pair(result(), result(p99_itl_ms=0.0))], "p99_itl_ms")


def test_the_last_line() -> None:
    runs = [(result(10.0, p99_itl_ms=20.0), result(9.9, p99_itl_ms=22.0, p99_ttft_ms=0.5, failed=2.0))] * 3
    found = serve.summary([Pair(stock, governed) for stock, governed in runs])
    assert found == {"throughput": 0.99, "itl_p99": 1.1, "ttft_p99": 0.5, "pairs": 3, "failed": 6}


def test_the_report() -> None:
    pairs = [
        Pair(result(10.0), result(9.0), 0.1),
        Pair(result(30.0), result(27.0), 0.4, start=1),
        Pair(result(20.0), result(18.0), start=2),
    ]
    lines = serve.report(pairs, serve.parse(["--starts", "3", "--prompts", "30", "--thinking"])).splitlines()
    assert "| Request throughput (req/s) | 20.00 | 18.00 | 0.900 (0.900 to 0.900) |" in lines
    assert "| Failed requests | 0 | 0 | |" in lines
    assert "3 starts of both servers, 3 pairs" in lines[2]
    assert "30 random prompts as chat requests that think" in lines[2]
    assert "at most 0.40 cores" in lines[2]


async def test_the_first_arm_of_a_pair_alternates() -> None:
    runs: list[tuple[str, int]] = []

    def run(arm: str, seed: int) -> Figures:
        runs.append((arm, seed))
        return result()

    options = serve.parse(["--pairs", "3", "--patience-s", "0"])
    assert len(await serve.measure(run, options)) == 3
    # The first pair is not counted, and each pair has a seed of its own.
    order = [(STOCK, GOVERNED), (STOCK, GOVERNED), (GOVERNED, STOCK), (STOCK, GOVERNED)]
    assert runs == [(arm, seed) for seed, arms in enumerate(order) for arm in arms]
    runs.clear()
    assert {pair.start for pair in await serve.measure(run, options, start=1)} == {1}
    assert runs == [(arm, serve.SEEDS + seed) for seed, arms in enumerate(order) for arm in reversed(arms)]
