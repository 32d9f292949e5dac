"""Some editors begin a file with a byte order mark, which is no part of its text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from meridian_control.cli import contexts
from meridian_control.offline.correctness import from_labels
from meridian_control.policy import formats
from meridian_control.server.roles import Identities
from tests.fakes import traces
from tests.fakes.replays import made, recorded_in

MARK = "\ufeff"


def test_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{MARK}[scheduler]\nmax_think_tokens = 4000\n"
    (file := tmp_path / "policy.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    read = [formats.load_tables(path) for path in (file, formats.STANDARD_INPUT)]
    assert read == [{"scheduler": {"max_think_tokens": 4000}}] * 2


def test_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that changes the current context must still find the field in the first line."""
    (file := tmp_path / "contexts.toml").write_text(
        f'{MARK}current = "a"\n[contexts.a]\nserver = "a:1"\n[contexts.b]\nserver = "b:1"\n', encoding="utf-8"
    )
    monkeypatch.setenv("MERIDIAN_CONTEXTS", str(file))
    assert contexts.load().current == "a"
    contexts.use("b")
    assert contexts.load().current == "b"


def test_access(tmp_path: Path) -> None:
    (file := tmp_path / "access.toml").write_text(
        f'{MARK}[[identity]]\nuri = "spiffe://meridian/viewer"\nrole = "viewer"\n', encoding="utf-8"
    )
    Identities(file)


def test_labels(tmp_path: Path) -> None:
    requests = made(3)
    file, episodes = traces.write_labels(tmp_path / "labels.jsonl", requests), recorded_in(tmp_path, requests)
    before = from_labels(file, episodes).natural.tolist()
    file.write_text(MARK + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert from_labels(file, episodes).natural.tolist() == before
