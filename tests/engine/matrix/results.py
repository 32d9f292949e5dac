"""What the matrix found, by vLLM version, and the table in meridian_agent/README.md that is made from it.

Owns both files' form. Runs nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.engine.matrix import features
from tests.engine.matrix.builds import BUILDS
from tests.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "tests" / "data" / "matrix"
README = ROOT / "meridian_agent" / "README.md"
BEGIN, END = "<!-- made by `python -m tests.engine.matrix --write` -->\n", "<!-- end -->\n"
# One line of a build's output, less what names the file and what changes from run to run.
KEPT = ("build", "feature", "result", "detail")


# What is looked up in a version's sources (tests/vllm_sources.py), without an engine.
SOURCES = ("sources", "every hook that is used, with its parameters")


def declared() -> set[tuple[str, str]]:
    """Every (build, feature) there is."""
    return {SOURCES} | {(build, f.name) for f in features.all_of_them().values() for build in f.builds}


def path_of(version: str) -> Path:
    return FOLDER / f"{version}.json"


def load(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    return {(line["build"], line["feature"]): line for line in json.loads(path.read_text())}


def save(lines: list[dict[str, Any]]) -> None:
    """Replace what these lines are about in their version's file; what failed, or is no longer declared, goes."""
    # An engine that ended without a word is of no version.
    for version in {line["vllm"] for line in lines} - {""}:
        path = path_of(version)
        found = load(path) if path.exists() else {}
        found |= {(line["build"], line["feature"]): _kept(line) for line in lines if line["vllm"] == version}
        kept = [found[pair] for pair in sorted(found) if pair in declared() and found[pair]["result"] != "failed"]
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")


def _kept(line: dict[str, Any]) -> dict[str, str]:
    detail = str(line["detail"]).strip().rpartition("\n")[2]
    return {**{name: str(line[name]) for name in KEPT}, "detail": detail}


def versions() -> list[str]:
    """Newest first."""
    return sorted((p.stem for p in FOLDER.glob("*.json")), key=lambda v: [int(n) for n in v.split(".")], reverse=True)


def table() -> str:
    """Rows are features, columns versions; a cell names the engines on which the feature passed."""
    saved = {version: load(path_of(version)) for version in versions()}
    lines = [f"| | {' | '.join(saved)} |", "|---|" + "---|" * len(saved)]
    looked_up = [found.get(SOURCES, {}) for found in saved.values()]
    cells = ["in its sources" if line.get("result") == "passed" else line.get("detail", "") for line in looked_up]
    lines.append(f"| {SOURCES[1]} | {' | '.join(cells)} |")
    for chosen in features.all_of_them().values():
        cells = []
        for found in saved.values():
            came = {b: found[b, chosen.name]["result"] for b in chosen.builds if (b, chosen.name) in found}
            passed = [BUILDS[b].shown for b, result in came.items() if result == "passed"]
            cells.append(", ".join(passed) or ("not supported by vLLM" if came else "not run"))
        lines.append(f"| {chosen.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The README's text with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
