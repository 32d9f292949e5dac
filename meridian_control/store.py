"""The policy store: every accepted policy revision, append-only, in a SQL database.

Owns the table, the revision numbers and the etags. Knows nothing of gRPC, of what a policy means, or of who is told
about a change. Runs on the control plane's event loop; the driver does the waiting.

Appending reads the newest revision and inserts the next number. The primary key makes that atomic: when somebody else
took the number first, the insert fails and the append starts over with what is newest then.
"""

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from sqlalchemy import Column, DateTime, Integer, MetaData, Row, String, Table, Text, event, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateTable

from meridian_control.errors import EtagMismatch, PolicyError, StoredPolicyUnreadable, StoreUnavailable
from meridian_control.policy import Policy, parse_toml, to_toml

_revisions = Table(
    "policy_revisions",
    MetaData(),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("etag", String(64), nullable=False),
    # TOML, as an operator would read it.
    Column("policy", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)


@dataclass(frozen=True)
class StoredRevision:
    """One immutable revision; `created_at` is UTC."""

    revision: int
    etag: str
    policy: Policy
    author: str
    reason: str
    created_at: datetime


class PolicyStore:
    """Open with `PolicyStore.open`, close with `close`. Several stores, in several processes, may share a database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect and create the table if it is missing. Raises StoreUnavailable."""
        with _unavailable():
            engine = create_async_engine(url, hide_parameters=True)
            if engine.dialect.name == "sqlite":
                # aiosqlite leaves a failing thread behind when it cannot open the file, so find that out here.
                sqlite3.connect(engine.url.database or ":memory:", uri=True).close()
                event.listen(engine.sync_engine, "connect", _make_durable)
            # PostgreSQL lets two replicas that start at once collide here, IF NOT EXISTS or not.
            with suppress(IntegrityError):
                async with engine.begin() as connection:
                    await connection.execute(CreateTable(_revisions, if_not_exists=True))
        return cls(engine)

    async def current(self) -> StoredRevision | None:
        """The newest revision, None in an empty store. Raises StoreUnavailable, StoredPolicyUnreadable."""
        row = await self._newest()
        return None if row is None else _stored(row)

    async def check(self, etag: str) -> int:
        """The newest revision's number (0 for none). Raises EtagMismatch unless `etag` is its etag or empty."""
        row = await self._newest()
        actual = "" if row is None else row.etag
        if etag and etag != actual:
            raise EtagMismatch(etag, actual)
        return 0 if row is None else row.revision

    async def append(self, policy: Policy, *, etag: str, author: str, reason: str, now: datetime) -> StoredRevision:
        """Store `policy` as the next revision; on return it is on disk.

        `etag` must be that of the newest revision, empty skips the check; `now` is aware. Raises EtagMismatch,
        StoreUnavailable.
        """
        text = to_toml(policy)
        while True:
            revision = await self.check(etag) + 1
            stored = StoredRevision(revision, _etag(revision, text), policy, author, reason, now.astimezone(UTC))
            if await self._insert(stored, text):
                return stored

    async def close(self) -> None:
        await self._engine.dispose()

    async def _newest(self) -> Row[Any] | None:
        newest = select(_revisions).order_by(_revisions.c.revision.desc()).limit(1)
        with _unavailable():
            async with self._engine.connect() as connection:
                return (await connection.execute(newest)).one_or_none()

    async def _insert(self, stored: StoredRevision, text: str) -> bool:
        """False when the revision number is already taken."""
        row = {**vars(stored), "policy": text}
        with _unavailable():
            try:
                async with self._engine.begin() as connection:
                    await connection.execute(insert(_revisions).values(row))
            except IntegrityError:
                return False
        return True


def _etag(revision: int, text: str) -> str:
    return hashlib.sha256(f"{revision}\n{text}".encode()).hexdigest()[:16]


def _stored(row: Row[Any]) -> StoredRevision:
    values = dict(row._mapping)
    try:
        values["policy"] = parse_toml(row.policy)
    except PolicyError as error:
        raise StoredPolicyUnreadable(row.revision, error) from error
    # SQLite drops the zone of what was stored as UTC.
    values["created_at"] = row.created_at.replace(tzinfo=row.created_at.tzinfo or UTC).astimezone(UTC)
    return StoredRevision(**values)


def _make_durable(connection: Any, _record: Any) -> None:
    """WAL keeps readers and writers apart; FULL syncs each commit, so an acknowledged append outlives a crash."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn what drivers raise into StoreUnavailable; the driver's own text carries neither statement nor password."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
        raise StoreUnavailable(f"policy store: {getattr(error, 'orig', None) or error}") from error
