"""The policy store on a real SQLite file and a real PostgreSQL."""

import asyncio
import gc
import itertools
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
from pydantic import create_model
from sqlalchemy import Column, Index, MetaData, Table, Text, text

from meridian_control.common.errors import (
    EtagMismatch,
    InvalidRequest,
    NotFound,
    PolicyError,
    StoredPolicyUnreadable,
    StoreUnavailable,
)
from meridian_control.policy.formats import parse_toml
from meridian_control.policy.model import Policy
from meridian_control.policy.section import Section
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.rollout.driver import Rollouts
from meridian_control.rollout.plan import Plan, Step
from meridian_control.rollout.state import By
from meridian_control.rollout.store import RolloutStore
from meridian_control.rollout.transitions import abort
from meridian_control.storage import database as database_module
from meridian_control.storage import migrations
from meridian_control.storage import postgres as postgres_module
from meridian_control.storage.database import Database
from meridian_control.storage.postgres import FOLLOWER
from meridian_control.storage.tables import METADATA, VERSION
from tests.postgres import Postgres
from tests.primes.capability import PrimesPolicy

NOW = datetime(2026, 5, 4, 3, 2, 1, 1000, tzinfo=UTC)
POLICY = parse_toml('fallback.lease_ms = 500\nmodel."a.b".think_end_token_ids = [7]')


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[PolicyStore]:
    store = PolicyStore(await Database.open(address))
    try:
        yield store
    finally:
        await store.database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, path: Path) -> str:
    """Return the address of an empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{path}"
    return str(request.getfixturevalue("postgres").database(empty=True))


@pytest.fixture
def file(path: Path) -> str:
    """Return the address of a SQLite store."""
    return f"sqlite+aiosqlite:///{path}"


async def append(
    store: PolicyStore, policy: Policy = POLICY, etag: str = "", now: datetime = NOW, **more: str
) -> StoredRevision:
    return await store.append(policy, etag=etag, author="ann", reason="why", now=now, **more)


COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) SELECT count(*) FROM n"


async def test_a_store_closes_after_the_statements_of_cancelled_tasks(address: str) -> None:
    """The end of an event loop cancels every task that is left, for some once more, and waits for them."""
    database, begun = await Database.open(address), asyncio.Event()

    async def read() -> None:
        async with database.reading() as connection:
            begun.set()
            await connection.execute(text(COUNT))

    reading = asyncio.create_task(read())
    await begun.wait()
    await asyncio.sleep(0.01)
    reading.cancel()
    await database.close()
    assert reading.cancelled()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_write_keeps_neither_lock_nor_task(path: Path, file: str, times: int) -> None:
    """The error of the task refers to the statement, whose rows are unread, for as long as `held` does."""
    database, running, goes_on = await Database.open(file), asyncio.Event(), threading.Event()
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()

    def run() -> bool:
        loop.call_soon_threadsafe(running.set)
        return goes_on.wait()

    async def write() -> None:
        async with database.writing() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            await raw.create_function("run", 0, run)
            await connection.execute(text("BEGIN IMMEDIATE"))
            await connection.execute(text("SELECT run()"))

    writing = asyncio.create_task(write())
    await running.wait()
    for _ in range(times):
        writing.cancel()
        # In so many rounds the task comes to wait for the driver, which waits for `goes_on`.
        for _ in range(20):
            await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError) as held:
        await writing
    async with asyncio.timeout(30):
        await asyncio.gather(*asyncio.all_tasks() - before)
    # The driver's thread may still be at the statement, so `other` waits for it.
    with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
    assert held.tb
    await database.close()


async def test_callers_that_leave_while_a_connection_opens_log_nothing(
    postgres_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = await Database.open(postgres_address)
    for number in range(20):
        await database._engine.dispose()
        reading = asyncio.create_task(PolicyStore(database).number())
        await asyncio.sleep(number / 2000)
        reading.cancel()
        await asyncio.wait([reading])
    # The connections that nobody waits for any more have ended. A transaction sees the same connections for ever.
    count, left = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"), 2
    while left > 1:
        await asyncio.sleep(0.01)
        async with database.reading() as connection:
            left = await connection.scalar(count)
    await database.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_reopen_keeps_everything(address: str) -> None:
    async with opened(address) as store:
        first = await append(store)
        second = await append(store, Policy(), etag=first.etag, now=NOW.astimezone(timezone(timedelta(hours=5))))
    assert first == StoredRevision(1, first.etag, "ann", "why", NOW, POLICY)
    assert second.revision == 2
    async with opened(address) as store:
        current = await store.current()
        assert current == second
        assert current is not None
        assert (current.created_at, current.created_at.tzinfo) == (NOW, UTC)
        assert (await append(store)).revision == 3


async def test_etag_mismatch(address: str) -> None:
    async with opened(address) as store:
        with pytest.raises(EtagMismatch):
            await append(store, etag="stale")
        assert await store.current() is None
        first = await append(store)
        second = await append(store, etag=first.etag)
        with pytest.raises(EtagMismatch) as caught:
            await append(store, etag=first.etag)
        assert (caught.value.expected, caught.value.actual) == (first.etag, second.etag)
        assert await store.current() == second


# ------------------------------------------------------------------------------------------------- history, requests


async def test_get_any_revision(address: str) -> None:
    async with opened(address) as store:
        stored = [await append(store), await append(store, Policy())]
        assert [await store.get(1), await store.get(2)] == stored
        (newest,) = await store.history(1)
        assert vars(newest) == {name: value for name, value in vars(stored[-1]).items() if name != "policy"}
        for missing in (0, 3, 2**64 - 1):
            with pytest.raises(NotFound, match=f"^policy revision {missing} is not stored$"):
                await store.get(missing)


async def test_a_request_id_stores_once(address: str) -> None:
    async with opened(address) as store:
        first = await append(store, request_id="a")
        second = await append(store, Policy(), etag=first.etag)
        assert await append(store, etag="stale", request_id="a") == first, "a repeated call needs no etag"
        complaint = 'request_id must be a new one; got "a", which stored another policy as revision 1'
        with pytest.raises(InvalidRequest, match=f"^{complaint}$"):
            await append(store, Policy(), request_id="a")
        assert await store.current() == second


async def test_writers_at_once_each_get_a_revision_of_their_own(address: str) -> None:
    """Two replicas write at once: with the newest etag only one of all calls succeeds, without an etag every call does,
    and calls with one request id store one revision."""
    policies = [Policy.model_validate({"fallback": {"lease_ms": 100 + number}}) for number in range(6)]
    async with opened(address) as one, opened(address) as two:

        async def at_once(written: list[Policy], etag: str = "", request_id: str = "") -> list[Any]:
            calls = [
                append((one, two)[number % 2], policy, etag=etag, request_id=request_id)
                for number, policy in enumerate(written)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        first = await append(one)
        known = {1: first}
        for etag, request_id, refusal in ((first.etag, "", EtagMismatch), ("", "a", InvalidRequest), ("", "", None)):
            results = await at_once(policies, etag, request_id)
            stored = [result for result in results if isinstance(result, StoredRevision)]
            assert len(stored) == (1 if refusal else len(policies))
            assert {type(result) for result in results} - {StoredRevision} == ({refusal} if refusal else set())
            assert all(result.policy == own for own, result in zip(policies, results, strict=True) if result in stored)
            known |= {each.revision: each for each in stored}
        repeated = await at_once([POLICY] * 6, request_id="b")
        assert repeated == [repeated[0]] * 6
        known[repeated[0].revision] = repeated[0]
        for store in (one, two):
            assert [header.revision for header in await store.history(100)] == list(range(len(known), 0, -1))
            assert {revision: await store.get(revision) for revision in known} == known


# -------------------------------------------------------------------------------------------------------- migrations

# Table and row as the first version of the store made them.
FIRST_SCHEMA = """CREATE TABLE policy_revisions (revision INTEGER NOT NULL, etag VARCHAR(64) NOT NULL,
    policy TEXT NOT NULL, author TEXT NOT NULL, reason TEXT NOT NULL, created_at DATETIME NOT NULL,
    PRIMARY KEY (revision))"""
FIRST_ROW = """INSERT INTO policy_revisions VALUES
    (1, 'e', 'fallback.lease_ms = 500', 'ann', 'why', '2026-05-04 03:02:01.001000')"""


def tables_in_force() -> MetaData:
    """Return a copy of the tables, for a test to change."""
    tables = MetaData()
    for each in METADATA.tables.values():
        each.to_metadata(tables)
    return tables


async def test_a_file_of_the_first_version(path: Path, file: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(FIRST_SCHEMA)
        connection.execute(FIRST_ROW)
    for _ in range(2):
        async with opened(file) as store:
            assert await store.get(1) == StoredRevision(
                1, "e", "ann", "why", NOW, parse_toml("fallback.lease_ms = 500")
            )
            assert (await append(store, etag="", request_id="a")).revision == 2


async def test_a_revision_keeps_its_cause(address: str) -> None:
    async with opened(address) as store:
        await append(store)
        stored = await append(store, cause="drift")
        assert [header.cause for header in await store.history(9)] == ["drift", ""]
        assert await store.current() == stored
        assert stored.cause == "drift"


async def test_a_column_that_a_database_lacks_is_added(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(address) as store:
        stored = await append(store)
        with monkeypatch.context() as later:
            tables = tables_in_force()
            tables.tables["policy_revisions"].append_column(Column("why", Text, server_default=text("'because'")))
            Index("policy_revisions_why", tables.tables["policy_revisions"].c.why)
            later.setattr(migrations, "METADATA", tables)
            later.setattr(migrations, "VERSION", VERSION + 1)
            async with opened(address) as newer, newer.database.reading() as connection:
                assert (await connection.execute(text("SELECT why FROM policy_revisions"))).all() == [("because",)]
        # The older version goes on with the newer schema.
        assert await store.current() == stored
        assert (await append(store)).revision == 2


async def test_a_database_of_a_later_version_is_left_as_it_is(path: Path, file: str) -> None:
    async with opened(file) as store:
        stored = await append(store)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO meridian_schema VALUES (1000)")
        connection.execute("ALTER TABLE policy_revisions ADD COLUMN later TEXT")
    async with opened(file) as store:
        assert await store.current() == stored
        assert (await append(store)).revision == 2


async def test_a_migration_that_fails_leaves_nothing(path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        tables = tables_in_force()
        Table("later", tables, Column("bad", Text, server_default=text("(")))
        broken.setattr(migrations, "METADATA", tables)
        with pytest.raises(StoreUnavailable, match="syntax error"):
            await Database.open(file)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    async with opened(file) as store:
        assert (await append(store)).revision == 1


async def test_replicas_that_start_at_once(address: str) -> None:
    databases = await asyncio.gather(*(Database.open(address) for _ in range(6)))
    assert sorted([(await append(PolicyStore(database))).revision for database in databases]) == [1, 2, 3, 4, 5, 6]
    for database in databases:
        await database.close()


async def test_a_file_that_is_locked_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes to the new file before it is in WAL mode: opening the file waits for that process."""
    path = tmp_path / "policy.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("CREATE TABLE anything (x)")
        waits = asyncio.Event()
        sleep = asyncio.sleep

        async def noted(delay: float) -> None:
            waits.set()
            await sleep(delay)

        monkeypatch.setattr("meridian_control.storage.database.asyncio.sleep", noted)
        opening = asyncio.create_task(Database.open(f"sqlite+aiosqlite:///{path}"))
        waited = asyncio.create_task(waits.wait())
        await asyncio.wait({opening, waited}, return_when=asyncio.FIRST_COMPLETED)
        waited.cancel()
        other.execute("COMMIT")
        database = await opening
    assert (await append(PolicyStore(database))).revision == 1
    await database.close()


