"""Stores freezes in the database: which engines run as stock vLLM, and until when.

The store owns the ids of freezes. A stored freeze never changes, except that a thaw moves its end to the past. Replicas
share the times of the database's server, because their own clocks may drift apart for as long as they run. The module
does not know how an engine is frozen. All code runs on the control plane's event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from meridian_control.common.errors import NotFound, StoreUnavailable
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.storage.database import Database, utc
from meridian_control.storage.tables import freezes as _freezes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# End time of a freeze that was thawed: no clock is before it, also if clocks differ or are set back.
THAWED = datetime.fromtimestamp(0, UTC)
# Largest difference between the clocks of a process and of its database's server that is left alone, because a slow
# answer of the database makes one.
MOST_APART = timedelta(seconds=5)


class FreezeStore:
    """The freezes in a database.

    `clock` gives aware time, and is not set back while the process runs. `on_change` is called with the freezes in
    force, whose times are of this clock, after each read and each change.
    """

    def __init__(
        self, database: Database, clock: Callable[[], datetime], on_change: Callable[[tuple[Freeze, ...]], None]
    ) -> None:
        self._database, self._clock, self._on_change = database, clock, on_change
        # Serialises reads, so that `on_change` never gets freezes that are older than those it got before.
        self._looking = asyncio.Lock()
        # The freezes that `on_change` got last.
        self._passed_on: tuple[Freeze, ...] = ()
        # The freezes that were read last, as they are stored, and each as it was by this process's clock when it was
        # first read: what the clock of the database's server does afterwards neither shortens nor prolongs it.
        self._known: dict[Freeze, Freeze] = {}

    async def look(self) -> tuple[Freeze, ...]:
        """Read the freezes in force, newest first, and pass them to `on_change`. Raises StoreUnavailable."""
        async with self._looking:
            return await self._read()

    async def _read(self) -> tuple[Freeze, ...]:
        ahead, now = await self._ahead(), self._clock().astimezone(UTC)
        known = [freeze.freeze_id for freeze in self._known.values() if freeze.end_time > now]
        begun = or_(_freezes.c.end_time > now + ahead, _freezes.c.freeze_id.in_(known))
        query = select(_freezes).where(_freezes.c.end_time > THAWED, begun).order_by(_freezes.c.freeze_id.desc())
        async with self._database.reading() as connection:
            stored = map(_freeze, await connection.execute(query))
        self._known = {each: self._known.get(each) or _begun_by(_moved(each, -ahead), now) for each in stored}
        return self._pass_on(tuple(freeze for freeze in self._known.values() if freeze.end_time > now))

    async def _ahead(self) -> timedelta:
        """Return by how much the clock of stored times is ahead of this process's clock. Raises StoreUnavailable."""
        if not self._database.shared:
            return timedelta()
        ahead = await self._database.now() - self._clock()
        return ahead if abs(ahead) > MOST_APART else timedelta()

    def _pass_on(self, in_force: tuple[Freeze, ...]) -> tuple[Freeze, ...]:
        self._passed_on = in_force
        self._on_change(in_force)
        return in_force

    async def _take_up(self, changed: Collection[int], begun: tuple[Freeze, ...] = ()) -> None:
        """Pass a stored change on: `begun` is in force instead of the freezes with the ids `changed`. The engines get
        the change also if the store cannot be read now; on SQLite nothing would read it later."""
        async with self._looking:
            try:
                await self._read()
            except StoreUnavailable:
                others = [freeze for freeze in self._passed_on if freeze.freeze_id not in changed]
                self._pass_on((*begun, *others))

    async def add_freeze(self, match: Match, end_time: datetime, author: str, reason: str) -> Freeze:
        """Begin a freeze; on return the freeze is on disk and `on_change` has it. Raises StoreUnavailable."""
        while True:
            ahead, now = await self._ahead(), self._clock()
            async with self._database.reading() as connection:
                newest = await connection.scalar(select(func.max(_freezes.c.freeze_id))) or 0
            freeze = Freeze(newest + 1, match, author, reason, now.astimezone(UTC), end_time.astimezone(UTC))
            stored = _moved(freeze, ahead)
            row = {column.name: getattr(stored, column.name, None) for column in _freezes.columns}
            try:
                async with self._database.writing() as connection:
                    await connection.execute(insert(_freezes).values(row | {"engines": json.dumps(vars(match))}))
            except IntegrityError:
                # Another caller took the id.
                continue
            self._known[stored] = freeze
            await self._take_up([freeze.freeze_id], (freeze,))
            return freeze

    async def thaw(self, freeze_id: int) -> list[Freeze]:
        """End a freeze now, or all freezes for 0, and return the ended freezes. Raises NotFound, StoreUnavailable."""
        ended = [freeze for freeze in await self.look() if freeze_id in (0, freeze.freeze_id)]
        if freeze_id and not ended:
            raise NotFound(f"freeze {freeze_id} is not in force")
        now = self._clock().astimezone(UTC)
        ids = [freeze.freeze_id for freeze in ended]
        async with self._database.writing() as connection:
            await connection.execute(update(_freezes).where(_freezes.c.freeze_id.in_(ids)).values(end_time=THAWED))
        await self._take_up(ids)
        return [replace(freeze, end_time=now) for freeze in ended]

    async def follow(self) -> None:
        """Call `look` when another replica may have changed the store, until cancelled; return at once on SQLite."""
        await self._database.follow(self.look)


def _freeze(row: Row[Any]) -> Freeze:
    engines = json.loads(row.engines)
    labels = tuple((name, value) for name, value in engines["engine_labels"])
    match = Match(tuple(engines["engine_ids"]), engines["model"], labels)
    return Freeze(row.freeze_id, match, row.author, row.reason, utc(row.create_time), utc(row.end_time))


def _moved(freeze: Freeze, by: timedelta) -> Freeze:
    return replace(freeze, create_time=freeze.create_time + by, end_time=freeze.end_time + by)


def _begun_by(freeze: Freeze, now: datetime) -> Freeze:
    """Return a freeze that this process reads for the first time, and that lasts no longer from now on than its own
    duration: the clock by which it was stored may have been set back since."""
    return _moved(freeze, min(timedelta(), now - freeze.create_time))
