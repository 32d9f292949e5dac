"""One control plane at a time serves a SQLite file; programs that only read the file are not held up."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from meridian_control.common.errors import StoreUnavailable
from meridian_control.policy.store import PolicyStore
from meridian_control.storage.database import Database
from tests.contract.control.app.test_server import Process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    """Yield two control planes with folders of their own; the second one's store is the first one's."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = Process(folders[0]), Process(folders[1], "--store", str(folders[0] / "m.db"))
    yield one, two
    one.kill()
    two.kill()


async def refused(process: Process) -> str:
    """Start a control plane that must not start, and return what it says."""
    process.start()
    assert await process.ended() == 2
    return [line for line in process.log().splitlines() if line.startswith("meridian-control: ")][-1]


async def test_the_second_control_plane_fails_by_whatever_path_and_names_the_first(
    processes: tuple[Process, Process],
) -> None:
    one, two = processes
    store, holder = one.folder / "m.db", one.folder / "m.db.holder"
    await one.started()
    assert one.popen is not None
    told = await refused(two)
    assert f"m.db is in use by process {one.popen.pid} on {os.uname().nodename}, which serves {one.target}" in told
    assert "since 2" in told
    assert "postgresql://" in told
    links = two.folder / "symbolic.db", two.folder / "hard.db"
    links[0].symlink_to(store)
    links[1].hardlink_to(store)
    for other in (*links, two.folder / ".." / "one" / "m.db"):
        two.options = ("--store", str(other))
        # Who holds the store is written beside the file itself, and nothing leads there from a hard link.
        holds = "is in use by" if other is links[1] else f"is in use by process {one.popen.pid}"
        assert holds in await refused(two)
    two.options = ("--store", str(store))
    holder.write_text("[1]")
    assert "is in use by" in await refused(two)
    holder.unlink()
    # A suspended process goes on later, so the store stays its own.
    one.signal(signal.SIGSTOP)
    try:
        assert "is in use by" in await refused(two)
    finally:
        one.signal(signal.SIGCONT)
    assert await one.terminate() == 0
    await two.started()
    assert await two.terminate() == 0
    assert sorted(path.name for path in one.folder.iterdir() if path.name.startswith("m.db.")) == []


async def test_a_decision_log_is_for_one_control_plane_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    """The file that is written is renamed when it is full, so the lock is beside it."""
    log, link, folders = tmp_path / "d.jsonl", tmp_path / "link.jsonl", [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    link.symlink_to(log)
    store = str(folders[0] / "m.db")
    one, two = (Process(folder, "--decision-log", str(path)) for folder, path in zip(folders, (log, link), strict=True))
    try:
        await one.started()
        assert one.popen is not None
        for named in (link, log):
            two.options = ("--decision-log", str(named))
            told = await refused(two)
            assert f"--decision-log: {named} is in use by process {one.popen.pid}" in told
            assert f"which serves {one.target}" in told
        one.signal(signal.SIGKILL)
        await one.ended()
        two.options = ("--decision-log", str(log), "--store", store)
        await two.started()
        assert json.loads((folders[0] / "m.db.holder").read_text())["address"] == two.target
        assert await two.terminate() == 0
    finally:
        one.kill()
        two.kill()


async def test_readers_and_copies_are_not_held_up(tmp_path: Path) -> None:
    file = tmp_path / "m.db"
    database = await Database.open(f"sqlite+aiosqlite:///{file}", "127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match=r"process \d+ on .*, which serves 127\.0\.0\.1:1 since"):
        await Database.open(f"sqlite+aiosqlite:///{file}", "127.0.0.1:2")
    reader = await Database.open(f"sqlite+aiosqlite:///{file}")
    assert await PolicyStore(reader).current() is None
    with closing(sqlite3.connect(file)) as tool:
        assert tool.execute("SELECT count(*) FROM policy_revisions").fetchone() == (0,)
    shutil.copy(file, tmp_path / "copy.db")
    await (await Database.open(f"sqlite+aiosqlite:///{tmp_path / 'copy.db'}", "127.0.0.1:2")).close()
    await reader.close()
    await database.close()
    await (await Database.open(f"sqlite+aiosqlite:///{file}", "127.0.0.1:2")).close()


async def test_stores_in_memory_are_apart() -> None:
    opened = await asyncio.gather(*(Database.open("sqlite+aiosqlite:///:memory:", f"127.0.0.1:{n}") for n in (1, 2)))
    for database in opened:
        await database.close()