# ---------------------------------------------------------------------------------------------------- notifications


class Heard(asyncio.Queue[StoredRevision]):
    """The policies that a replica hears of."""

    policy: StoredRevision | None = None

    def set_policy(self, stored: StoredRevision) -> None:
        self.policy = stored
        self.put_nowait(stored)

    replace_policy = set_policy

    def set_rollout(self, *_: object) -> None:
        pass


def rollouts_of(store: PolicyStore, heard: Heard) -> Rollouts:
    async def engines() -> None:
        pass

    return Rollouts(RolloutStore(store), heard, lambda: NOW, engines)


@asynccontextmanager
async def following(store: PolicyStore) -> AsyncIterator[Heard]:
    heard = Heard()
    following = asyncio.create_task(rollouts_of(store, heard).follow())
    yield heard
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_other_replicas_hear_of_a_change(postgres_address: str) -> None:
    async with opened(postgres_address) as one, opened(postgres_address) as two, asyncio.timeout(120):
        first = await append(one)
        async with following(one) as here, following(two) as there:
            assert await here.get() == await there.get() == first
            for policy in (Policy(), POLICY):
                stored = await append(one, policy)
                assert await here.get() == await there.get() == stored


async def test_all_that_follow_hear_over_one_connection(postgres_address: str) -> None:
    those = f"application_name = '{FOLLOWER}' AND datname = current_database()"

    async def listeners() -> int:
        async with store.database.reading() as connection:
            found = await connection.exec_driver_sql(f"SELECT count(*) FROM pg_stat_activity WHERE {those}")
            return int(found.scalar_one())

    async with opened(postgres_address) as store, asyncio.timeout(120):
        first = await append(store)
        async with following(store) as one:
            assert await one.get() == first
            async with following(store) as two:
                assert await two.get() == first
                second = await append(store)
                assert await one.get() == await two.get() == second
                assert await listeners() == 1
            third = await append(store)
            assert await one.get() == third
        while await listeners():
            await asyncio.sleep(0.01)


