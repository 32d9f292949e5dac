"""Read the list of guarantees in README.md, and read and write the table of mutations beside this file."""

from __future__ import annotations

import re

from tests.guarantees.broken import BROKEN, item_of
from tests.sim.mutations import ROOT

LIST, TABLE = ROOT / "README.md", ROOT / "tests" / "guarantees" / "README.md"
SECTION = "## Guarantees\n"
BEGIN, END = "<!-- guarantees: begin -->\n", "<!-- guarantees: end -->\n"
HEAD = "| guarantee | broken by | test that fails | result |\n|---|---|---|---|\n"
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
    """Return the cells of the present table."""
    table = TABLE.read_text().partition(BEGIN)[2].partition(END)[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def expected(results: dict[str, str]) -> str:
    """Return the table with these results, by mutation."""
    lines = []
    for broken in BROKEN:
        begins, name = item_of(broken.guarantee, items())[: len(broken.guarantee)], broken.mutant.name
        result = results.get(name, NOT_RUN).replace("|", "/")
        lines.append(f"| {begins} … | {name} | `{broken.test.removeprefix('tests/')}` | {result} |\n")
    return f"{HEAD}{''.join(lines)}"


def write(results: dict[str, str]) -> None:
    """Write the table anew; rows whose mutation is not in `results` keep their result."""
    kept = {row[1]: row[3] for row in rows() if len(row) > 3}
    before, _, rest = TABLE.read_text().partition(BEGIN)
    TABLE.write_text(f"{before}{BEGIN}{expected(kept | results)}{END}{rest.partition(END)[2]}")
