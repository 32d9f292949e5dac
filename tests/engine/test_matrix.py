"""The matrix on the builds that take seconds, as far as the table has it; one engine serves all tests of a build."""

from __future__ import annotations

from typing import Any

import pytest

from meridian_agent.hooks import vllm_version
from tests.engine.matrix import results
from tests.engine.matrix.__main__ import run

BUILDS = ("async", "ngram", "v2", "priority", "grammar")
# Of a whole build: its first test waits for it.
pytestmark = pytest.mark.timeout(1200)
SAVED = results.load(results.path_of(vllm_version())).values()
PASSED = [(line["build"], line["feature"]) for line in SAVED if line["result"] == "passed"]
CHOSEN = [(build, feature) for build in BUILDS for of, feature in PASSED if of == build]


@pytest.fixture(scope="module", params=BUILDS)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, dict[str, Any]]]:
    """A build's name and its line for each feature."""
    build_folder = tmp_path_factory.mktemp(request.param)
    features = [feature for build, feature in CHOSEN if build == request.param]
    return request.param, {line["feature"]: line for line in run(request.param, build_folder, features)}


@pytest.mark.parametrize(("found", "feature"), CHOSEN, indirect=["found"], ids=[f"{b}: {f}" for b, f in CHOSEN])
def test_feature(found: tuple[str, dict[str, dict[str, Any]]], feature: str) -> None:
    line = found[1][feature]
    assert line["result"] == "passed", line["detail"]
