"""Each guarantee of the README has functions that are broken on purpose, and tests that notice it."""

from __future__ import annotations

import re

import pytest

from tests.guarantees.__main__ import Row, rows
from tests.guarantees.mutations import ROOT, mutants, path_of

SECTION = "## Guarantees\n"


def promises() -> list[tuple[str, list[str]]]:
    """Return each promise of the README's table with its tests, as paths in `tests`."""
    section = (ROOT / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(promise, re.findall(r"`([^`]+)`", tests)) for promise, tests in lines]


def test_every_guarantee_has_a_row_and_tests_that_exist() -> None:
    for promise, tests in promises():
        assert any(promise.startswith(row.guarantee) for row in rows()), promise
        assert tests, promise
        assert [test for test in tests if not (ROOT / "tests" / test).is_file()] == [], promise


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.function} {row.test}")
def test_a_row_names_a_guarantee_a_function_and_a_test(row: Row) -> None:
    assert len([promise for promise, _ in promises() if promise.startswith(row.guarantee)]) == 1
    path, name = path_of(row.function), row.test.partition("::")[2]
    assert next(mutants((ROOT / path).read_text(), path.stem, row.function))
    text = (ROOT / "tests" / row.test.partition("::")[0]).read_text()
    assert not name or f"def {name}(" in text
    assert row.noticed != "0"
