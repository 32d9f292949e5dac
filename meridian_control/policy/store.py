"""The policy store: every accepted policy revision, append-only, in SQLite or PostgreSQL.

The module owns revision numbers, etags and request ids. The module knows nothing of gRPC, of a policy's meaning, or of
the receivers of a change. The module runs on the control plane's event loop; the database driver does the waiting.

An append reads the newest revision and inserts the next number. The primary key makes appends atomic: if another
append took the number first, the insert fails, and the append starts over from the revision that is newest by then. The
candidate of an active rollout is stored but not in force, and no revision is appended during the rollout.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import Row, func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from meridian_control.common.errors import (
    EtagMismatch,
    InvalidRequest,
    NotFound,
    PolicyError,
    RolloutActive,
    StoredPolicyUnreadable,
)
from meridian_control.policy.formats import check_extensions, parse_stored_toml, parse_values, to_stored_toml, to_values
from meridian_control.policy.model import Policy
from meridian_control.policy.section import Section
from meridian_control.storage.database import Database, utc
from meridian_control.storage.tables import revisions as _revisions
from meridian_control.storage.tables import rollouts as _rollouts

logger = logging.getLogger(__name__)

# Etag of an empty store.
EMPTY_ETAG = "none"
MAX_REVISION = 2**31 - 1

_active = _rollouts.c.active == 1
_in_force = _revisions.c.revision.not_in(select(_rollouts.c.candidate_revision).where(_active))
_HEADER = [_revisions.c[name] for name in ("revision", "etag", "author", "reason", "created_at", "cause")]


@dataclass(frozen=True)
class RevisionHeader:
    """A revision without its policy; `created_at` is UTC. cause: why the control plane itself has stored the revision,
    empty if it has not, or if an older version has."""

    revision: int
    etag: str
    author: str
    reason: str
    created_at: datetime
    cause: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class StoredRevision(RevisionHeader):
    """One immutable revision."""

    policy: Policy


class PolicyStore:
    """The policy's revisions in a database."""

    def __init__(self, database: Database, extensions: Mapping[str, type[Section]] = MappingProxyType({})) -> None:
        self.database, self.extensions = database, extensions
        # The revisions about whose removed fields and unread extensions a warning was logged.
        self._warned: set[int] = set()

    async def current(self) -> StoredRevision | None:
        """Return the revision in force, which is the newest one except for an active rollout's candidate.

        The result is None in an empty store. Raises StoreUnavailable, StoredPolicyUnreadable.
        """
        row = await self._newest()
        return None if row is None else self._stored(row)

    async def number(self) -> int:
        """Return the number of the revision in force, 0 in an empty store. Raises StoreUnavailable."""
        async with self.database.reading() as connection:
            return await connection.scalar(select(func.max(_revisions.c.revision)).where(_in_force)) or 0

    async def holds(self, header: RevisionHeader) -> bool:
        """Return whether a revision is stored. One is not any more if the database has gone back to an older state, as
        after a failover to a copy that was behind. Raises StoreUnavailable."""
        same = (_revisions.c.revision == header.revision) & (_revisions.c.etag == header.etag)
        return await self._one(select(_revisions.c.revision).where(same)) is not None

    async def get(self, revision: int) -> StoredRevision:
        """Return one revision. Raises NotFound, StoreUnavailable, StoredPolicyUnreadable."""
        query = select(_revisions).where(_revisions.c.revision == revision)
        row = await self._one(query) if revision <= MAX_REVISION else None
        if row is None:
            raise NotFound(f"policy revision {revision} is not stored")
        return self._stored(row)

    async def history(self, limit: int, before: int | None = None) -> list[RevisionHeader]:
        """Return up to `limit` revisions, newest first, all older than `before`. Raises StoreUnavailable."""
        query = select(*_HEADER).order_by(_revisions.c.revision.desc()).limit(limit)
        if before is not None:
            query = query.where(_revisions.c.revision < before)
        async with self.database.reading() as connection:
            return [RevisionHeader(**_values(row)) for row in await connection.execute(query)]

    async def check(self, etag: str) -> int:
        """Return the newest revision's number, 0 in an empty store.

        Raises EtagMismatch if `etag` is neither empty nor the etag of that revision; RolloutActive during a rollout.
        """
        row = await self._newest()
        # The rollout is read second: if one begins after that, its candidate takes the number that an append would
        # take, so the append fails.
        rollout = await self._one(select(_rollouts.c.rollout_id).where(_active))
        if rollout is not None:
            raise RolloutActive(rollout.rollout_id)
        actual = EMPTY_ETAG if row is None else row.etag
        if etag and etag != actual:
            raise EtagMismatch(etag, actual)
        return 0 if row is None else row.revision

    async def answered(self, request_id: str, policy: Policy) -> StoredRevision | None:
        """Return the revision that was stored under `request_id`; None if there is none or `request_id` is empty.

        Raises InvalidRequest if that revision has another policy; StoreUnavailable, StoredPolicyUnreadable.
        """
        query = select(_revisions).where(_revisions.c.request_id == request_id)
        row = await self._one(query) if request_id else None
        if row is None:
            return None
        stored = self._stored(row)
        if stored.policy != policy:
            message = f'must be a new one; got "{request_id}", which stored another policy as revision {row.revision}'
            raise InvalidRequest("request_id", message)
        return stored

    async def append(
        self,
        policy: Policy,
        *,
        etag: str,
        author: str,
        reason: str,
        now: datetime,
        request_id: str = "",
        cause: str = "",
    ) -> StoredRevision:
        """Store `policy` as the next revision, which is on disk when the call returns.

        `etag` must be the newest revision's etag; an empty `etag` skips the check. `now` is an aware time. If
        `request_id` has already stored a revision, that revision is returned. Raises EtagMismatch, RolloutActive,
        InvalidRequest, StoreUnavailable, and the errors of `check_policy`.
        """
        appended = await self.append_and_compare(
            policy, etag=etag, author=author, reason=reason, now=now, request_id=request_id, cause=cause
        )
        return appended[0]

    async def append_and_compare(
        self,
        policy: Policy,
        *,
        etag: str,
        author: str,
        reason: str,
        now: datetime,
        request_id: str = "",
        cause: str = "",
    ) -> tuple[StoredRevision, StoredRevision | None]:
        """Do what `append` does, and return also the revision before, as `readable` does. That revision is read first,
        so that a call that has stored a revision does not fail."""
        await self.check_policy(policy)
        while True:
            if (stored := await self.answered(request_id, policy)) is not None:
                return stored, await self.readable(stored.revision - 1)
            newest = await self.check(etag)
            before = await self.readable(newest)
            stored = replace(new_revision(newest + 1, policy, author, reason, now), cause=cause)
            if await self._insert(stored, request_id):
                return stored, before

    async def readable(self, revision: int) -> StoredRevision | None:
        """Return a revision; None for 0 and for a revision that this version of the control plane cannot read. Raises
        NotFound, StoreUnavailable."""
        try:
            return await self.get(revision) if revision else None
        except StoredPolicyUnreadable:
            return None

    async def check_policy(self, policy: Policy) -> None:
        """Raise PolicyError for a policy that could not be read again once it is stored, as one may be that was made
        from another policy, and if no capability reads an extension of it. One of the revision in force may stay as it
        is: another replica may have its capability, and a policy must be changed without it, too. Raises
        StoreUnavailable."""
        parse_values(to_values(policy))
        kept: Mapping[str, Any] = {}
        if policy.extension.keys() - self.extensions.keys():
            in_force = await self.readable(await self.number())
            kept = in_force.policy.extension if in_force is not None else {}
        check_extensions(policy, self.extensions, kept)

    def _stored(self, row: Row[Any]) -> StoredRevision:
        """Return the revision of a row. Raises StoredPolicyUnreadable."""
        values = _values(row)
        del values["request_id"]
        try:
            policy, removed = parse_stored_toml(row.policy)
            check_extensions(policy, self.extensions)
        except PolicyError as error:
            raise StoredPolicyUnreadable(row.revision, error) from error
        values["policy"] = policy
        gone = [
            f"extension.{name} has no effect here: no capability reads it"
            for name in policy.extension.keys() - self.extensions.keys()
        ]
        if (notes := [*map(str, removed), *sorted(gone)]) and row.revision not in self._warned:
            self._warned.add(row.revision)
            for note in notes:
                logger.warning("stored policy revision %d: %s", row.revision, note)
        return StoredRevision(**values)

    async def _newest(self) -> Row[Any] | None:
        return await self._one(select(_revisions).where(_in_force).order_by(_revisions.c.revision.desc()).limit(1))

    async def _one(self, query: Any) -> Row[Any] | None:
        async with self.database.reading() as connection:
            return (await connection.execute(query)).one_or_none()

    async def _insert(self, stored: StoredRevision, request_id: str) -> bool:
        """Insert a revision; return False if its number or its request id is already taken."""
        try:
            async with self.database.writing() as connection:
                await insert_revision(connection, stored, request_id)
        except IntegrityError:
            return False
        return True


def new_revision(revision: int, policy: Policy, author: str, reason: str, now: datetime) -> StoredRevision:
    """Make the revision as it would be stored; `now` is an aware time."""
    etag = _etag(revision, to_stored_toml(policy))
    return StoredRevision(revision, etag, author, reason, now.astimezone(UTC), policy)


async def insert_revision(connection: AsyncConnection, stored: StoredRevision, request_id: str = "") -> None:
    """Store a revision. Raises SQLAlchemy's IntegrityError if its number or its request id is taken."""
    row = {**vars(stored), "policy": to_stored_toml(stored.policy), "request_id": request_id or None}
    row["cause"] = stored.cause or None
    await connection.execute(insert(_revisions).values(row))


def _etag(revision: int, text: str) -> str:
    return hashlib.sha256(f"{revision}\n{text}".encode()).hexdigest()[:16]


def _values(row: Row[Any]) -> dict[str, Any]:
    return {**row._mapping, "created_at": utc(row.created_at), "cause": row.cause or ""}
