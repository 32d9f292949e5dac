"""Run a part of the matrix; one engine serves all tests of a build."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.matrix import features_of
from tests.engine.matrix.__main__ import run
from tests.engine.matrix.builds import BUILDS

# Entropy, EAT and exact ends, which are guaranteed for every runner and scheduler.
SIGNALS_AND_CAPS = ("greedy", "EAT probes", "caps")
# The guaranteed features, and of the others those on the builds where they differ most; each by its name's beginning.
CHOSEN = {
    "async": (
        *SIGNALS_AND_CAPS,
        "a model that stops",
        "stop strings and stop tokens sleep",
        "loops",
        "entropy rules",
        "no second end",
        "requests that rule",
        "a grammar after",
        "asynchronous",
        "aborts",
        "a waiting request preempts",
        "no request is preempted",
        "replaced weights",
    ),
    "ngram": (*SIGNALS_AND_CAPS, "a grammar after", "drafts"),
    "v2-async": (*SIGNALS_AND_CAPS, "a waiting request preempts", "replaced weights"),
    "tight": ("preemption for a waiting request", "preemption and resumption"),
    "marked-async": ("markers",),
    "example": ("ExampleConnector", "steps of nothing", "blocks that a connector"),
    "nixl-and-example": ("MultiConnector",),
    "priority": ("priority policy",),
    "qwen3-vocabulary": ("caps", "answer reserve", "closing text", "real vocabularies"),
    "gptoss-vocabulary": ("caps", "closing text", "no second end", "real vocabularies"),
}
PAIRS = [(b, f.name) for b, names in CHOSEN.items() for f in features_of(b) if f.name.startswith(names)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, Any]]]:
    """Return a function that runs a build on its first use, and returns the build's line for each of its features."""

    @functools.cache
    def of(build: str) -> dict[str, dict[str, Any]]:
        features = [feature for chosen, feature in PAIRS if chosen == build]
        return {line["feature"]: line for line in run(build, tmp_path_factory.mktemp(build), features)}

    return of


@pytest.mark.parametrize(("build", "feature"), PAIRS, ids=[f"{b}: {f}" for b, f in PAIRS])
def test_feature(lines: Callable[[str], dict[str, dict[str, Any]]], build: str, feature: str) -> None:
    if reason := BUILDS[build].lacks():
        pytest.skip(reason)
    line = lines(build)[feature]
    assert line["result"] == "passed", line["detail"]
