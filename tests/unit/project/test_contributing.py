"""The checklists of CONTRIBUTING.md name files and names that exist, and links between documents lead somewhere."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CHECKLISTS = (ROOT / "CONTRIBUTING.md").read_text().partition("## Checklists\n")[2]
# Text in backticks: a path, or a name of Python or proto.
QUOTED = re.findall(r"`([^`]+)`", CHECKLISTS)
PATHS = sorted({each for each in QUOTED if "/" in each and " " not in each})
NAMES = sorted({each for each in QUOTED if re.fullmatch(r"[A-Za-z]+_?[A-Za-z_]*", each) and each != "make"})
MODULES = sorted(set(re.findall(r"python -m ([a-z_.]+)", CHECKLISTS)))
TARGETS = sorted(set(re.findall(r"`make ([a-z-]+)", CHECKLISTS)))
DOCUMENTS = sorted(
    subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_a_checklist_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_stands_in_a_file_of_its_point(name: str) -> None:
    (point,) = {point for point in re.split(r"^\d\. |^### ", CHECKLISTS, flags=re.MULTILINE) if f"`{name}`" in point}
    files = [ROOT / path for path in re.findall(r"`([^`]+/[^`]+\.\w+)`", point)]
    assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files)


@pytest.mark.parametrize("module", MODULES)
def test_every_command_of_a_checklist_exists(module: str) -> None:
    path = ROOT.joinpath(*module.split("."))
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_a_checklist_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """A link leads to a file and, if it names a heading, to a heading that the file has."""
    source = ROOT / document
    for link in re.findall(r"\]\(([^)\s]+)\)", source.read_text()):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (source.parent / path).resolve() if path else source
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in _headings(target), link


def _headings(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    found = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
