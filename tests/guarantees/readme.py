"""Read the list of guarantees in README.md, and read and write the results of the mutations in results.csv."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from tests.guarantees.broken import BROKEN
from tests.sim.mutations import ROOT

LIST, RESULTS = ROOT / "README.md", Path(__file__).with_name("results.csv")
SECTION = "## Guarantees\n"
HEAD = ["broken by", "test that fails", "result"]
NOT_RUN = "not run yet"


def items() -> list[str]:
    """Return the promises of the README's table."""
    return [promise for promise, _ in promises()]


def promises() -> list[tuple[str, list[str]]]:
    """Return each promise of the README's table with its tests, as paths in `tests`."""
    section = LIST.read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(promise, re.findall(r"`([^`]+)`", tests)) for promise, tests in lines]


def rows() -> list[list[str]]:
    """Return the kept results: mutation, test and result."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def write(results: dict[str, str]) -> None:
    """Write the results anew; a mutation that is not in `results` keeps its result."""
    kept = {name: result for name, _, result in rows()} | results
    made = [[b.mutant.name, b.test.removeprefix("tests/"), kept.get(b.mutant.name, NOT_RUN)] for b in BROKEN]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *made])
