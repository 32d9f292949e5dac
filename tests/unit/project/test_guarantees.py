"""Each guarantee of the README is broken by a mutation that fits the source, and each mutation names a test."""

from __future__ import annotations

import pytest

from tests.guarantees.broken import BROKEN, Broken, item_of
from tests.guarantees.readme import NOT_RUN, items, promises, rows
from tests.sim.mutations import ROOT


def test_every_guarantee_is_broken_once() -> None:
    found = {item_of(broken.guarantee, items()) for broken in BROKEN}
    assert [item for item in items() if item not in found] == []


def test_every_promise_names_tests_that_exist() -> None:
    for promise, tests in promises():
        assert tests, promise
        assert [test for test in tests if not (ROOT / "tests" / test).is_file()] == [], promise


@pytest.mark.parametrize("broken", BROKEN, ids=[broken.mutant.name for broken in BROKEN])
def test_a_mutation_fits_the_source_and_its_test_is_there(broken: Broken) -> None:
    assert (ROOT / broken.mutant.path).read_text().count(broken.mutant.old) == 1
    path, _, name = broken.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text() if name else (ROOT / path).exists()


def test_the_results_are_those_of_the_mutations() -> None:
    """All mutations are listed with the results of their last runs; no test passed with its mutation."""
    named = [(broken.mutant.name, broken.test.removeprefix("tests/")) for broken in BROKEN]
    assert [(name, test) for name, test, _ in rows()] == named
    assert {result for *_, result in rows()} <= {"fails", NOT_RUN}