async def test_replicas_hear_again_after_postgresql_was_killed(
    postgres: Postgres, postgres_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "RETRY_S", 0.05)
    async with opened(postgres_address) as one, opened(postgres_address) as two, following(two) as heard:
        first = await append(one)
        async with asyncio.timeout(120):
            assert await heard.get() == first
            await asyncio.to_thread(postgres.kill)
            # The server's children may still answer for a moment.
            with pytest.raises(StoreUnavailable, match=r"^policy store: "):
                [await append(one) for _ in itertools.count()]
            await asyncio.to_thread(postgres.start)
            second = await append(one)
            while await heard.get() != second:
                pass


@pytest.mark.parametrize(
    "error",
    [asyncpg.InternalClientError("another operation (2) is in progress"), RuntimeError("unforeseen")],
)
async def test_replicas_hear_again_after_any_error(
    error: Exception, postgres_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changes, failures = postgres_module.changes, [error] * 3

    async def fails_at_first(url: str) -> AsyncIterator[None]:
        if failures:
            raise failures.pop()
        async for change in changes(url):
            yield change

    monkeypatch.setattr(database_module, "RETRY_S", 0.05)
    monkeypatch.setattr(postgres_module, "changes", fails_at_first)
    async with opened(postgres_address) as one, following(one) as heard, asyncio.timeout(120):
        while failures:
            await asyncio.sleep(0.01)
        stored = await append(one)
        assert await heard.get() == stored
    (said,) = [record for record in caplog.records if "changes by other replicas are not seen" in record.getMessage()]
    assert bool(said.exc_info) == isinstance(error, RuntimeError)


async def test_a_database_that_stays_away_is_logged_once(
    postgres_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database_module, "RETRY_S", 0.0)
    failures, answers = iter(range(3)), asyncio.Event()

    async def look() -> None:
        for _ in failures:
            raise StoreUnavailable("policy store: away")
        answers.set()

    async with opened(postgres_address) as store, asyncio.timeout(120):
        following = asyncio.create_task(store.database.follow(look))
        await answers.wait()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    assert caplog.messages.count("policy store: away: changes by other replicas are not seen") == 1


async def test_a_revision_of_a_newer_version_is_passed_over(
    postgres_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[None] = []

    async def look(rollouts: Rollouts, real: Callable[[Rollouts], Awaitable[None]] = Rollouts.look) -> None:
        looks.append(None)
        await real(rollouts)

    monkeypatch.setattr(Rollouts, "look", look)
    async with opened(postgres_address) as store, following(store) as heard, asyncio.timeout(120):
        await append(store)
        await heard.get()
        query = "INSERT INTO policy_revisions SELECT 2, 'e', 'later = 1', '', '', created_at FROM policy_revisions"
        for statement in (query, "SELECT 1", "SELECT 2"):
            before = len(looks)
            async with store.database.writing() as connection:
                await connection.exec_driver_sql(statement)
            while len(looks) == before:
                await asyncio.sleep(0.01)
        stored = await append(store)
        assert (stored.revision, await heard.get()) == (3, stored)
    assert len([line for line in caplog.messages if "revision 2" in line]) == 1


async def test_a_rollout_of_a_newer_version_holds_up_no_policy(postgres_address: str) -> None:
    async with opened(postgres_address) as store, following(store) as heard, asyncio.timeout(120):
        await append(store)
        await heard.get()
        async with store.database.writing() as connection:
            query = "INSERT INTO rollouts (rollout_id, active, candidate_revision, version, rollout)"
            await connection.exec_driver_sql(f"{query} VALUES (1, 1, 2, 1, '{{}}')")
            query = "INSERT INTO policy_revisions SELECT 3, 'e', policy, '', '', created_at FROM policy_revisions"
            await connection.exec_driver_sql(query)
        assert (await heard.get()).revision == 3


async def test_a_file_has_nobody_else_to_hear_of(file: str) -> None:
    async with opened(file) as store:
        await rollouts_of(store, Heard()).follow()


# --------------------------------------------------------------------------------------------------------- failures


async def test_durability_settings(file: str) -> None:
    async with opened(file) as store, store.database.reading() as connection:
        mode = (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one()
        synchronous = (await connection.exec_driver_sql("PRAGMA synchronous")).scalar_one()
    assert (mode, synchronous) == ("wal", 2)


async def test_unreadable_revision_can_be_replaced(path: Path, file: str) -> None:
    async with opened(file) as store:
        stored = await append(store)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE policy_revisions SET policy = 'entropy.ema = 1'")
        with pytest.raises(
            StoredPolicyUnreadable, match=r"^stored policy revision 1 .*: entropy\.ema is not a known key$"
        ):
            await store.current()
        assert (await append(store, etag=stored.etag)).revision == 2


async def test_an_extension_whose_values_no_longer_fit_cannot_be_read_and_can_be_replaced(file: str) -> None:
    async with opened(file) as store:
        store.extensions = {"primes": PrimesPolicy}
        await append(store, parse_toml("extension.primes = {shadow = true, at_least = 7}"))
        store.extensions = {"primes": create_model("Narrower", __base__=Section, shadow=(bool, ...))}
        with pytest.raises(
            StoredPolicyUnreadable, match=r"^stored .* 1 .*: extension\.primes\.at_least is not a known key$"
        ):
            await store.current()
        await append(store, parse_toml("extension.primes.shadow = false"))
        stored = await store.current()
        assert stored is not None
        assert stored.policy.extension == {"primes": {"shadow": False}}


async def test_an_extension_whose_capability_is_gone_stays_until_it_is_removed(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(file) as store:
        store.extensions = {"primes": PrimesPolicy}
        before = await append(store, parse_toml("extension.primes.shadow = true"))
        store.extensions = {}
        stored = await store.current()
        assert stored == await store.get(1) == before
        (warning,) = caplog.messages
        assert warning == "stored policy revision 1: extension.primes has no effect here: no capability reads it"
        changed = before.policy.model_copy(update={"fallback": POLICY.fallback})
        assert (await append(store, changed)).policy == changed
        rollouts = RolloutStore(store)
        rollout, _ = await rollouts.start(Plan(step=(Step(percent=10),)), changed, "", By(NOW, "ann", ""))
        await rollouts.change(rollout, partial(abort, by=By(NOW, "ann", "")))
        for other in ("extension.primes.shadow = false", "extension.others.shadow = true"):
            with pytest.raises(PolicyError, match=r"^extension\.\w+ is the section of no known capability$"):
                await append(store, parse_toml(other))
        await append(store, POLICY)
        with pytest.raises(PolicyError, match=r"^extension\.primes is the section of no known capability$"):
            await append(store, changed)


@pytest.mark.parametrize("at_end", [False, True])
async def test_the_end_of_a_transaction_may_get_no_answer(postgres_address: str, at_end: bool) -> None:
    """PostgreSQL ends the connection in the insert, which has stored nothing for sure, or while it commits."""
    other = await asyncpg.connect(postgres_address)
    await other.execute(SLEEPS)
    kind = "CONSTRAINT TRIGGER slow AFTER" if at_end else "TRIGGER slow BEFORE"
    when = "DEFERRABLE INITIALLY DEFERRED" if at_end else ""
    await other.execute(f"CREATE {kind} INSERT ON policy_revisions {when} FOR EACH ROW EXECUTE FUNCTION slow()")
    async with opened(postgres_address) as store:
        appending = asyncio.create_task(append(store))
        while not await other.fetchval(f"SELECT bool_or(pg_terminate_backend(pid)) {SLEEPING}"):
            await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailable) as raised:
            await appending
    await other.close()
    assert ("may be stored all the same" in str(raised.value)) == at_end


SLEEPS = "CREATE FUNCTION slow() RETURNS TRIGGER LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(600); RETURN NEW; END'"
SLEEPING = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"


@pytest.mark.parametrize("blocked", ["tables", "pool"])
async def test_a_database_that_does_not_answer_is_named(
    postgres_address: str, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """A change fails with a reason, is not stored, and succeeds once the database answers."""
    async with opened(postgres_address) as store, AsyncExitStack() as held:
        first = await append(store)
        pool: Any = store.database._engine.pool
        other = await asyncpg.connect(postgres_address)
        locked = other.transaction()
        await locked.start()
        with monkeypatch.context() as patch:
            if blocked == "tables":
                await other.execute("LOCK TABLE policy_revisions IN ACCESS EXCLUSIVE MODE")
                # A new connection has the shorter limit.
                await store.database._engine.dispose()
                patch.setattr(postgres_module, "CALL_TIMEOUT_S", 1.0)
            else:
                assert pool._timeout == postgres_module.CALL_TIMEOUT_S
                patch.setattr(pool, "_timeout", 0.1)
                for _ in range(pool.size() + pool._max_overflow):
                    await held.enter_async_context(store.database.reading())
            with pytest.raises(StoreUnavailable, match=r"policy store: no answer within .* s; the database is slow"):
                await append(store)
        await held.aclose()
        await locked.rollback()
        await other.close()
        await store.database._engine.dispose()
        second = await append(store)
        assert [r.revision for r in await store.history(9)] == [second.revision, first.revision]
        assert second.revision == first.revision + 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("sqlite+aiosqlite:////nowhere/at/all.db", "unable to open database file"),
        ("mysql://u:secret@x/y", 'must be a SQLite file or postgresql://…; got "mysql://…"$'),
        ("postgresql://127.0.0.1:1/x", "Connect call failed"),
        ("postgresql://127.0.0.1:port/x", "its address cannot be read: invalid literal for int"),
        ("postgresql://127.0.0.1:1/x?sslmode=maybe", "`sslmode` parameter must be one of"),
    ],
)
async def test_unavailable(address: str, message: str) -> None:
    with pytest.raises(StoreUnavailable, match=message):
        await Database.open(address)


async def test_not_a_database(path: Path, file: str) -> None:
    path.write_text("text" * 1000)
    with pytest.raises(StoreUnavailable, match=r"^policy store: file is not a database$"):
        await Database.open(file)


async def test_unavailable_later(path: Path, file: str) -> None:
    async with opened(file) as store:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TABLE policy_revisions")
        with pytest.raises(StoreUnavailable, match=r"^policy store: no such table: policy_revisions$"):
            await store.current()
