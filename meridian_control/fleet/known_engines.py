"""Keeps the engines that a control plane knows in the database, so that after a restart it names those it has lost.

Only a control plane with a SQLite file does this: replicas on PostgreSQL know each other's engines, and name a replica
that has died. The module owns the table `known_engines`, which has one row, and runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2
from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert

from meridian_control.common.errors import StoreUnavailable
from meridian_control.fleet.departed import FORGET_AFTER_S
from meridian_control.storage.tables import known_engines

if TYPE_CHECKING:
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.storage.database import Database

# Seconds between two looks for changes. An engine that connects later than the last look before a crash is not named.
LOOK_S = 1.0
# Seconds after which the row is written again although nothing has changed.
RENEW_S = 60.0


class KnownEngines:
    """The engines that are connected, and those whose streams broke off and that are not forgotten yet."""

    def __init__(self, database: Database, fleet: Fleet) -> None:
        self._database, self._fleet = database, fleet
        self._stored: list[list[Any]] = []
        self._stored_at: datetime | None = None

    async def look(self) -> None:
        """Take the engines that the control plane before this one has known for lost until they connect. One that ended
        longer ago than engines are kept has left none. Raises StoreUnavailable."""
        if self._database.shared:
            return
        async with self._database.reading() as connection:
            stored = await connection.scalar(select(known_engines.c.engines))
        if stored is None:
            return
        now, saved = self._fleet.clock(), json.loads(stored)
        if (now - datetime.fromisoformat(saved["seen_at"])).total_seconds() > FORGET_AFTER_S:
            return
        # Lost engines are kept in the order in which they were lost, and those that were connected are lost now.
        engines: list[Any] = saved["engines"]
        revisions: list[Any] = saved.get("revisions") or [(0, 0)] * len(engines)
        lost = [(min(now, datetime.fromisoformat(row[3] or now.isoformat())), row) for row in engines]
        for (time, row), (wanted, acked) in sorted(zip(lost, revisions, strict=True)):
            engine_id, incarnation, model, ended = row
            view = fleet_pb2.Engine(engine_id=engine_id, incarnation=incarnation, model=model, lost=True)
            # The revisions say whether the engine is in the group of a rollout.
            view.revision, view.acked_revision = wanted, acked
            view.state = fleet_pb2.CONNECTION_STATE_DISCONNECTED
            view.report_time.FromDatetime(datetime.fromisoformat(ended or saved["seen_at"]))
            self._fleet.departed.add_engine(view, 0.0, time)
        self._fleet.departed.forget(now)

    async def run(self) -> None:
        """Store the engines whenever they have changed, until cancelled. A call in progress is never cancelled, because
        a cancelled database driver leaks its connection."""
        while not self._database.shared:
            await asyncio.shield(self._fleet.tasks.start(self._try_to_store()))
            await asyncio.sleep(LOOK_S)

    async def _try_to_store(self) -> None:
        with suppress(StoreUnavailable):
            await self.store()

    async def store(self) -> None:
        """Store the engines if they have changed. Raises StoreUnavailable."""
        now, rows = self._fleet.clock(), self._rows()
        fresh = self._stored_at is not None and (now - self._stored_at).total_seconds() < RENEW_S
        if rows == self._stored and fresh:
            return
        # Earlier builds read the first four places of a row, and store no revisions.
        engines, revisions = [row[:4] for row in rows], [row[4:] for row in rows]
        saved: dict[str, Any] = {"seen_at": now.isoformat(), "engines": engines, "revisions": revisions}
        stored = insert(known_engines).values(number=1, engines=json.dumps(saved))
        stored = stored.on_conflict_do_update(index_elements=["number"], set_={"engines": stored.excluded.engines})
        async with self._database.writing(tell=False) as connection:
            await connection.execute(stored)
        self._stored, self._stored_at = rows, now

    def _rows(self) -> list[list[Any]]:
        """Return id, incarnation and model; for an engine that is lost, the time at which its stream ended; and the
        revisions that are wanted on the engine and applied there."""
        rows = []
        for session in self._fleet.connections.sessions:
            hello = session.hello
            rows.append([hello.engine_id, hello.incarnation, hello.model, "", session.revision, session.acked_revision])
        for time, gone in self._fleet.departed.lost():
            ended = time.astimezone(UTC).isoformat()
            rows.append([gone.engine_id, gone.incarnation, gone.model, ended, gone.revision, gone.acked_revision])
        return sorted(rows)
