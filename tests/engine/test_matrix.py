"""The matrix on the builds that take seconds: one engine each, one test for each feature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.matrix import features_of
from tests.engine.matrix.__main__ import run

if TYPE_CHECKING:
    from pathlib import Path

BUILDS = ("async", "ngram", "v2")
# Of a whole build: its first test waits for it.
pytestmark = pytest.mark.timeout(1200)
CHOSEN = [(build, feature.name) for build in BUILDS for feature in features_of(build)]


@pytest.fixture(scope="module", params=BUILDS)
def found(request: pytest.FixtureRequest, folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """A build's name and its line for each feature."""
    build_folder = folder / request.param
    build_folder.mkdir()
    return request.param, {line["feature"]: line for line in run(request.param, build_folder)}


@pytest.mark.parametrize(("found", "feature"), CHOSEN, indirect=["found"], ids=[f"{b}: {f}" for b, f in CHOSEN])
def test_feature(found: tuple[str, dict[str, dict[str, Any]]], feature: str) -> None:
    line = found[1][feature]
    assert line["result"] == "passed", line["detail"]
