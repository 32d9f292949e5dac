"""The budgets as one replica knows them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from meridian_control.budgets.charges import Charges
from meridian_control.budgets.fleet_budgets import FleetBudgets
from meridian_control.budgets.stages import LOWER_CAP, SOFT_CLOSE
from meridian_control.budgets.token_bucket import Account, charged
from meridian_control.common.errors import StoreUnavailable
from tests.fakes.tables import policy, table, thinking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meridian_control.budgets.store import BudgetStore
    from meridian_control.policy.shortening_schema import BudgetPolicy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
OWN = policy(budget=[{"name": "a", "tokens_per_minute": 600}, {"name": "b", "tokens_per_day": 86_400}])


class Shared:
    """A store that another replica uses too, and that a test takes away."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.away = False

    async def charge(
        self, tokens: Mapping[str, int], budgets: Mapping[str, BudgetPolicy], now: datetime
    ) -> dict[str, Account]:
        if self.away:
            raise StoreUnavailable("policy store: away")
        for name, count in tokens.items():
            self.accounts[name] = charged(self.accounts.get(name), count, budgets[name], now)
        return {name: account for name, account in self.accounts.items() if name in budgets}

    async def share(self, budgets: FleetBudgets, now: datetime = NOW) -> None:
        store: BudgetStore = self  # type: ignore[assignment]
        await budgets.share(store, now)
        budgets.find_stages(now)


def replica() -> FleetBudgets:
    made = FleetBudgets()
    made.set_budgets([OWN])
    return made


async def test_replicas_see_the_usage_of_all_and_their_stages_fall_as_time_passes() -> None:
    store, one, two = Shared(), replica(), replica()
    one.add({"a": 200, "b": 1})
    two.add({"a": 150})
    await store.share(one)
    await store.share(two)
    assert (one.stages, two.stages) == ({}, {"a": SOFT_CLOSE})
    await store.share(one)
    assert one.stages == two.stages
    (a, b) = one.messages([OWN], NOW)
    assert (a.used_tokens, a.minute_left_tokens, a.HasField("day_left_tokens"), a.stage) == (
        350,
        250,
        False,
        SOFT_CLOSE,
    )
    assert (b.used_tokens, b.day_left_tokens, b.HasField("minute_left_tokens")) == (1, 86_399, False)
    assert one.counted == {"a": 200, "b": 1}
    one.find_stages(NOW + timedelta(seconds=10))
    assert one.stages == {}


async def test_unsaved_tokens_count_for_the_stage_and_are_kept() -> None:
    store, one = Shared(), replica()
    one.add({"a": 200})
    await store.share(one)
    store.away = True
    one.add({"a": 250})
    with pytest.raises(StoreUnavailable):
        await store.share(one)
    one.find_stages(NOW)
    assert (one.stages, one.unsaved_tokens) == ({"a": LOWER_CAP}, 250)
    assert one.messages([OWN], NOW)[0].unsaved_tokens == 250
    store.away = False
    await store.share(one)
    assert (store.accounts["a"].used_tokens, one.unsaved_tokens) == (450, 0)


async def test_a_budget_without_a_policy_is_dropped() -> None:
    store, one = Shared(), replica()
    one.add({"a": 500})
    one.find_stages(NOW)
    assert one.stages
    one.set_budgets([policy()])
    await store.share(one)
    assert (one.stages, one.unsaved_tokens, store.accounts) == ({}, 0, {})


def test_the_policy_in_force_sets_the_limits() -> None:
    made = FleetBudgets()
    candidate = policy(budget=[{"name": "a", "tokens_per_minute": 9}, {"name": "c", "tokens_per_minute": 9}])
    made.set_budgets([OWN, candidate])
    assert {name: budget.tokens_per_minute for name, budget in made.budgets.items()} == {"a": 600, "b": 0, "c": 9}


def test_what_a_stream_counted_is_for_the_next_stream_of_the_same_process() -> None:
    made, rows = replica(), table(thinking(think_tokens=7, budget_set=1))
    charges = Charges(rows, {})
    charges._sets.append(("a",))
    made.carry(("e", "1"), charges)
    assert made.counted == {"a": 7}
    assert made.carried(("e", "1"), []) == {"r0": 7}
    assert made.carried(("e", "1"), []) == {}, "once"
    assert made.carried(("e", "1"), [charges]) == {"r0": 7}, "the older stream has not ended yet"
    made.carry(("e", "1"), charges)
    assert made.carried(("e", "2"), []) == {}, "the engine's process is another one"
    made.carry(("e", "1"), charges)
    made.forget(["e"])
    assert made.carried(("e", "1"), []) == {}
    assert made.counted == {"a": 7}
