"""The table of what was tried on which vLLM holds what is saved, and what is saved is all that there is to try."""

from __future__ import annotations

import pytest

from tests.engine.matrix import results


def test_readme() -> None:
    text = results.README.read_text()
    assert results.with_table(text) == text, "run python -m tests.engine.matrix --write"


@pytest.mark.parametrize("version", results.versions())
def test_saved_results_are_of_what_there_is(version: str) -> None:
    """A feature that is new, renamed or no longer checked is to be run again on every version the table shows."""
    saved = results.load(results.path_of(version))
    assert saved.keys() == results.declared()
    assert {line["result"] for line in saved.values()} <= {"passed", "not supported"}
