"""Tests of the figures that the fault benchmark computes from its windows."""

from __future__ import annotations

import pytest

from tests.bench.fault_windows import Course, Pair, Window, ratios
from tests.bench.faults import HEAD, over_before, over_stock, plain, pooled, report


def pair(governed: int, stock: int, longest_s: float = 0.1) -> Pair:
    """Return windows of two seconds in which governed vLLM used one second more of processor time than stock."""
    return {
        "governed": Window(governed, 2.0, 3.0, longest_s, ("READY", "STALE")),
        "stock": Window(stock, 2.0, 2.0, 0.02, ()),
    }


def test_ratios() -> None:
    """A slow round and an equally fast one cancel out."""
    found = over_stock([pair(200, 100)] * 2 + [pair(100, 200)] * 2, "tokens_per_s")
    assert found.value == pytest.approx(1.0)
    assert [found.low, found.high] == pytest.approx([0.5, 2.0])
    assert over_stock([pair(90, 100)] * 2, "tokens_per_cpu_s").value == pytest.approx(0.6)


def test_coming_first_is_no_advantage() -> None:
    """The advantage of the first window of each pair cancels out in a round."""
    found = over_stock([pair(130, 100), pair(100, 130)] * 3, "tokens_per_s")
    assert [found.value, found.low, found.high] == pytest.approx([1.0] * 3)


def test_what_a_fault_has_changed() -> None:
    """The change by a fault is relative to the governed engine's share of stock before it, with the uncertainty of
    both."""
    before, after = [pair(90, 100)] * 2 + [pair(80, 100)] * 2, [pair(45, 100)] * 2 + [pair(40, 100)] * 2
    found = over_before(after, before, "tokens_per_s")
    assert found.value == pytest.approx(0.5)
    assert [found.low, found.high] == pytest.approx([0.5 * 8 / 9, 0.5 * 9 / 8])
    assert ratios(before, "tokens_per_s").tolist() == pytest.approx([0.9, 0.8])


def test_the_report() -> None:
    none = Course("none", after=[pair(110, 100)] * 2)
    killed = Course("killed", during=[pair(50, 100), pair(50, 100, 0.4)], after=[pair(99, 100)] * 2, back_s=1.5)
    text = report(none, [killed, Course("hung", during=[pair(100, 100)] * 2, after=[pair(100, 99)] * 2)])
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == list(HEAD)
    assert [row[0].strip() for row in rows[1:]] == ["none", "killed", "hung", "all faults"]
    assert rows[2][1:6] == ["READY, STALE", "400, 20", "0.500 (0.500 to 0.500)", "0.333 (0.333 to 0.333)", "1.5"]
    assert rows[2][6:9] == ["0.990 (0.990 to 0.990)", "0.660 (0.660 to 0.660)", "0.900 (0.900 to 0.900)"]
    assert "In 8 of 10 pairs" in text
    assert pooled([killed, killed]).longest_s("governed") == 0.4
    assert plain(killed)["longest_gap_s"] == {"governed": 0.4, "stock": 0.02}
