"""The control plane's database, SQLite or PostgreSQL: its connections, its schema, and notice of changes.

The module owns what all stores share and knows nothing of the stores' tables. The module runs on the control plane's
event loop; the database driver does the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from meridian_control.common.complaints import Complaints
from meridian_control.common.errors import StoreUnavailable
from meridian_control.common.file_lock import FileInUseError, FileLock
from meridian_control.storage import postgres
from meridian_control.storage.migrations import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    # Raises if this replica may no longer write; called within the transaction.
    Fence = Callable[[AsyncConnection], Awaitable[None]]

logger = logging.getLogger(__name__)

# Pause in seconds before the control plane tries again to receive other replicas' changes.
RETRY_S = 1.0
# Seconds for which a connection to a SQLite file waits for a lock that another connection holds.
BUSY_TIMEOUT_S = 30.0
WAL_RETRY_S = 0.02
# What the log says while other replicas' changes cannot be received; it begins with the error.
UNSEEN = "%s: changes by other replicas are not seen"
# Seconds for which `close` waits for connections in use.
CLOSE_S = 5.0


class Database:
    """A database that `Database.open` opens and `close` closes.

    Several processes may open the same data at once, but only one control plane may serve a SQLite file. On PostgreSQL
    each process is notified of the others' changes.
    """

    def __init__(self, engine: AsyncEngine, postgres_url: str | None = None) -> None:
        self._engine = engine
        self._postgres_url = postgres_url
        # The number of connections in use, and whether it is 0.
        self._in_use, self._unused = 0, asyncio.Event()
        self._unused.set()
        # One task receives changes for all callers of `follow`; None while there is no caller.
        self._listening: asyncio.Task[None] | None = None
        self._followers: set[asyncio.Event] = set()
        # The lock on a SQLite file that this process serves.
        self._lock: FileLock | None = None

    @classmethod
    async def open(cls, url: str, serves: str = "") -> Self:
        """Connect to a postgresql:// address or a SQLAlchemy URL of SQLite, and bring the schema up to date.

        serves: the address of the control plane that is to serve the data; a SQLite file is then locked until `close`,
        so that no other control plane can serve it. Raises StoreUnavailable.
        """
        with _unavailable():
            if url.startswith(postgres.SCHEMES):
                database = cls(postgres.create_engine(url), url)
            elif not url.startswith("sqlite+aiosqlite:"):
                scheme = url.partition("://")[0]
                raise StoreUnavailable(f'policy store: must be a SQLite file or postgresql://…; got "{scheme}://…"')
            else:
                database = cls(create_async_engine(url, hide_parameters=True))
                # aiosqlite leaves a failing thread behind if it cannot open the file, so sqlite3 opens the file first.
                with closing(sqlite3.connect(database._engine.url.database or ":memory:", uri=True)) as tried:
                    file = tried.execute("PRAGMA database_list").fetchone()[2]
                if file and serves:
                    database._lock = _locked(file, serves)
                event.listen(database._engine.sync_engine, "connect", _make_durable)
                event.listen(database._engine.sync_engine, "invalidate", _let_go)
            try:
                async with database._engine.begin() as connection:
                    await migrate(connection)
            except ValueError as error:
                raise StoreUnavailable(f"policy store: its address cannot be read: {error}") from error
            except BaseException:
                await database.close()
                raise
        return database

    @property
    def shared(self) -> bool:
        """Whether several replicas may use the database."""
        return self._postgres_url is not None

    async def now(self) -> datetime:
        """Return the time of the database's server, which all replicas share, or of this machine. Raises
        StoreUnavailable."""
        if not self.shared:
            return datetime.now(UTC)
        async with self.reading() as connection:
            return utc((await connection.execute(select(func.clock_timestamp()))).scalar_one())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for reading. Raises StoreUnavailable, also from the caller's statements."""
        with self._used():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, tell: bool = True) -> AsyncIterator[AsyncConnection]:
        """Open a transaction, which is on disk once the block is left; with `tell` other replicas are notified.

        Raises StoreUnavailable and SQLAlchemy's IntegrityError, also from the caller's statements in the transaction.
        The text of StoreUnavailable says if the transaction may be on disk, because the answer to its end got lost.
        """
        ends = False
        try:
            with self._used():
                async with self._engine.begin() as connection:
                    yield connection
                    if tell and self.shared:
                        await connection.execute(text(postgres.NOTIFY))
                    ends = self.shared
        except StoreUnavailable as error:
            if ends:
                raise StoreUnavailable(f"{error}; the change may be stored all the same") from error
            raise

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Count a connection in use. Raises StoreUnavailable in place of the driver's errors."""
        self._in_use += 1
        self._unused.clear()
        try:
            with _unavailable():
                yield
        finally:
            self._in_use -= 1
            if not self._in_use:
                self._unused.set()

    async def follow(self, look: Callable[[], Awaitable[object]]) -> None:
        """Call `look` now and whenever another replica may have changed something, until cancelled.

        Returns at once on SQLite, which is for one replica. `look` is called again if it raises StoreUnavailable.
        All callers share one connection to the server.
        """
        if not self.shared:
            return
        complaints = Complaints(logger, UNSEEN)
        async with self._hearing() as changed:
            while True:
                await changed.wait()
                changed.clear()
                try:
                    await look()
                    complaints.over()
                except StoreUnavailable as error:
                    _check_cancelled(error)
                    complaints.log(error)
                    await asyncio.sleep(RETRY_S)
                    changed.set()

    @asynccontextmanager
    async def _hearing(self) -> AsyncIterator[asyncio.Event]:
        """Yield an event that is set at the beginning and whenever another replica may have changed something."""
        changed = asyncio.Event()
        changed.set()
        self._followers.add(changed)
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        try:
            yield changed
        finally:
            self._followers.discard(changed)
            if not self._followers and (listening := self._listening) is not None:
                self._listening = None
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> None:
        assert self._postgres_url is not None
        complaints = Complaints(logger, UNSEEN)
        while True:
            try:
                with _unavailable():
                    async with aclosing(postgres.changes(self._postgres_url)) as changes:
                        async for _ in changes:
                            complaints.over()
                            for follower in self._followers:
                                follower.set()
            except Exception as error:
                # Nobody awaits this task before its end, so any other error would end it in silence.
                _check_cancelled(error)
                complaints.log(error)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close all connections. Those of tasks that were cancelled end their statements first, because a task that is
        cancelled once more, as at the end of the event loop, may leave its connection open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._unused.wait()
        await self._engine.dispose()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _check_cancelled(error: Exception) -> None:
    """Raise CancelledError if the task was cancelled, because the driver may have raised its own error instead."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def utc(stored: datetime) -> datetime:
    """Return a stored time in UTC. SQLite drops the zone of a time, so a time without a zone counts as UTC."""
    return stored.replace(tzinfo=stored.tzinfo or UTC).astimezone(UTC)


def _make_durable(connection: Any, _record: Any) -> None:
    """Set WAL, so that readers and writers do not block each other, and FULL, so that commits survive a crash."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            # SQLite's own busy timeout does not apply while a new file is changed to WAL.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            await_only(asyncio.sleep(WAL_RETRY_S))
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _let_go(connection: Any, _record: Any, _error: Any) -> None:
    """End the transaction of a connection that SQLAlchemy gives up because a statement was cancelled. Closed with rows
    of that statement unread, SQLite would keep the transaction and its lock until Python frees the statement. If the
    task is cancelled again while SQLAlchemy closes the connection, a task of SQLAlchemy waits for ever."""
    with suppress(sqlite3.Error):
        connection.rollback()
        connection.close()


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn drivers' errors into StoreUnavailable; a driver's own text contains neither statement nor password."""
    try:
        yield
    except IntegrityError:
        raise
    except (
        SQLAlchemyError,
        sqlite3.Error,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        # asyncpg raises this error if a connection is lost at an unlucky moment.
        asyncpg.InternalClientError,
        OSError,
        ImportError,
    ) as error:
        raise StoreUnavailable(f"policy store: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Return the text of a driver's error. An error about time has no text of its own."""
    cause: BaseException = getattr(error, "orig", None) or error
    if isinstance(cause, (TimeoutError, PoolTimeout)) or isinstance(cause.__cause__, TimeoutError):
        return f"no answer within {postgres.CALL_TIMEOUT_S:g} s; the database is slow, or its tables are locked"
    return str(cause)


def _locked(file: str, serves: str) -> FileLock:
    """Lock a SQLite file itself, so that neither another path to the file nor the removal of any other file gets around
    the lock. Two control planes on one file would not see each other's changes. Raises StoreUnavailable."""
    try:
        return FileLock(file, serves)
    except FileInUseError as error:
        raise StoreUnavailable(
            f"policy store: {file} is in use by {error}; a SQLite file is for one control plane. Stop that one first, "
            "or use postgresql://… for several replicas"
        ) from None
