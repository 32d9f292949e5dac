"""The table of features and vLLM versions shows the saved results, and results are saved for all that can be tried."""

from __future__ import annotations

import pytest

from meridian_agent.vllm_adapter.version import SUPPORTED
from tests.engine.matrix import results
from tests.engine.matrix.features.signals import VOCABULARIES


def test_readme() -> None:
    text = results.PAGE.read_text()
    assert results.with_table(text) == text, "run python -m tests.engine.matrix --write"


@pytest.mark.parametrize("version", results.versions())
def test_nothing_is_saved_that_is_no_longer_checked(version: str) -> None:
    saved = results.load(results.path_of(version))
    assert saved.keys() <= results.declared()
    assert {line["result"] for line in saved.values()} <= {results.PASSED, results.FAILED, results.UNSUPPORTED}


def test_no_feature_fails_on_the_newest_version_with_a_cpu_build_and_all_have_run_on_real_vocabularies() -> None:
    newest = next(found for found in results.saved().values() if found.keys() - {results.SOURCES})
    assert [pair for pair, line in newest.items() if line["result"] == results.FAILED] == []
    assert [pair for pair in results.declared() - newest.keys() if pair[0] in VOCABULARIES] == []


def test_the_agent_installs_itself_where_there_is_a_column_and_nowhere_else() -> None:
    """Results are saved for each minor release of the supported range and no other, and every hook was found in the
    sources of each."""
    found = {tuple(int(n) for n in version.split(".")[:2]) for version in results.versions()}
    (major, first), (_, last) = SUPPORTED
    assert found == {(major, minor) for minor in range(first, last + 1)}
    for version in results.versions():
        assert results.load(results.path_of(version))[results.SOURCES]["result"] == results.PASSED, version
