"""Stores the usage of thinking budgets in the database, one row for each budget that was ever used.

The store owns the table `budgets`. Replicas add their usage to the same rows, each within one transaction that locks
the rows, so that no usage is lost or counted twice. The module does not know who thinks. All code runs on the control
plane's event loop and never blocks it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, bindparam, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from meridian_control.capabilities.budgets.token_bucket import Account, charged, settled
from meridian_control.storage.database import utc
from meridian_control.storage.tables import budgets as _budgets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from datetime import datetime

    from sqlalchemy.ext.asyncio import AsyncConnection

    from meridian_control.capabilities.budgets.token_bucket import Usage
    from meridian_control.policy.shortening_schema import BudgetPolicy
    from meridian_control.storage.database import Database

logger = logging.getLogger(__name__)


class BudgetStore:
    """The accounts of the budgets in a database.

    clock: UTC, for SQLite. Replicas on PostgreSQL use the server's clock, because their own clocks may differ.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database, self._clock = database, clock

    async def charge(self, usages: Mapping[str, Usage], budgets: Mapping[str, BudgetPolicy]) -> dict[str, Account]:
        """Add the thinking tokens of this replica to the budgets' accounts, and return the accounts of all budgets that
        were ever used, as they are now.

        usages, budgets: by the budget's name; every name in `usages` is in `budgets`. If the call raises, no tokens
        were added, unless the database was lost while it committed. Raises StoreUnavailable.
        """
        names, used = sorted(budgets), {name: usage for name, usage in usages.items() if usage.tokens}
        if not used:
            async with self._database.reading() as connection:
                accounts = await _accounts(connection, names)
                now = await self._now(connection)
            return {name: charged(account, 0, budgets[name], now) for name, account in accounts.items()}
        while True:
            try:
                async with self._database.writing(tell=False) as connection:
                    if not self._database.shared:
                        # SQLite's driver would begin the transaction only at the first change, after the accounts
                        # were read.
                        await connection.execute(text("BEGIN IMMEDIATE"))
                    before = await _accounts(connection, names, locked=sorted(used))
                    # The rows are locked by now, so that a replica that locks them later reads a later time.
                    now = await self._now(connection)
                    after = {name: charged(account, 0, budgets[name], now) for name, account in before.items()}
                    for name, usage in sorted(used.items()):
                        after[name] = settled(before.get(name), usage, budgets[name], now)
                    await _write(connection, {name: after[name] for name in sorted(used)}, before.keys())
                _complain(before, after)
                return after
            except IntegrityError:
                # Another replica has just made the row of a budget, so the next attempt finds it.
                continue

    async def _now(self, connection: AsyncConnection) -> datetime:
        if not self._database.shared:
            return self._clock()
        now: datetime = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
        return utc(now)


def _complain(before: Mapping[str, Account], after: Mapping[str, Account]) -> None:
    """Log the accounts that have gone back in time."""
    for name, account in before.items():
        if account.updated_at > after[name].updated_at:
            ahead_s = (account.updated_at - after[name].updated_at).total_seconds()
            logger.warning(
                "thinking budget %s was last charged %.0f s ahead of the store's clock; it is refilled from now on",
                name,
                ahead_s,
            )


async def _accounts(
    connection: AsyncConnection, names: list[str], locked: list[str] | None = None
) -> dict[str, Account]:
    """Return the accounts of the named budgets that were ever used.

    locked: names of the accounts that no other replica may change until the transaction ends. All replicas lock them in
    the order of their names, so that replicas do not wait for each other in a circle.
    """
    query = select(_budgets).order_by(_budgets.c.name)
    rows: dict[str, Row[Any]] = {}
    for wanted, read in ((names, query), (locked or [], query.with_for_update())):
        if wanted:
            selected = await connection.execute(read.where(_budgets.c.name.in_(wanted)))
            rows |= {row.name: row for row in selected}
    return {name: _account(row) for name, row in rows.items()}


def _account(row: Row[Any]) -> Account:
    return Account(row.used_tokens, row.minute_missing, row.day_missing, utc(row.updated_at))


async def _write(connection: AsyncConnection, accounts: Mapping[str, Account], known: Collection[str]) -> None:
    """Write accounts, all known ones with one statement and all new ones with another: each statement waits for the
    database."""
    old = [account._asdict() | {"known": name} for name, account in accounts.items() if name in known]
    new = [account._asdict() | {"name": name} for name, account in accounts.items() if name not in known]
    for statement, rows in (
        (update(_budgets).where(_budgets.c.name == bindparam("known")), old),
        (insert(_budgets), new),
    ):
        if rows:
            await connection.execute(statement, rows)
