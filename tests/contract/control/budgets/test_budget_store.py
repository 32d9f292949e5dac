"""The usage of budgets in a real SQLite file and a real PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from meridian_control.budgets.store import BudgetStore
from meridian_control.budgets.token_bucket import Account
from meridian_control.policy.shortening_schema import BudgetPolicy
from meridian_control.storage.database import Database

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
BUDGETS = {name: BudgetPolicy(name=name, tokens_per_minute=600, tokens_per_day=864_000) for name in ("a", "b")}


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of an empty store, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'budgets.db'}"
    return str(request.getfixturevalue("postgres").database())


async def test_usage_adds_up_and_outlives_a_restart(address: str) -> None:
    database = await Database.open(address)
    store = BudgetStore(database)
    assert await store.charge({}, BUDGETS, NOW) == {}
    assert await store.charge({"a": 100, "b": 0}, BUDGETS, NOW) == {"a": Account(100, 100, 100, NOW)}
    later = NOW + timedelta(seconds=5)
    both = await store.charge({"a": 20, "b": 7}, BUDGETS, later)
    assert both == {"a": Account(120, 70, 70, later), "b": Account(7, 7, 7, later)}
    await database.close()
    database = await Database.open(address)
    assert await BudgetStore(database).charge({}, BUDGETS, later) == both
    assert await BudgetStore(database).charge({}, {"b": BUDGETS["b"]}, later) == {"b": both["b"]}
    await database.close()


async def test_replicas_that_charge_at_once_lose_no_token(address: str) -> None:
    databases = [await Database.open(address) for _ in range(2)]

    async def charge(number: int) -> None:
        store = BudgetStore(databases[number % 2])
        await store.charge({"a": 1, "b": 2} if number % 3 else {"b": 2, "a": 1}, BUDGETS, NOW)

    await asyncio.gather(*(charge(number) for number in range(20)))
    accounts = await BudgetStore(databases[0]).charge({}, BUDGETS, NOW)
    assert {name: account.used_tokens for name, account in accounts.items()} == {"a": 20, "b": 40}
    for database in databases:
        await database.close()
