"""The policy from a mounted directory that changes as a kubelet changes a ConfigMap: a link is renamed over the old
link; and the policy file of a first start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from meridian_control.common.errors import PolicyError, StoreUnavailable
from meridian_control.policy import directory as policy_dir
from meridian_control.policy.directory import AUTHOR, PolicyDirectory, initial_policy
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import Policy
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.storage.database import Database
from tests.fakes.linked import until
from tests.fakes.migrated import migrated

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
COMPLAINT = "entropy.ema_alpha must be in (0, 1]; got 2"


class ConfigMap:
    """A mounted ConfigMap: meridian.toml links to ..data/meridian.toml, and ..data links to a folder of its own for
    every version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.versions = 0
        (folder / "meridian.toml").symlink_to("..data/meridian.toml")

    def put(self, text: str) -> None:
        self.versions += 1
        version = self.folder / f"..version_{self.versions}"
        version.mkdir()
        (version / "meridian.toml").write_text(text)
        (self.folder / "..data_tmp").symlink_to(version.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> ConfigMap:
    return ConfigMap(tmp_path / "mounted")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[PolicyStore]:
    opened = PolicyStore(await Database.open(migrated(tmp_path / "policy.db")))
    yield opened
    await opened.database.close()


@asynccontextmanager
async def watching(store: PolicyStore, folder: Path) -> AsyncIterator[list[StoredRevision]]:
    """Watch the directory, and yield the revisions that come into force, including the revision at the start."""
    changes: list[StoredRevision] = []
    directory = PolicyDirectory(folder, store, changes.append, lambda: NOW)
    await directory.put_in_force()
    watcher = asyncio.create_task(directory.watch())
    # Let the watch begin, because an earlier change would be seen only at the next poll.
    await asyncio.sleep(0.05)
    yield changes
    watcher.cancel()
    async with asyncio.timeout(120):
        with pytest.raises(asyncio.CancelledError):
            await watcher


async def test_every_version_is_put_in_force(store: PolicyStore, mounted: ConfigMap) -> None:
    mounted.put("fallback.lease_ms = 500")
    async with watching(store, mounted.folder) as changes:
        mounted.put("fallback.lease_ms = 600")
        await until(lambda: len(changes) == 2)
        mounted.put("fallback.lease_ms = 500")
        await until(lambda: len(changes) == 3)
    first, *_ = changes
    assert (first.author, first.reason) == (AUTHOR, str(mounted.folder / "meridian.toml"))
    found = [(change.revision, change.policy.fallback.lease_ms) for change in changes]
    assert found == [(1, 500), (2, 600), (3, 500)]
    assert await store.current() == changes[-1]


async def test_a_plain_file_in_a_folder(store: PolicyStore, tmp_path: Path) -> None:
    (tmp_path / "meridian.toml").write_text("fallback.lease_ms = 500")
    async with watching(store, tmp_path) as changes:
        (tmp_path / "meridian.toml").write_text("fallback.lease_ms = 600")
        await until(lambda: changes[-1].policy.fallback.lease_ms == 600)


async def test_a_bad_file_changes_nothing(
    store: PolicyStore, mounted: ConfigMap, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.put("fallback.lease_ms = 500")
    async with watching(store, mounted.folder) as changes:
        mounted.put("entropy.ema_alpha = 2")
        await until(lambda: COMPLAINT in caplog.text)
        (mounted.folder / "..data").unlink()
        await until(lambda: "cannot be read: No such file" in caplog.text)
        mounted.put("# a file that is being written, or whose template has failed")
        await until(lambda: "has no fields" in caplog.text)
        assert len(changes) == 1
        mounted.put("fallback.lease_ms = 700")
        await until(lambda: len(changes) == 2)
    assert [record.levelno for record in caplog.records if record.name.startswith("meridian")] == [logging.ERROR] * 3


async def test_an_error_that_lasts_is_logged_once_and_one_that_comes_back_again(
    store: PolicyStore, mounted: ConfigMap, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails in two ways by turns, while the file is read at every poll."""
    monkeypatch.setattr(policy_dir, "POLL_MS", 20)
    reads, away = [0], [False]

    class Counted(PolicyDirectory):
        async def read(self) -> None:
            reads[0] += 1
            if away[0]:
                raise StoreUnavailable(("refused", "no answer")[reads[0] % 2])
            await super().read()

    async def logged(number: int) -> list[str]:
        """Return the errors in the log, once there are so many, and the file has been read five times more."""
        await until(lambda: len(errors()) >= number)
        enough = reads[0] + 5
        await until(lambda: reads[0] >= enough)
        return [text.partition(" is not put in force: ")[2] for text in errors()]

    def errors() -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.ERROR]

    good, bad, worse = "fallback.lease_ms = 500", "entropy.ema_alpha = 2", "entropy.ema_alpha = 3"
    mounted.put(good)
    directory = Counted(mounted.folder, store, lambda _: None, lambda: NOW)
    await directory.put_in_force()
    watcher = asyncio.create_task(directory.watch())
    expected: list[str] = []
    for text in (bad, worse, bad, good, bad):
        mounted.put(text)
        if text != good:
            expected.append(f"{directory.file}:1: entropy.ema_alpha must be in (0, 1]; got {text[-1]}")
        assert await logged(len(expected)) == expected
    mounted.put(good)
    assert await logged(4) == expected
    for _ in range(2):
        away[0] = True
        found = await logged(len(expected) + 2)
        assert sorted(found[len(expected) :]) == ["no answer", "refused"]
        expected, away[0] = found, False
        assert await logged(len(found)) == found
    watcher.cancel()


async def test_an_unchanged_file_leaves_changes_alone(store: PolicyStore, mounted: ConfigMap) -> None:
    mounted.put("fallback.lease_ms = 500")
    async with watching(store, mounted.folder) as changes:
        other = await store.append(Policy(), etag="", author="ann", reason="", now=NOW)
        mounted.put("# the same\nfallback.lease_ms = 500")
        mounted.put("fallback = {lease_ms = 500}\n[[override]]\ntenant = 'a'")
        await until(lambda: len(changes) == 2)
    assert other.revision == 2
    assert changes[-1].revision == 3


async def test_what_is_in_force_already_is_no_change(store: PolicyStore, mounted: ConfigMap) -> None:
    mounted.put("fallback.lease_ms = 500")
    stored = await store.append(parse_toml("fallback.lease_ms = 500"), etag="", author="ann", reason="", now=NOW)
    async with watching(store, mounted.folder) as changes:
        pass
    assert (changes, await store.current()) == ([], stored)


async def test_replicas_that_see_one_file_store_it_once(store: PolicyStore, mounted: ConfigMap) -> None:
    mounted.put("fallback.lease_ms = 500")
    directories = [PolicyDirectory(mounted.folder, store, lambda _: None, lambda: NOW) for _ in range(8)]
    begun = await asyncio.gather(*(directory.put_in_force() for directory in directories))
    assert {stored.revision for stored in begun} == {1}


async def test_a_mount_that_changes_late_overwrites_no_newer_change(store: PolicyStore, mounted: ConfigMap) -> None:
    """The mounts of replicas differ by up to a minute. Each replica reads each version of the file."""
    mounted.put("fallback.lease_ms = 500")
    early, late = (PolicyDirectory(mounted.folder, store, lambda _: None, lambda: NOW) for _ in range(2))
    for directory in (early, late):
        await directory.read()
    mounted.put("fallback.lease_ms = 600")
    await early.read()
    other = await store.append(Policy(), etag="", author="ann", reason="", now=NOW)
    await late.read()
    assert await store.current() == other
    mounted.put("fallback.lease_ms = 500")
    await late.read()
    mounted.put("fallback.lease_ms = 600")
    await late.read()
    assert [header.revision for header in await store.history(9)] == [5, 4, 3, 2, 1]


async def test_a_beginning_with_a_bad_file(
    store: PolicyStore, mounted: ConfigMap, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.put("entropy.ema_alpha = 2")
    directory = PolicyDirectory(mounted.folder, store, lambda _: None, lambda: NOW)
    with pytest.raises(PolicyError, match=r"ema_alpha must be in \(0, 1\]"):
        await directory.put_in_force()
    stored = await store.append(Policy(), etag="", author="ann", reason="", now=NOW)
    assert await directory.put_in_force() == stored
    assert COMPLAINT in caplog.text


async def test_a_beginning_without_the_folder(store: PolicyStore, tmp_path: Path) -> None:
    directory = PolicyDirectory(tmp_path / "none", store, lambda _: None, lambda: NOW)
    with pytest.raises(PolicyError, match=r"none: is not a directory$"):
        await directory.put_in_force()


async def test_the_log_warns_of_harm_that_is_not_measured(
    store: PolicyStore, mounted: ConfigMap, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.put("scheduler.max_think_tokens = 9\nentropy.holdout_share = 0.0")
    async with watching(store, mounted.folder) as changes:
        assert len(changes) == 1
    assert "harm is not measured: entropy.holdout_share is 0" in caplog.text


# --------------------------------------------------------------------------------------------------------- first start


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fallback.lease_ms = 500", ""),
        ("fallback.lease_ms = 600", " {file}: apply the file with meridianctl"),
        ("entropy.ema_alpha = 2", ": {file}:1: " + COMPLAINT),
    ],
)
async def test_a_file_gives_an_empty_store_its_policy_and_keeps_no_other_from_starting(
    store: PolicyStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    (file := tmp_path / "policy.toml").write_text("fallback.lease_ms = 500")
    first = await initial_policy(store, file, NOW)
    assert (first.policy.fallback.lease_ms, first.reason, caplog.messages) == (500, str(file), [])
    file.write_text(text)
    assert await initial_policy(store, file, NOW) == first
    stays = f"revision 1 of the store stays in force, not the policy file{why.format(file=file)}"
    assert caplog.messages == [stays] * bool(why)
    file.unlink()
    with pytest.raises(PolicyError, match="is not a file"):
        await initial_policy(store, file, NOW)
