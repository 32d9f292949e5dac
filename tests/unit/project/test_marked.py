"""The tokenizer of the engines with multi-token markers has the properties that make such markers hard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from tests.data import marked
from tests.engine.matrix.features.markers import RESPONDS, THOUGHT, THOUGHT_TOKENS
from tests.processes import MARKED

if TYPE_CHECKING:
    from pathlib import Path


def test_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MARKED)
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(f"so {RESPONDS}\n\nso")]
    assert pieces == ["so", " Here", " is", " my", " response", ":\n\n", "so"]
    assert len(tokenizer.encode(THOUGHT)) == THOUGHT_TOKENS


def test_the_folder_is_what_its_script_writes(tmp_path: Path) -> None:
    marked.write(tmp_path)
    for written in tmp_path.iterdir():
        assert written.read_text() == (MARKED / written.name).read_text(), written.name
