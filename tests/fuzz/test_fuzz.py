"""Run the corpus, each case of which once broke something or represents a kind, and some new cases of every target."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, Target

KEPT = [(target, path) for target in TARGETS.values() for path in target.corpus()]
CASES = {"control": 40, "agent": 60}


@pytest.mark.parametrize(("target", "path"), KEPT, ids=[f"{t.name}-{p.stem}" for t, p in KEPT])
def test_what_broke_something_once(target: Target, path: Path) -> None:
    target.run(target.load(path.read_bytes()))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_new_cases(target: Target) -> None:
    for seed in range(CASES.get(target.name, 100)):
        target.run(target.case(seed))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_a_case_survives_the_corpus(target: Target) -> None:
    """A case is the same after it was written to and read from the corpus, so that a failing case can be kept."""
    for seed in range(5):
        content = target.dump(target.case(seed))
        assert target.dump(target.load(content)) == content
