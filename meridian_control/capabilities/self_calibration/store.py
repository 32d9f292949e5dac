"""Keeps episodes and what was found for each traffic in the database, so that all replicas add to the same episodes,
and a new leader goes on where the one before stopped.

The store owns the tables `self_calibration_episodes` and `self_calibration_found`. All methods may raise
StoreUnavailable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import delete, func, insert, select, update

from meridian_control.capabilities.self_calibration.episodes import Newest
from meridian_control.capabilities.self_calibration.learner import Learner
from meridian_control.storage.database import utc
from meridian_control.storage.tables import episodes as _episodes
from meridian_control.storage.tables import found_rules as _found

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from meridian_control.storage.database import Database, Fence


class EpisodeStore:
    """The episodes and learners of all replicas."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, rows: Sequence[tuple[str, str]], now: datetime, keep: int) -> None:
        """Add episodes as JSON, each with the name of its traffic, and drop all but the `keep` newest of these
        traffics."""
        values = [{"traffic": traffic, "time": now, "episode": episode} for traffic, episode in rows]
        async with self._database.writing(tell=False) as connection:
            await connection.execute(insert(_episodes), values)
            for traffic in {traffic for traffic, _ in rows}:
                numbers = select(_episodes.c.number).where(_episodes.c.traffic == traffic)
                oldest = numbers.order_by(_episodes.c.number.desc()).offset(keep).limit(1)
                if (last := await connection.scalar(oldest)) is not None:
                    old = (_episodes.c.traffic == traffic) & (_episodes.c.number <= last)
                    await connection.execute(delete(_episodes).where(old))

    async def newest(self) -> dict[str, Newest]:
        """Return the newest episode of each traffic."""
        numbers = select(func.max(_episodes.c.number)).group_by(_episodes.c.traffic)
        query = select(_episodes.c.traffic, _episodes.c.number, _episodes.c.time).where(_episodes.c.number.in_(numbers))
        async with self._database.reading() as connection:
            return {row.traffic: Newest(row.number, utc(row.time)) for row in await connection.execute(query)}

    async def count(self, traffic: str, after: int) -> int:
        """Return the number of episodes with higher numbers than `after`."""
        query = select(func.count()).where(_episodes.c.traffic == traffic, _episodes.c.number > after)
        async with self._database.reading() as connection:
            return int(await connection.scalar(query) or 0)

    async def read(self, traffic: str, after: int, least: int, most_bytes: int) -> tuple[int, list[str]]:
        """Return the newest episodes with higher numbers than `after` as JSON, oldest first, as many as have so many
        bytes, but never fewer than `least`; and the number of the newest one, `after` if there is none."""
        number, meant = _episodes.c.number, ((_episodes.c.traffic == traffic) & (_episodes.c.number > after))
        # Both are summed over each episode and the newer ones. The episodes are ASCII, so a character is a byte.
        size = func.sum(func.length(_episodes.c.episode)).over(order_by=number.desc()).label("size")
        count = func.count().over(order_by=number.desc()).label("count")
        sized = select(number, size, count).where(meant).subquery()
        oldest = select(func.min(sized.c.number)).where((sized.c.size <= most_bytes) | (sized.c.count <= least))
        query = select(number, _episodes.c.episode).where(meant, number >= oldest.scalar_subquery()).order_by(number)
        async with self._database.reading() as connection:
            rows = list(await connection.execute(query))
        return (rows[-1].number if rows else after), [row.episode for row in rows]

    async def forget(self, traffic: str) -> None:
        """Drop all that is known of a traffic."""
        async with self._database.writing(tell=False) as connection:
            for table in (_episodes, _found):
                await connection.execute(delete(table).where(table.c.traffic == traffic))

    async def learners(self) -> dict[str, Learner]:
        """Return what was found, by the name of the traffic."""
        async with self._database.reading() as connection:
            rows = await connection.execute(select(_found.c.traffic, _found.c.found))
            return {row.traffic: Learner.model_validate_json(row.found) for row in rows}

    async def save(self, learner: Learner, fence: Fence | None = None) -> None:
        """Store what is known of a traffic. `fence` is called within the transaction and raises if this replica may no
        longer store it."""
        values = {"found": learner.model_dump_json()}
        async with self._database.writing(tell=False) as connection:
            if fence is not None:
                await fence(connection)
            same = _found.c.traffic == learner.traffic
            if not (await connection.execute(update(_found).where(same).values(values))).rowcount:
                await connection.execute(insert(_found).values(values | {"traffic": learner.traffic}))
