"""The matrix's results by vLLM version, and the table in the agent's versions.md that is made from them.

The module owns the form of both files. The module runs no engine.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from tests.engine.matrix import features
from tests.engine.matrix.builds import BUILDS
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.engine.matrix import Feature

    # The lines of one version, by build and feature.
    Saved = dict[tuple[str, str], dict[str, str]]

FOLDER = ROOT / "tests" / "data" / "matrix"
PAGE = ROOT / "meridian_agent" / "vllm_adapter" / "versions.md"
BEGIN, END = "<!-- made by `python -m tests.engine.matrix --write` -->\n", "<!-- end -->\n"
# Fields of a build's output line that are kept; left out are the file's name and fields that change from run to run.
KEPT = ("build", "feature", "result", "detail")
PASSED, FAILED, UNSUPPORTED, NOT_RUN = "passed", "failed", "not supported", "not run"
# Results whose reason is given under the table, with their words in the table.
SHOWN = {FAILED: "**failed**", UNSUPPORTED: "cannot"}

# The feature that is looked up in a version's sources (tests/vllm_sources.py), without an engine.
SOURCES = ("sources", "every hook that is used, with its parameters")
# Texts of stock vLLM's errors or of failed checks, and their explanations.
REASONS = {
    "no step across the end of thinking": "the check found no prompt after which drafts run across the end marker",
    "answers the same request differently": "vLLM answers the same request with the same seed differently",
    "beside a request without one": "vLLM's CPU build ignores a seed beside requests without one, such as probes",
    "reasoning_config is not configured": "vLLM has no thinking budget for markers of several tokens",
    "does not yet support: speculative method": "vLLM's Model Runner V2 takes no ngram drafts",
    "does not yet support: ngram": "vLLM's Model Runner V2 takes no ngram drafts",
    "Cannot inspect kernel parameters": "vLLM's CPU build ends with an error at a draft for a sampled request, on V1",
}


def declared() -> set[tuple[str, str]]:
    """Return every declared pair of build and feature."""
    return {SOURCES} | {(build, f.name) for f in features.all_of_them().values() for build in f.builds}


def path_of(version: str) -> Path:
    return FOLDER / f"{version}.json"


def load(path: Path) -> Saved:
    return {(line["build"], line["feature"]): line for line in json.loads(path.read_text())}


def save(lines: list[dict[str, Any]]) -> None:
    """Replace these lines' results in their version's file, and drop lines that are no longer declared."""
    for version in {line["vllm"] for line in lines}:
        path = path_of(version)
        found = load(path) if path.exists() else {}
        found |= {(line["build"], line["feature"]): _kept(line) for line in lines if line["vllm"] == version}
        kept = [found[pair] for pair in sorted(found) if pair in declared()]
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")


def _kept(line: dict[str, Any]) -> dict[str, str]:
    # A pydantic error has its message before the reference to further information.
    detail = str(line["detail"]).partition("For further information")[0].strip().rpartition("\n")[2].strip()
    return {**{name: str(line[name]) for name in KEPT}, "detail": detail}


def versions() -> list[str]:
    """Return the versions with results, newest first."""

    def numbers(version: str) -> list[int]:
        return [int(n) for n in version.partition("+")[0].split(".")]

    return sorted((p.stem for p in FOLDER.glob("*.json")), key=numbers, reverse=True)


def saved() -> dict[str, Saved]:
    return {version: load(path_of(version)) for version in versions()}


def table(found: Mapping[str, Saved]) -> str:
    """Return the table. Columns are engines; a row has the features with the same results, and a cell the versions that
    passed there and other results."""
    run = {version: lines for version, lines in found.items() if lines.keys() - {SOURCES}}
    columns = list(dict.fromkeys(build.shown for build in BUILDS.values()))
    read = [version for version, lines in found.items() if lines.get(SOURCES, {}).get("result") == PASSED]
    lines = [f"The sources of vLLM {', '.join(read)} contain every hook that the agent uses, with its parameters.", ""]
    lines += [f"| feature | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    reasons: dict[str, int] = {}
    rows: dict[str, list[str]] = {}
    for chosen in features.all_of_them().values():
        cells = [_cell(chosen, column, run, reasons) for column in columns]
        rows.setdefault(" | ".join(cells), []).append(chosen.name)
    lines += [f"| {'<br>'.join(names)} | {cells} |" for cells, names in rows.items()]
    lines += ["", *(f"[{number}] {reason}.  " for reason, number in reasons.items())]
    return "\n".join(lines).rstrip() + "\n"


def _cell(chosen: Feature, column: str, run: Mapping[str, Saved], reasons: dict[str, int]) -> str:
    """Return a cell, with passed versions first, and without those that were not run if any was; a feature is for at
    most one build of a column."""
    builds = [build for build in chosen.builds if BUILDS[build].shown == column]
    if not builds:
        return ""
    (build,) = builds
    came: dict[str, list[str]] = {}
    for version, lines in run.items():
        line = lines.get((build, chosen.name), {"result": NOT_RUN})
        said = SHOWN.get(line["result"], line["result"])
        if line["result"] in SHOWN:
            said += f" [{reasons.setdefault(_reason(line), len(reasons) + 1)}]"
        came.setdefault(said, []).append(version)
    came.pop(NOT_RUN, None)
    if not came:
        return NOT_RUN
    passed = came.pop(PASSED, [])
    parts = ["all" if len(passed) == len(run) else _list(passed, list(run))] if passed else []
    parts += [f"{said}: {_list(at, list(run))}" for said, at in came.items()]
    return "; ".join(parts)


def _reason(line: dict[str, str]) -> str:
    return next((words for part, words in REASONS.items() if part in line["detail"]), line["detail"])


def _list(names: Sequence[str], of: Sequence[str]) -> str:
    """Return the names as a list, with three or more consecutive names of `of` written as a range."""
    short = [name.replace(".0+", "+").removesuffix(".0") for name in names]
    at = [of.index(name) for name in names]
    parts: list[str] = []
    for _, run in itertools.groupby(range(len(names)), key=lambda n: at[n] - n):
        first, *rest = (short[n] for n in run)
        parts += [f"{first} to {rest[-1]}"] if len(rest) > 1 else [first, *rest]
    return ", ".join(parts)


def with_table(text: str) -> str:
    """Return the page's text with a new table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(saved())}\n{END}{rest.partition(END)[2]}"
