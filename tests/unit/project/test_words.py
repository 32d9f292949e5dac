"""Sentences and names that a newcomer can read, by rules that a program can check."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCES = sorted(
    path
    for folder in ("meridian_agent", "meridian_control", "kernels", "deploy")
    for path in (ROOT / folder).rglob("*.py")
)
# A sentence that begins with one of these words lacks its subject.
LOST = re.compile(r"(Of|What|Whose|Those|That|Who|Which)\b")
MAX_LINES, MAX_MODULES = 400, 15


def sentences(path: Path) -> Iterator[str]:
    """Yield the beginning of each docstring and each comment."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    before = 0
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            if token.start[0] != before + 1:
                yield token.string.lstrip("# ")
            before = token.start[0]


def test_sentences_are_found() -> None:
    assert len(SOURCES) > 150
    assert sum(bool(sentence) for path in SOURCES for sentence in sentences(path)) > 1500


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_a_sentence_has_a_subject(path: Path) -> None:
    assert [sentence for sentence in sentences(path) if LOST.match(sentence)] == []


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_module_is_too_long_and_no_folder_too_full() -> None:
    assert {path.name: n for path in SOURCES if (n := len(path.read_text().splitlines())) > MAX_LINES} == {}
    folders: dict[Path, int] = defaultdict(int)
    for path in SOURCES:
        folders[path.parent] += 1
    assert {folder.name: n for folder, n in folders.items() if n > MAX_MODULES} == {}
