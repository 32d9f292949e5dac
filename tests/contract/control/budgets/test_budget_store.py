"""The usage of budgets in a real SQLite file and a real PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, select, update

from meridian_control.capabilities.budgets.store import BudgetStore
from meridian_control.capabilities.budgets.token_bucket import Account, Usage, charged, full
from meridian_control.policy.shortening_schema import BudgetPolicy
from meridian_control.storage.database import Database, utc
from meridian_control.storage.tables import budgets
from tests.fakes.control import utc_now

# Both limits regain a token in a second.
BUDGETS = {
    name: BudgetPolicy(name=name, tokens_per_minute=60, burst_tokens=10_000, tokens_per_day=86_400)
    for name in ("a", "b")
}


async def moved_back(database: Database, seconds: float) -> None:
    """Let time pass: move the time of all accounts back."""
    async with database.writing(tell=False) as connection:
        rows = (await connection.execute(select(budgets.c.name, budgets.c.updated_at))).all()
        for name, updated_at in rows:
            earlier = utc(updated_at) - timedelta(seconds=seconds)
            await connection.execute(update(budgets).where(budgets.c.name == name).values(updated_at=earlier))


def usages(**tokens: int) -> dict[str, Usage]:
    """Tokens that came at once."""
    now = utc_now()
    return {
        name: Usage(count, full(now), charged(full(now), count, BUDGETS[name], now)) for name, count in tokens.items()
    }


def shown(accounts: dict[str, Account]) -> dict[str, tuple[float, ...]]:
    """Tokens used, and missing for the minute and the day, to the refill of 100 seconds."""
    return {n: (a.used_tokens, round(a.minute_missing, -2), round(a.day_missing, -2)) for n, a in accounts.items()}


async def test_usage_adds_up_and_outlives_a_restart(address: str) -> None:
    database = await Database.open(address)
    store = BudgetStore(database, utc_now)
    assert await store.charge({}, BUDGETS) == {}
    assert shown(await store.charge(usages(a=2000, b=0), BUDGETS)) == {"a": (2000, 2000, 2000)}
    await moved_back(database, 500)
    assert shown(await store.charge({}, BUDGETS)) == {"a": (2000, 1500, 1500)}
    both = shown(await store.charge(usages(a=200, b=300), BUDGETS))
    assert both == {"a": (2200, 1700, 1700), "b": (300, 300, 300)}
    await database.close()
    database = await Database.open(address)
    assert shown(await BudgetStore(database, utc_now).charge({}, BUDGETS)) == both
    assert shown(await BudgetStore(database, utc_now).charge({}, {"b": BUDGETS["b"]})) == {"b": both["b"]}
    await database.close()


async def test_many_budgets_take_no_more_statements_than_two(address: str) -> None:
    """Each statement waits for the database, under locks for which other replicas wait."""
    database, counts = await Database.open(address), list[int]()
    store = BudgetStore(database, utc_now)

    def count(*_: Any) -> None:
        counts[-1] += 1

    event.listen(database._engine.sync_engine, "before_cursor_execute", count)
    for number in (2, 40):
        named = {f"{number}-{n}": BudgetPolicy(name=f"{number}-{n}", tokens_per_day=86_400) for n in range(number)}
        for added in (100, 200):
            counts.append(0)
            now = utc_now()
            charges = {n: Usage(100, full(now), charged(full(now), 100, budget, now)) for n, budget in named.items()}
            accounts = await store.charge(charges, named)
            assert {account.used_tokens for account in accounts.values()} == {added}
    assert counts[:2] == counts[2:]
    await database.close()


async def test_replicas_that_charge_at_once_lose_no_token(address: str) -> None:
    databases = [await Database.open(address) for _ in range(2)]

    async def charge(number: int) -> None:
        store = BudgetStore(databases[number % 2], utc_now)
        await store.charge(usages(a=1, b=2) if number % 3 else usages(b=2, a=1), BUDGETS)

    await asyncio.gather(*(charge(number) for number in range(20)))
    accounts = await BudgetStore(databases[0], utc_now).charge({}, BUDGETS)
    assert {name: account.used_tokens for name, account in accounts.items()} == {"a": 20, "b": 40}
    for database in databases:
        await database.close()


async def test_a_wrong_clock_of_the_past_stops_no_refill(address: str, caplog: pytest.LogCaptureFixture) -> None:
    database = await Database.open(address)
    store = BudgetStore(database, utc_now)
    await store.charge(usages(a=2000), BUDGETS)
    await moved_back(database, -7200)
    assert shown(await store.charge(usages(a=1000), BUDGETS)) == {"a": (3000, 3000, 3000)}
    (record,) = caplog.records
    assert "thinking budget a was last charged 7" in record.getMessage()
    await moved_back(database, 1000)
    assert shown(await store.charge({}, BUDGETS)) == {"a": (3000, 2000, 2000)}
    await database.close()


def utc_ahead(ahead: timedelta) -> datetime:
    return utc_now() + ahead


async def test_replicas_on_one_server_use_its_clock(postgres_address: str) -> None:
    database = await Database.open(postgres_address)
    for hours in (0, 1, -1):
        store = BudgetStore(database, partial(utc_ahead, timedelta(hours=hours)))
        await store.charge(usages(a=1000), BUDGETS)
    assert shown(await store.charge({}, BUDGETS)) == {"a": (3000, 3000, 3000)}
    await database.close()
