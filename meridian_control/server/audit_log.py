"""Keeps the audit records in the database: one for every call that changes something and every call that is refused.

The module owns the table of records and how long records stay. A call's record is on disk before the call is served,
so that nothing changes without a record; if the record cannot be stored, the call fails. The outcome is added after
the call. If the outcome cannot be stored, the caller still gets the true answer, the outcome goes to the log, and the
record stays without an outcome. The module runs on the control plane's event loop.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any

from meridian.v1.audit_pb2 import AuditRecord
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from meridian_control.common.errors import StoreUnavailable
from meridian_control.server.rate_limits import Rate
from meridian_control.storage.database import utc
from meridian_control.storage.tables import audit_records as _records

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import ColumnElement

    from meridian_control.storage.database import Database

logger = logging.getLogger(__name__)

# Largest numbers of kept records, of served calls and of refused calls. The limits are separate, so that a flood of
# refused calls drives out no record of a served call.
MAX_RECORDS, MAX_REFUSALS = 100_000, 10_000
# Refused calls recorded per second in the long run, and in one burst; the log has the number of those left out.
REFUSALS_PER_S, REFUSALS_BURST = 5.0, 100
# Number of records stored between two deletions of old records.
PRUNE_EVERY = 500
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
MAX_ERROR_CHARS = 300
PACKAGE = "meridian.v1."
# Fields of a record that its message has as they are.
SHOWN = (
    *("id", "principal", "role", "peer", "method", "request_id", "reason"),
    *("outcome", "error", "before_etag", "after_etag"),
)


@dataclass(frozen=True)
class Call:
    """Facts about a call that are known before the call is served."""

    principal: str
    role: str
    peer: str
    method: str
    request_id: str = ""
    reason: str = ""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditOutcome:
    """The result of a call. `code` is the name of the call's gRPC status code."""

    code: str
    error: str = ""
    before_etag: str = ""
    after_etag: str = ""


# Etag that the resource had before the call that is being served. The interceptor takes it from the request; a service
# sets it if it knows better.
before_etag: ContextVar[str] = ContextVar("before_etag", default="")


class AuditLog:
    """The audit records in `database`. `clock` returns the time with a time zone."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database, self._clock = database, clock
        self._until_pruned = 0
        self._refusals = Rate(REFUSALS_PER_S, REFUSALS_BURST, time.monotonic())
        self._left_out = 0

    async def begin_call(self, call: Call) -> int:
        """Record that a call is about to be served, and return the record's id. Raises StoreUnavailable."""
        return await self._insert(call, AuditOutcome(""))

    async def end_call(self, record_id: int, outcome: AuditOutcome, details: dict[str, str] | None = None) -> None:
        """Add the outcome of a call to its record. `details` replaces the record's details, unless it is None."""
        columns = {name: _storable(value) for name, value in _outcome_columns(outcome).items()}
        if details is not None:
            columns["details"] = json.dumps(details)
        change = update(_records).where(_records.c.id == record_id).values(columns)
        try:
            async with self._database.writing(tell=False) as connection:
                await connection.execute(change)
        except StoreUnavailable as error:
            logger.error("audit record %d lacks its outcome, which was %s: %s", record_id, outcome, error)

    async def refuse(self, call: Call, outcome: AuditOutcome) -> None:
        """Record a call that was not served."""
        if self._refusals.wait_s(time.monotonic()):
            self._left_out += 1
            return
        if self._left_out:
            logger.warning("%d refused calls were not recorded: too many calls were refused at once", self._left_out)
            self._left_out = 0
        try:
            await self._insert(call, outcome)
        except StoreUnavailable as error:
            logger.error("cannot record a refused call: %s, %s: %s", call, outcome, error)

    async def list(self, limit: int, before: int | None, wanted: list[ColumnElement[bool]]) -> list[AuditRecord]:
        """Return the newest records that fulfil all conditions in `wanted`, newest first, with ids below `before`.

        An id grows from each call to those that begin after it, whatever the clocks say.

        Raises StoreUnavailable.
        """
        query = select(_records).order_by(_records.c.id.desc()).limit(limit).where(*wanted)
        if before is not None:
            query = query.where(_records.c.id < before)
        async with self._database.reading() as connection:
            return [_record(row._mapping) for row in await connection.execute(query)]

    async def _insert(self, call: Call, outcome: AuditOutcome) -> int:
        now = self._clock().astimezone(UTC)
        row = {**vars(call), **_outcome_columns(outcome), "details": json.dumps(call.details), "time": now}
        row = {name: _storable(value) if isinstance(value, str) else value for name, value in row.items()}
        while True:
            try:
                async with self._database.writing(tell=False) as connection:
                    # An id is the time in microseconds and a random part, so that replicas need not agree on the next
                    # id; but it is above all ids so far, even if the clock was set back or differs between replicas.
                    newest = await connection.scalar(select(func.max(_records.c.id))) or 0
                    # 1024 ids belong to each microsecond.
                    record_id = max(int(now.timestamp() * 1e6) << 10, newest + 1) + secrets.randbits(10)
                    await connection.execute(insert(_records).values(id=record_id, **row))
                    await self._prune(connection)
                return record_id
            except IntegrityError:
                continue

    async def _prune(self, connection: Any) -> None:
        self._until_pruned -= 1
        if self._until_pruned > 0:
            return
        self._until_pruned = PRUNE_EVERY
        refused = _records.c.outcome.in_(REFUSED)
        for kind, kept in ((refused, MAX_REFUSALS), (~refused, MAX_RECORDS)):
            newest = select(_records.c.id).where(kind).order_by(_records.c.id.desc()).offset(kept).limit(1)
            await connection.execute(delete(_records).where(kind, _records.c.id <= newest.scalar_subquery()))


def wanted(
    *, principal: str, method: str, outcome: str, request_id: str, since: datetime | None, until: datetime | None
) -> list[ColumnElement[bool]]:
    """Return the conditions for `AuditLog.list`; an empty argument gives no condition."""
    columns = _records.c
    pairs = (
        (columns.principal, principal),
        (columns.method, method and full_name(method)),
        (columns.outcome, outcome),
        (columns.request_id, request_id),
    )
    conditions = [column == _storable(value) for column, value in pairs if value]
    if since is not None:
        conditions.append(columns.time >= since.astimezone(UTC))
    if until is not None:
        conditions.append(columns.time < until.astimezone(UTC))
    return conditions


def full_name(method: str) -> str:
    """Return a method's name with its package, which callers may leave out."""
    return method if "." in method else f"{PACKAGE}{method}"


def _storable(text: str) -> str:
    """Return a text without NUL, which PostgreSQL does not keep."""
    return text.replace("\0", "\ufffd")


def _outcome_columns(outcome: AuditOutcome) -> dict[str, str]:
    return {
        "outcome": outcome.code,
        "error": outcome.error[:MAX_ERROR_CHARS],
        "before_etag": outcome.before_etag,
        "after_etag": outcome.after_etag,
    }


def _record(row: Any) -> AuditRecord:
    record = AuditRecord(**{name: row[name] for name in SHOWN}, details=json.loads(row["details"]))
    record.time.FromDatetime(utc(row["time"]))
    return record
