"""The policy store on a real SQLite file."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from meridian_control.errors import EtagMismatch, StoredPolicyUnreadable, StoreUnavailable
from meridian_control.policy import Policy, parse_toml
from meridian_control.store import PolicyStore, StoredRevision

NOW = datetime(2026, 5, 4, 3, 2, 1, 1000, tzinfo=UTC)
POLICY = parse_toml('fallback.lease_ms = 500\nmodel."a.b".think_end_token_ids = [7]')


def url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[PolicyStore]:
    store = await PolicyStore.open(url(path))
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.db"


async def append(store: PolicyStore, policy: Policy = POLICY, etag: str = "", now: datetime = NOW) -> StoredRevision:
    return await store.append(policy, etag=etag, author="ann", reason="why", now=now)


async def test_empty(path: Path) -> None:
    async with opened(path) as store:
        assert await store.current() is None
        with pytest.raises(EtagMismatch):
            await append(store, etag="stale")
        assert await store.current() is None


async def test_reopen_keeps_everything(path: Path) -> None:
    async with opened(path) as store:
        first = await append(store)
        second = await append(store, Policy(), etag=first.etag)
    assert first == StoredRevision(1, first.etag, POLICY, "ann", "why", NOW)
    assert second.revision == 2
    async with opened(path) as store:
        assert await store.current() == second
        assert (await append(store)).revision == 3


async def test_same_policy_again_gets_another_etag(path: Path) -> None:
    async with opened(path) as store:
        assert (await append(store)).etag != (await append(store)).etag


async def test_created_at_is_utc(path: Path) -> None:
    async with opened(path) as store:
        stored = await append(store, now=NOW.astimezone(timezone(timedelta(hours=5))))
        current = await store.current()
    assert current == stored
    assert current is not None
    assert (current.created_at, current.created_at.tzinfo) == (NOW, UTC)


async def test_etag_mismatch(path: Path) -> None:
    async with opened(path) as store:
        first = await append(store)
        second = await append(store, etag=first.etag)
        with pytest.raises(EtagMismatch) as caught:
            await append(store, etag=first.etag)
        assert (caught.value.expected, caught.value.actual) == (first.etag, second.etag)
        assert await store.current() == second


async def test_same_etag_at_once_has_one_winner(path: Path) -> None:
    async with opened(path) as one, opened(path) as two:
        first = await append(one)
        results = await asyncio.gather(*(append(s, etag=first.etag) for s in (one, two) * 8), return_exceptions=True)
        assert [r.revision for r in results if isinstance(r, StoredRevision)] == [2]
        assert sum(isinstance(r, EtagMismatch) for r in results) == 15


async def test_unchecked_appends_at_once_all_get_a_number(path: Path) -> None:
    async with opened(path) as one, opened(path) as two:
        results = await asyncio.gather(*(append(s) for s in (one, two) * 8))
        assert sorted(r.revision for r in results) == list(range(1, 17))


WRITER = """
import asyncio, sys
from datetime import UTC, datetime
from meridian_control.policy import Policy
from meridian_control.store import PolicyStore

async def main():
    store = await PolicyStore.open(sys.argv[1])
    while True:
        stored = await store.append(Policy(), etag="", author="", reason="", now=datetime.now(UTC))
        print(stored.revision, stored.etag, flush=True)

asyncio.run(main())
"""


async def test_kill_loses_nothing_acknowledged(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, url(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline() for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += writer.stdout.readlines()
    revision, etag = acknowledged[-1].split()
    with closing(sqlite3.connect(path)) as connection:
        rows = dict(connection.execute("SELECT revision, etag FROM policy_revisions"))
    assert rows[int(revision)] == etag
    assert sorted(rows) == list(range(1, len(rows) + 1))
    async with opened(path) as store:
        assert (await append(store)).revision == len(rows) + 1


async def test_durability_settings(path: Path) -> None:
    async with opened(path) as store, store._engine.connect() as connection:
        mode = (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one()
        synchronous = (await connection.exec_driver_sql("PRAGMA synchronous")).scalar_one()
    assert (mode, synchronous) == ("wal", 2)


async def test_unreadable_revision_can_be_replaced(path: Path) -> None:
    async with opened(path) as store:
        stored = await append(store)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE policy_revisions SET policy = 'entropy.ema = 1'")
        with pytest.raises(
            StoredPolicyUnreadable, match=r"^stored policy revision 1 .*: entropy\.ema is not a known key$"
        ):
            await store.current()
        assert (await append(store, etag=stored.etag)).revision == 2


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("sqlite+aiosqlite:////nowhere/at/all.db", "unable to open database file"),
        ("nodriver://x", "Can't load plugin"),
        ("not a url", "Could not parse"),
    ],
)
async def test_unavailable(address: str, message: str) -> None:
    with pytest.raises(StoreUnavailable, match=message):
        await PolicyStore.open(address)


async def test_not_a_database(path: Path) -> None:
    path.write_text("text" * 1000)
    with pytest.raises(StoreUnavailable, match=r"^policy store: file is not a database$"):
        await PolicyStore.open(url(path))


async def test_unavailable_later(path: Path) -> None:
    async with opened(path) as store:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TABLE policy_revisions")
        with pytest.raises(StoreUnavailable, match=r"^policy store: no such table: policy_revisions$"):
            await store.current()
