"""The file of the last good settings: kept settings come back, and nothing else does."""

from __future__ import annotations

import json
import logging
import pwd
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link import settings_file as state
from meridian_agent.link.settings_file import StateFile, state_folder
from tests.processes import BUSY, wait_for

SETTINGS = agent_pb2.Settings(
    revision=7,
    max_think_tokens=99,
    answer_reserve_tokens=9,
    think_end_token_ids=[5, 6],
    closing_text="ä",
    lease_ms=500,
)


def kept(folder: Path, settings: agent_pb2.Settings = SETTINGS) -> StateFile:
    file = StateFile(folder, "rack/7", "m")
    file.keep(settings)
    wait_for(lambda: (found := file.load()) and found.revision == settings.revision, 5, "the file")
    return file


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    file = kept(tmp_path / "new" / "folder")
    assert StateFile(tmp_path / "new" / "folder", "rack/7", "m").load() == SETTINGS
    assert file.path == tmp_path / "new" / "folder" / "rack%2F7.json"
    assert list(file.path.parent.iterdir()) == [file.path], "no temporary file is left behind"


def test_the_newest_wins(tmp_path: Path) -> None:
    file = kept(tmp_path)
    for revision in range(8, 40):
        file.keep(agent_pb2.Settings(revision=revision))
    wait_for(lambda: file.load() == agent_pb2.Settings(revision=39), 5, "the newest")


def test_a_disk_that_hangs_keeps_nothing_but_the_newest_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, goes_on = StateFile(tmp_path, "e", "m"), threading.Event()
    write = file._write

    def write_later(settings: agent_pb2.Settings) -> None:
        goes_on.wait(10)
        write(settings)

    monkeypatch.setattr(file, "_write", write_later)
    for revision in range(100):
        file.keep(agent_pb2.Settings(revision=revision))
    assert file._wanted.qsize() <= 1
    goes_on.set()
    wait_for(lambda: file.load() == agent_pb2.Settings(revision=99), 5, "the newest")


def test_a_program_with_many_engines_has_no_thread_of_those_that_are_gone(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "e", "m")
    file.keep(SETTINGS)
    file.close()
    assert file._thread is not None
    file._thread.join(10 * BUSY)
    assert not file._thread.is_alive()
    assert file.load() == SETTINGS


def test_an_experiments_cap_does_not_outlive_a_restart(tmp_path: Path) -> None:
    experiment = agent_pb2.Settings(revision=7, max_think_tokens=99, answer_reserve_tokens=9, scheduler_lease_ms=1000)
    loaded = kept(tmp_path, experiment).load()
    assert loaded is not None
    assert (loaded.revision, loaded.HasField("max_think_tokens"), loaded.answer_reserve_tokens) == (7, False, 0)


def test_nothing_kept_is_nothing_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert StateFile(tmp_path, "e", "m").load() is None
    assert not caplog.records


def content(**changes: Any) -> str:
    return json.dumps({"format": 1, "engine_id": "e", "model": "m", "settings": {"revision": "7"}, **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ("\xff", "decode"),
        ("7", "the file has no settings"),
        (content(format=0), "format is 0, not 1"),
        (content(engine_id="other"), "engine_id is 'other', not 'e'"),
        (content(model="other"), "model is 'other', not 'm'"),
        (content(settings={"revision": "seven"}), "Failed to parse revision"),
        (content(settings={"from_the_future": 1}), "no field named"),
        (content(settings=None), "the file has no settings"),
        (" " * (state.MAX_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_what_cannot_be_used_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    file = StateFile(tmp_path, "e", "m")
    (tmp_path / "e.json").write_bytes(text.encode("latin-1"))
    assert file.load() is None
    (record,) = caplog.records
    assert str(file.path) in record.getMessage()
    assert "\n" not in record.getMessage()
    assert said.lower() in record.getMessage().lower()


def test_a_field_that_was_removed_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Agents up to version 0.3.0 keep repeats_from_tokens; their caps must not be lost with it."""
    settings = {"revision": "7", "maxThinkTokens": 99, "repeatsFromTokens": 720}
    (tmp_path / "e.json").write_text(content(settings=settings))
    assert StateFile(tmp_path, "e", "m").load() == agent_pb2.Settings(revision=7, max_think_tokens=99)
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    file = StateFile(tmp_path / "file", "e", "m")
    with caplog.at_level(logging.WARNING):
        for revision in range(1, 20):
            file.keep(agent_pb2.Settings(revision=revision))
            wait_for(file._wanted.empty, 5, "it to be taken")
        (tmp_path / "file").unlink()
        file.keep(agent_pb2.Settings(revision=99))
        wait_for(lambda: (found := file.load()) and found.revision == 99, 5, "the file")
    said = [r.getMessage() for r in caplog.records if "cannot keep" in r.getMessage()]
    assert len(said) == 1


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MERIDIAN_STATE_DIR", str(tmp_path / "chosen"))
    assert state_folder() == tmp_path / "chosen"
    monkeypatch.delenv("MERIDIAN_STATE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "meridian"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".cache" / "meridian"
    monkeypatch.setenv("MERIDIAN_STATE_DIR", "~/state")
    assert state_folder() == tmp_path / "state"


def test_without_a_home_folder_nothing_is_kept_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "MERIDIAN_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> NoReturn:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert state_folder() is None
    file = StateFile(state_folder(), "e", "m")
    file.keep(SETTINGS)
    assert file.load() is None
    assert [r.getMessage() for r in caplog.records] == [
        "meridian: no settings are kept for a restart: there is no home folder; set MERIDIAN_STATE_DIR"
    ]
