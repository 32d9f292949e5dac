"""The pages of results are made from their data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import harness


@pytest.mark.parametrize("path", sorted(harness.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_page_of_results_is_made_from_its_data(path: Path) -> None:
    assert path.with_suffix(".md").read_text() == harness.page(json.loads(path.read_text()), path.stem)
    assert path.read_text() == harness.dumped(json.loads(path.read_text()))
