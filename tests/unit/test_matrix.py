"""The table of what was tried on which vLLM holds what is saved, and what is saved is all that there is to try."""

from __future__ import annotations

import pytest

from tests.engine.matrix import results


def test_readme() -> None:
    text = results.README.read_text()
    assert results.with_table(text) == text, "run python -m tests.engine.matrix --write"


@pytest.mark.parametrize("version", results.versions())
def test_nothing_is_saved_that_is_no_longer_checked(version: str) -> None:
    saved = results.load(results.path_of(version))
    assert saved.keys() <= results.declared()
    assert {line["result"] for line in saved.values()} <= {"passed", "not supported"}
