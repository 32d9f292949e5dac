"""The table of features and vLLM versions shows the saved results, and results are saved for all that can be tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from meridian_agent.vllm_adapter.version import SUPPORTED
from tests.engine import offline
from tests.engine.matrix import results
from tests.engine.matrix.features import all_of_them
from tests.engine.matrix.features.signals import VOCABULARIES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


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


def test_entropies_may_differ_by_what_rounding_does_to_logits_and_by_no_more() -> None:
    """Each logit is off in the direction that changes the entropy most."""
    logits = np.random.default_rng(0).normal(size=201_088)
    logits[:20] += 10.0
    exact = _logprobs(logits)
    worst = logits - 0.99 * offline.LOGIT_NATS * np.sign(exact + offline.entropy(exact))
    off = offline.entropy(_logprobs(worst)) - offline.entropy(exact)
    assert offline.TOLERANCE_NATS < abs(off) <= offline.tolerance(exact)
    left_out = offline.entropy(_logprobs(logits[1:])) - offline.entropy(exact)
    assert abs(left_out) > offline.tolerance(exact)
    assert offline.tolerance(_logprobs(logits[: offline.FEW_IDS])) == offline.TOLERANCE_NATS


def _logprobs(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = logits - logits.max()
    found -= np.log(np.exp(found).sum())
    return found


def test_a_cell_tells_what_failed_from_what_was_not_run_what_vllm_cannot_and_what_is_for_other_engines() -> None:
    def line(result: str, detail: str = "") -> dict[str, str]:
        return {"result": result, "detail": detail}

    caps, drafts = (next(f.name for f in all_of_them().values() if f.name.startswith(s)) for s in ("caps:", "drafts:"))
    sources = {results.SOURCES: line("passed")}
    newest = {(build, caps): line("passed") for build in ("v1", "async", "ngram")}
    older = newest | {
        ("async", caps): line("failed", "it is late"),
        ("ngram", caps): line("not supported", "it breaks"),
    }
    some = newest | {("v2", caps): line("passed")}
    made = results.table({"0.9.0": sources, "0.8.0": sources | some, "0.7.0": sources | older})
    head, *rows = (row for row in made.split("\n") if row.startswith("| "))
    cells = {
        name: dict(zip(head.split(" | "), row.split(" | "), strict=True))
        for row in rows
        for name in row.split(" | ")[0][2:].split("<br>")
    }
    assert made.startswith("The sources of vLLM 0.9.0, 0.8.0, 0.7.0 contain every hook")
    assert cells[caps]["V1"] == "all"
    assert cells[caps]["async"] == "0.8; **failed** [1]: 0.7"
    assert cells[caps]["V2"] == "0.8"
    assert cells[drafts]["V1, drafts"] == "not run"
    assert cells[caps]["V1, drafts"] == "0.8; cannot [2]: 0.7"
    assert cells[drafts]["V1"] == "–"
    assert made.endswith("[1] it is late.  \n[2] it breaks.\n")


def test_versions_that_follow_each_other_are_named_by_the_first_and_the_last() -> None:
    build, caps = "v1", next(f.name for f in all_of_them().values() if f.name.startswith("caps:"))
    passed, failed = {"result": "passed", "detail": ""}, {"result": "failed", "detail": "it is late"}
    came = {f"0.{n}.0": {(build, caps): failed if n == 5 else passed} for n in range(9, 2, -1)}
    (row,) = (row for row in results.table(came).split("\n") if caps in row.split(" | ")[0])
    assert row.split(" | ")[1] == "0.9 to 0.6, 0.4, 0.3; **failed** [1]: 0.5"


def test_what_failed_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    build, feature = min(pair for pair in results.declared() if pair[1].startswith("priority"))
    said = {"build": build, "feature": feature, "vllm": "0.8.0", "seconds": 1.0}
    results.save([{**said, "result": "passed", "detail": ""}])
    results.save([{**said, "result": "failed", "detail": "Traceback\nAssertionError: 5"}])
    kept = results.load(tmp_path / "0.8.0.json")
    assert (kept[build, feature]["result"], kept[build, feature]["detail"]) == ("failed", "AssertionError: 5")


def test_the_agent_installs_itself_where_there_is_a_column_and_nowhere_else() -> None:
    """Results are saved for each minor release of the supported range and no other, and every hook was found in the
    sources of each."""
    found = {tuple(int(n) for n in version.split(".")[:2]) for version in results.versions()}
    (major, first), (_, last) = SUPPORTED
    assert found == {(major, minor) for minor in range(first, last + 1)}
    for version in results.versions():
        assert results.load(results.path_of(version))[results.SOURCES]["result"] == results.PASSED, version
