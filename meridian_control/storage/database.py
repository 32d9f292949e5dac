"""The control plane's database, SQLite or PostgreSQL: its connection, its schema's age, and hearing of changes.

Owns what all stores on it share and knows nothing of what they keep. Runs on the control plane's event loop; the driver
does the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from meridian_control.common.errors import StoreUnavailable
from meridian_control.storage import postgres
from meridian_control.storage.migrations import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

logger = logging.getLogger(__name__)

# Between two attempts to hear of changes again.
RETRY_S = 1.0
# How long a connection to a SQLite file waits for a lock that another connection holds.
BUSY_TIMEOUT_S = 30.0
WAL_RETRY_S = 0.02


class Database:
    """Open with `Database.open`, close with `close`. Several, in several processes, may be open on the same data; on
    PostgreSQL they hear of each other's changes."""

    def __init__(self, engine: AsyncEngine, postgres_url: str | None = None) -> None:
        self._engine = engine
        self._postgres_url = postgres_url
        # Hears of changes for all that follow, while anybody does.
        self._listening: asyncio.Task[None] | None = None
        self._followers: set[asyncio.Event] = set()

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect to a postgresql:// address or a SQLAlchemy URL of SQLite, and bring the schema up to date.

        Raises StoreUnavailable.
        """
        with _unavailable():
            if url.startswith(postgres.SCHEMES):
                database = cls(postgres.create_engine(url), url)
            elif not url.startswith("sqlite+aiosqlite:"):
                scheme = url.partition("://")[0]
                raise StoreUnavailable(f'policy store: must be a SQLite file or postgresql://…; got "{scheme}://…"')
            else:
                database = cls(create_async_engine(url, hide_parameters=True))
                # aiosqlite leaves a failing thread behind when it cannot open the file, so find that out here.
                sqlite3.connect(database._engine.url.database or ":memory:", uri=True).close()
                event.listen(database._engine.sync_engine, "connect", _make_durable)
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
        """Whether several replicas may use it."""
        return self._postgres_url is not None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection to read with. Raises StoreUnavailable, from what is done with it too."""
        with _unavailable():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, tell: bool = True) -> AsyncIterator[AsyncConnection]:
        """A transaction, on disk once it is left; `tell` lets other replicas know.

        Raises StoreUnavailable and SQLAlchemy's IntegrityError, from what is done with it too.
        """
        with _unavailable():
            async with self._engine.begin() as connection:
                yield connection
                if tell and self.shared:
                    await connection.execute(text(postgres.NOTIFY))

    async def follow(self, look: Callable[[], Awaitable[None]]) -> None:
        """Call `look` now and whenever another replica may have changed something, until cancelled.

        Returns at once on SQLite, which is for one replica. Where `look` raises StoreUnavailable it is called again.
        All that follow share a connection.
        """
        if not self.shared:
            return
        async with self._hearing() as changed:
            while True:
                await changed.wait()
                changed.clear()
                try:
                    await look()
                except StoreUnavailable as error:
                    _complain(error)
                    await asyncio.sleep(RETRY_S)
                    changed.set()

    @asynccontextmanager
    async def _hearing(self) -> AsyncIterator[asyncio.Event]:
        """Set from the beginning, and whenever something may have changed."""
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
        while True:
            try:
                with _unavailable():
                    async with aclosing(postgres.changes(self._postgres_url)) as changes:
                        async for _ in changes:
                            for follower in self._followers:
                                follower.set()
            except StoreUnavailable as error:
                _complain(error)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await self._engine.dispose()


def _complain(error: StoreUnavailable) -> None:
    """Raises CancelledError where the driver's complaint of being cancelled has taken the place of that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error
    logger.warning("%s: changes of other replicas are not seen", error)


def utc(stored: datetime) -> datetime:
    """A time as it was stored: SQLite drops the zone of what was stored as UTC."""
    return stored.replace(tzinfo=stored.tzinfo or UTC).astimezone(UTC)


def _make_durable(connection: Any, _record: Any) -> None:
    """WAL keeps readers and writers apart; FULL syncs each commit, so an acknowledged one outlives a crash."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            # SQLite's own busy timeout does not cover the change of a new file to WAL.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            await_only(asyncio.sleep(WAL_RETRY_S))
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn what drivers raise into StoreUnavailable; the driver's own text carries neither statement nor password."""
    try:
        yield
    except IntegrityError:
        raise
    except (
        SQLAlchemyError,
        sqlite3.Error,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        OSError,
        ImportError,
    ) as error:
        raise StoreUnavailable(f"policy store: {getattr(error, 'orig', None) or error}") from error
