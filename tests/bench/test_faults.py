"""What the fault benchmark makes of its windows."""

from __future__ import annotations

import pytest

from tests.bench.fault_windows import Course, Pair, Window, ratio
from tests.bench.faults import HEAD, plain, pooled, report


def pair(governed: int, stock: int, longest_s: float = 0.1) -> Pair:
    """Windows of two seconds, of which governed vLLM's used one second more of processor time."""
    return {
        "governed": Window(governed, 2.0, 3.0, longest_s, ("READY", "STALE")),
        "stock": Window(stock, 2.0, 2.0, 0.02, ()),
    }


def test_ratios() -> None:
    """A slow pair and a fast one, as far from 1 as each other, cancel out."""
    found = ratio([pair(200, 100), pair(100, 200)], "tokens_per_s")
    assert found.value == pytest.approx(1.0)
    assert [found.low, found.high] == pytest.approx([0.5, 2.0])
    assert ratio([pair(90, 100)], "tokens_per_cpu_s").value == pytest.approx(0.6)


def test_the_report() -> None:
    none = Course("none", after=[pair(100, 100)])
    killed = Course("killed", during=[pair(50, 100), pair(50, 100, 0.4)], after=[pair(99, 100)], back_s=1.5)
    text = report(none, [killed, Course("hung", during=[pair(100, 100)], after=[pair(100, 99)])])
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == list(HEAD)
    assert [row[0].strip() for row in rows[1:]] == ["none", "killed", "hung", "all faults"]
    assert rows[2][1:6] == ["READY, STALE", "400, 20", "0.500 (0.500 to 0.500)", "0.333 (0.333 to 0.333)", "1.5"]
    assert pooled([killed, killed]).longest_s("governed") == 0.4
    assert plain(killed)["longest_gap_s"] == {"governed": 0.4, "stock": 0.02}
