"""The table of what was tried on which vLLM holds what is saved, and what is saved is all that there is to try."""

from __future__ import annotations

import pytest

from meridian_agent.hooks import SUPPORTED
from tests.engine.matrix import results


def test_readme() -> None:
    text = results.README.read_text()
    assert results.with_table(text) == text, "run python -m tests.engine.matrix --write"


@pytest.mark.parametrize("version", results.versions())
def test_nothing_is_saved_that_is_no_longer_checked(version: str) -> None:
    saved = results.load(results.path_of(version))
    assert saved.keys() <= results.declared()
    assert {line["result"] for line in saved.values()} <= {"passed", "not supported"}


def test_the_agent_installs_itself_where_there_is_a_column_and_nowhere_else() -> None:
    """In the sources of each minor release of the range, and of no other, every hook was found."""
    found = {tuple(int(n) for n in version.split(".")[:2]) for version in results.versions()}
    (major, first), (_, last) = SUPPORTED
    assert found == {(major, minor) for minor in range(first, last + 1)}
    for version in results.versions():
        assert results.load(results.path_of(version))[results.SOURCES]["result"] == "passed", version
