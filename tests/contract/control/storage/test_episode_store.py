"""Episodes and what was found, on a real SQLite and a real PostgreSQL, with two replicas on the latter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text, update

from meridian_control.capabilities.self_calibration.episodes import Episode, Sample
from meridian_control.capabilities.self_calibration.learner import Learner
from meridian_control.capabilities.self_calibration.store import EpisodeStore
from meridian_control.storage.database import Database
from meridian_control.storage.tables import versions

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
DAY = timedelta(days=1)
CHAT, BATCH = "org/m#00ff#chat", "org/m#00ff#batch"


@pytest.fixture
async def stores(address: str) -> AsyncIterator[tuple[EpisodeStore, EpisodeStore]]:
    """Yield the stores of two replicas, which on SQLite are one."""
    databases = [await Database.open(address) for _ in range(2 if "postgres" in address else 1)]
    yield EpisodeStore(databases[0]), EpisodeStore(databases[-1])
    for database in databases:
        await database.close()


def episode(name: str, natural: int = 300) -> str:
    samples = Sample(64, 66, 0.25, 2, 1, False, True, False), Sample(128, 130, 0.5, 2, 1, True, False, True)
    return Episode(name, natural, samples).to_json()


async def test_numbers_outgrow_32_bits(postgres_address: str) -> None:
    database = await Database.open(postgres_address)
    async with database.writing(tell=False) as connection:
        # The types of 0.3.0.
        await connection.execute(text("ALTER TABLE self_calibration_episodes ALTER COLUMN number TYPE INTEGER"))
        await connection.execute(text("ALTER SEQUENCE self_calibration_episodes_number_seq AS INTEGER"))
        await connection.execute(update(versions).values(version=9))
    await database.close()
    database = await Database.open(postgres_address)
    async with database.writing(tell=False) as connection:
        await connection.execute(text("SELECT setval('self_calibration_episodes_number_seq', 2147483647)"))
    store = EpisodeStore(database)
    await store.add([(CHAT, episode("a"))], NOW, 10)
    assert (await store.newest())[CHAT].number == 2**31
    await database.close()


async def test_replicas_add_to_the_same_episodes(stores: tuple[EpisodeStore, EpisodeStore]) -> None:
    one, other = stores
    assert (await one.newest(), await one.learners()) == ({}, {})
    assert await one.read(CHAT, 0, 10, 0) == (0, [])
    await one.add([(CHAT, episode("a")), (BATCH, episode("b"))], NOW, 10)
    await other.add([(CHAT, episode("c")), (CHAT, episode("a", natural=301))], NOW + DAY, 10)
    newest = await one.newest()
    assert newest == await other.newest()
    assert (newest[CHAT].time, newest[BATCH].time) == (NOW + DAY, NOW)
    assert newest[CHAT].number > newest[BATCH].number
    counts = [
        await one.count(traffic, after) for traffic, after in ((CHAT, 0), (BATCH, 0), (CHAT, newest[CHAT].number))
    ]
    assert counts == [3, 1, 0]
    last, rows = await other.read(CHAT, 0, 10, 0)
    assert last == newest[CHAT].number
    assert rows == [episode("a"), episode("c"), episode("a", natural=301)]
    both = sum(map(len, rows[1:]))
    for least, most_bytes, read in ((2, 0, 2), (0, both, 2), (2, both - 1, 2), (1, both - 1, 1), (1, both, 2)):
        assert await one.read(CHAT, 0, least, most_bytes) == (last, rows[-read:])
    assert await one.read(CHAT, newest[BATCH].number, 10, 0) == (last, rows[1:])
    assert await one.count(CHAT, newest[BATCH].number) == 2, "numbers follow the order in which replicas add"


async def test_the_oldest_episodes_are_dropped_and_a_traffic_is_forgotten(
    stores: tuple[EpisodeStore, EpisodeStore],
) -> None:
    one, other = stores
    await one.add([(CHAT, episode(str(number))) for number in range(4)], NOW, 4)
    await other.add([(BATCH, episode("b"))], NOW, 1)
    assert (await one.count(CHAT, 0), await one.count(BATCH, 0)) == (4, 1)
    await other.add([(CHAT, episode("4"))], NOW, 2)
    assert (await one.read(CHAT, 0, 10, 0))[1] == [episode("3"), episode("4")]
    await one.save(Learner.new(CHAT, NOW))
    await other.forget(CHAT)
    assert (await one.newest()).keys() == {BATCH}
    assert await one.learners() == {}


async def test_what_was_found_replaces_what_was_known(stores: tuple[EpisodeStore, EpisodeStore]) -> None:
    one, other = stores
    new = Learner.new(CHAT, NOW)
    await one.save(new)
    refused = new.refused(400, "EAT < 0.1 nats may lose 3 %", 17, NOW)
    await other.save(refused)
    await other.save(Learner.new(BATCH, NOW))
    assert await one.learners() == {CHAT: refused, BATCH: Learner.new(BATCH, NOW)}
