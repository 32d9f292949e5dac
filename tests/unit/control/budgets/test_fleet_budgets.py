"""The budgets as one replica knows them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from meridian.v1 import agent_pb2

from meridian_control.budgets.charges import NOTHING_CARRIED, Carried, Charges
from meridian_control.budgets.fleet_budgets import FleetBudgets
from meridian_control.budgets.stages import LOWER_CAP, SOFT_CLOSE
from meridian_control.budgets.token_bucket import Account, charged
from meridian_control.common.errors import StoreUnavailable
from meridian_control.decisions.request_table import RequestTable
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
    charges = Charges(rows)
    charges.has_policy = True
    charges._sets.append(("a",))
    known = Carried("s", {"r0": 7})
    made.carry(("e", "1"), "s", charges)
    assert made.counted == {"a": 7}
    assert made.carried(("e", "1"), {}) == known
    assert made.carried(("e", "1"), {}) == NOTHING_CARRIED, "once"
    assert made.carried(("e", "1"), {"s": charges}) == known, "the older stream has not ended yet"
    made.carry(("e", "1"), "s", charges)
    assert made.carried(("e", "2"), {}) == NOTHING_CARRIED, "the engine's process is another one"
    made.carry(("e", "1"), "s", charges)
    made.forget(["e"])
    assert made.carried(("e", "1"), {}) == NOTHING_CARRIED
    assert made.counted == {"a": 7}


def test_tokens_of_a_session_without_a_policy_count_for_the_budgets_that_match() -> None:
    names = {"acme": "acme", "all": "*", "other": "else"}
    budgets = [{"name": name, "tenant": tenant, "tokens_per_day": 9} for name, tenant in names.items()]
    made, rows = FleetBudgets(), RequestTable(1)
    made.set_budgets([policy(budget=budgets)])
    rows.open(agent_pb2.RequestOpened(tenant="acme", think_tokens=50, unreported_think_tokens=7))
    charges = Charges(rows)
    charges.add_ended(agent_pb2.EndedThinking(tenant="acme", think_tokens=100))
    charges.add_ended(agent_pb2.EndedThinking(tenant="third", think_tokens=1000))
    made.collect(charges)
    made.collect(charges)
    assert made.counted == {"acme": 107, "all": 1107}
    assert charges.take_by_tenant() == {("acme", ""): 107, ("third", ""): 1000}
