"""The matrix on the builds that take seconds, as far as the table has it; one engine serves all tests of a build."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from meridian_agent.hooks import vllm_version
from tests.engine.matrix import results
from tests.engine.matrix.__main__ import run

if TYPE_CHECKING:
    from collections.abc import Callable

BUILDS = ("async", "ngram", "v2", "priority", "grammar")
# Of a whole build: its first test waits for it.
pytestmark = pytest.mark.timeout(1200)
SAVED = results.load(results.path_of(vllm_version())).values()
PASSED = [(line["build"], line["feature"]) for line in SAVED if line["result"] == "passed"]
CHOSEN = [(build, feature) for build in BUILDS for of, feature in PASSED if of == build]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, Any]]]:
    """A build's line for each of its features; it runs when it is first asked for."""

    @functools.cache
    def of(build: str) -> dict[str, dict[str, Any]]:
        features = [feature for chosen, feature in CHOSEN if chosen == build]
        return {line["feature"]: line for line in run(build, tmp_path_factory.mktemp(build), features)}

    return of


@pytest.mark.parametrize(("build", "feature"), CHOSEN, ids=[f"{b}: {f}" for b, f in CHOSEN])
def test_feature(lines: Callable[[str], dict[str, dict[str, Any]]], build: str, feature: str) -> None:
    line = lines(build)[feature]
    assert line["result"] == "passed", line["detail"]
