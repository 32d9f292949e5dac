"""The harness's arithmetic, the order of arms, and the pages that it makes."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

import pytest

from tests.bench import harness
from tests.bench.harness import RESULTS, Column, Interval, Runs, Session, in_turn, interval

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.harness import Figures


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 1, 1), (3, 1, 3), (5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10), (20, 6, 15)],
)
def test_the_interval_of_a_median_by_order_statistics(count: int, low: int, high: int) -> None:
    """The bounds are those of the tables of the sign test at 95 %."""
    values = [float(n) for n in range(count, 0, -1)]
    assert interval(values) == Interval((count + 1) / 2, low, high)
    assert math.isnan(interval([]).value)
    assert interval([1.0, math.nan, 3.0]) == Interval(2.0, 1.0, 3.0)


def test_each_arm_comes_first_as_often_as_the_others() -> None:
    assert [in_turn(["a", "b"], n) for n in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert {in_turn(["a", "b", "c"], n)[0] for n in range(3)} == {"a", "b", "c"}


def test_ratios_are_taken_within_a_round_and_starts_count_once() -> None:
    runs = Runs()
    for number, speed in enumerate((1.0, 2.0, 5.0)):
        runs.add("stock", {"x": 10 * speed, "zero": 0.0}, number)
        runs.add("governed", {"x": 9 * speed, "zero": 1.0}, number)
    assert runs.ratio("governed", "stock", "x") == Interval(0.9, 0.9, 0.9)
    assert runs.difference("governed", "stock", "x") == Interval(-2.0, -5.0, -1.0)
    assert math.isnan(runs.ratio("governed", "stock", "zero").value)
    assert math.isnan(runs.ratio("governed", "stock", "unknown").value)
    starts = Runs()
    for start, values in enumerate(([1.0, 1.0, 4.0], [2.0, 2.0, 2.0])):
        for number, value in enumerate(values):
            starts.add("stock", {"x": 1.0}, number, start=start)
            starts.add("governed", {"x": value}, number, start=start)
    assert starts.ratio("governed", "stock", "x") == Interval(1.5, 1.0, 2.0)
    assert Interval(1.0, 0.5, 2.0).over(Interval(2.0, 1.0, 4.0)) == Interval(0.5, 0.125, 2.0)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session("made", "Made up", argparse.Namespace(output=tmp_path, save=False))


async def test_rounds_run_the_arms_in_turns(session: Session) -> None:
    order: list[str] = []

    def run(arm: str, number: int) -> Figures:
        order.append(arm)
        return {"x": float(len(order) + number)}

    await session.rounds(["a", "b"], run, 2)
    assert order == ["a", "b", "b", "a"]
    order.clear()
    await session.rounds(["a", "b"], run, 1, case="mirrored", mirrored=True)
    assert order == ["a", "b", "b", "a"]
    assert session.runs.values("a", "x", "mirrored") == session.runs.values("b", "x", "mirrored") == {(0, 0): 2.5}


def test_a_table_and_a_goal_replace_their_own_and_leave_the_others(session: Session, tmp_path: Path) -> None:
    columns = [Column("x", "speed", 1, "ratio"), Column("y", "share, %", 0, factor=100)]
    session.add("stock", {"x": 2.0, "y": 0.5})
    session.add("governed", {"x": 1.0})
    session.table("First", "A text.", columns, "stock")
    session.goal("speed", ">= 0.9", session.runs.ratio("governed", "stock", "x"))
    session.goal("share, %", "< 60", session.runs.median("stock", "y"), 0, 100)
    again = Session("made", "Made up", session.options)
    again.add("stock", {"x": 3.0}, case="busy")
    again.table("Second", "", columns, "stock")
    text = (tmp_path / "made.md").read_text()
    for line in (
        "| speed | >= 0.9 | 0.500 | **no** |",
        "| share, % | < 60 | 50 | yes |",
        "| stock | 2.0 | 50 |",
        "| arm / stock | speed |",
        "| governed | 0.500 |",
        "| busy | stock | 3.0 |",
    ):
        assert line in text.splitlines()
    assert json.loads((tmp_path / "made.json").read_text())["title"] == "Made up"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_page_of_results_is_made_from_its_data(path: Path) -> None:
    assert path.with_suffix(".md").read_text() == harness.page(json.loads(path.read_text()), path.stem)
    assert path.read_text() == harness.dumped(json.loads(path.read_text()))
