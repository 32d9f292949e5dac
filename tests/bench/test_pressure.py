"""The figures of the benchmark of thinking under pressure."""

from __future__ import annotations

import math

import pytest

from tests.bench.pressure import DEFAULT, PRESSURE, STATIC, STOCK, Answer, Figures, equal_cap, figures, ratio, summary


def test_goodput_counts_answers_within_both_targets() -> None:
    answers = [
        Answer(1.0, 0.1, 10, right=True),
        Answer(1.0, 0.3, 20, right=False),
        Answer(2.1, 0.1, 30, right=True),
        Answer(math.nan, 0.0, 40, right=False),
    ]
    assert figures(answers, 4.0, target_s=2.0, gap_s=0.2) == Figures(0.25, 0.5, 25.0)


def test_an_equal_cap_has_the_nearest_mean() -> None:
    assert equal_cap([10, 20, 30], 20.0) == 30
    assert equal_cap([10, 20, 30], 10.1) == 10
    assert equal_cap([10, 20, 30], 16.6) == 20


def test_the_last_line() -> None:
    low, high = Figures(1.0, 0.5, 100.0), Figures(3.0, 0.7, 50.0)
    runs = {arm: [low, low, low] for arm in (STOCK, DEFAULT, STATIC)} | {PRESSURE: [high, low, high]}
    told = summary({1.2: runs})
    assert told["1.2"][PRESSURE] == {"goodput": 3.0, "accuracy": 0.7, "think_tokens": 50.0}
    assert told["ratios"] == {"1.2": {STOCK: 3.0, STATIC: 3.0}}
    assert ratio([high], [Figures(0.0, 0.0, 0.0)]) is None
    assert ratio([high], [low]) == pytest.approx(3.0)
