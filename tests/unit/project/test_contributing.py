"""The checklists of CONTRIBUTING.md name files and names that exist, and links between documents lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.processes import ROOT

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


def test_every_path_command_and_target_of_a_checklist_exists() -> None:
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
    for module in MODULES:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(TARGETS) <= set(targets)


def test_every_name_stands_in_a_file_of_its_point() -> None:
    points = re.split(r"^\d\. |^### ", CHECKLISTS, flags=re.MULTILINE)
    for name in NAMES:
        (point,) = {point for point in points if f"`{name}`" in point}
        files = [ROOT / path for path in re.findall(r"`([^`]+/[^`]+\.\w+)`", point)]
        assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files), name


def test_links_lead_somewhere() -> None:
    """A link leads to a file and, if it names a heading, to a heading that the file has."""
    for document in DOCUMENTS:
        source = ROOT / document
        for link in re.findall(r"\]\(([^)\s]+)\)", source.read_text()):
            if "://" in link:
                continue
            path, _, heading = link.partition("#")
            target = (source.parent / path).resolve() if path else source
            assert target.exists(), (document, link)
            if heading and target.suffix == ".md":
                assert heading in _headings(target), (document, link)


def _headings(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    found = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
