"""The budgets as one replica knows them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.budgets.charges import NOTHING_CARRIED, Carried, Charges
from meridian_control.capabilities.budgets.fleet_budgets import FleetBudgets
from meridian_control.capabilities.budgets.store import BudgetStore
from meridian_control.capabilities.budgets.token_bucket import Account, Usage, charged, settled
from meridian_control.common.errors import StoreUnavailable
from meridian_control.engine.request_table import RequestTable
from meridian_control.engine.shortening import LOWER_CAP, SOFT_CLOSE
from meridian_control.policy.shortening_schema import BudgetPolicy
from tests.fakes.tables import policy, table, thinking

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
OWN = policy(budget=[{"name": "a", "tokens_per_minute": 600}, {"name": "b", "tokens_per_day": 86_400}])


class Shared:
    """A store that another replica uses too, and that a test takes away."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.away = False
        self.clock = NOW

    async def charge(self, usages: Mapping[str, Usage], budgets: Mapping[str, BudgetPolicy]) -> dict[str, Account]:
        if self.away:
            raise StoreUnavailable("policy store: away")
        now = self.clock
        for name, usage in usages.items():
            self.accounts[name] = settled(self.accounts.get(name), usage, budgets[name], now)
        return {name: charged(account, 0, budgets[name], now) for name, account in self.accounts.items()}

    async def share(self, budgets: FleetBudgets, now: datetime = NOW, ahead_s: float = 0.0) -> None:
        """Exchange at the store's time `now`; the replica's clock is `ahead_s` ahead of it."""
        store: BudgetStore = self  # type: ignore[assignment]
        self.clock = now
        own = now + timedelta(seconds=ahead_s)
        with suppress(StoreUnavailable) if self.away else nullcontext():
            await budgets.share(store, own)
        budgets.find_stages(own)


def replica() -> FleetBudgets:
    made = FleetBudgets()
    made.set_budgets([OWN])
    return made


async def test_replicas_see_the_usage_of_all_and_their_stages_fall_as_time_passes() -> None:
    store, one, two = Shared(), replica(), replica()
    one.add_tokens({"a": 200, "b": 1})
    two.add_tokens({"a": 150})
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


async def run(store: Shared, replicas: list[FleetBudgets], begin_s: int, seconds: int, tokens: int) -> None:
    """Exchange every second; each replica counts `tokens` in each second."""
    for second in range(begin_s, begin_s + seconds):
        for one in replicas:
            one.add_tokens({"a": tokens})
            await store.share(one, NOW + timedelta(seconds=second))


@pytest.mark.parametrize(("count", "tokens"), [(1, 5), (1, 9), (2, 4)])
async def test_usage_within_the_refill_shortens_nothing_after_an_outage_of_the_store(count: int, tokens: int) -> None:
    """The budget regains 10 tokens a second."""
    store, replicas = Shared(), [replica() for _ in range(count)]
    await run(store, replicas, 0, 10, tokens)
    store.away = True
    await run(store, replicas, 10, 300, tokens)
    assert not any(one.stages for one in replicas)
    store.away = False
    await run(store, replicas, 310, 3, tokens)
    assert not any(one.stages for one in replicas)
    assert store.accounts["a"].used_tokens == 313 * count * tokens
    assert store.accounts["a"].minute_missing <= count * tokens


async def test_a_replica_that_was_cut_off_counts_what_the_others_left_of_the_refill() -> None:
    """The budget regains 10 tokens a second; together the replicas use 8, and then 14."""
    for tokens, missing in ((4, 0), (7, 60 * 4)):
        store, one, two = Shared(), replica(), replica()
        await run(store, [one, two], 0, 1, tokens)
        for second in range(1, 61):
            await run(store, [one], second, 1, tokens)
            store.away = True
            await run(store, [two], second, 1, tokens)
            store.away = False
        await run(store, [one, two], 61, 1, tokens)
        assert store.accounts["a"].minute_missing == pytest.approx(missing, abs=20)


async def test_usage_beyond_the_refill_is_missing_after_an_outage_of_the_store() -> None:
    store, replicas = Shared(), [replica(), replica()]
    await run(store, replicas, 0, 1, 0)
    store.away = True
    await run(store, replicas, 1, 60, 8)
    assert not any(one.stages for one in replicas), "each replica knows of its own usage only"
    store.away = False
    await run(store, replicas, 61, 1, 8)
    assert store.accounts["a"].minute_missing == pytest.approx(61 * (8 + 8 - 10), abs=20)
    await run(store, replicas, 62, 1, 0)
    assert [one.stages for one in replicas] == [{"a": SOFT_CLOSE}] * 2


async def test_a_budget_that_rests_during_an_outage_of_the_store_saves_up_no_more_than_its_capacity() -> None:
    store, one = Shared(), replica()
    await run(store, [one], 0, 1, 0)
    store.away = True
    await run(store, [one], 1, 3600, 0)
    await run(store, [one], 3601, 1, 500)
    assert one.stages == {"a": LOWER_CAP}
    store.away = False
    await run(store, [one], 3602, 1, 0)
    assert one.stages == {"a": LOWER_CAP}
    assert store.accounts["a"].minute_missing == pytest.approx(490, abs=20)


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_replica_with_a_wrong_clock_neither_stops_nor_doubles_the_refill(ahead_s: float) -> None:
    store, right, wrong = Shared(), replica(), replica()
    right.add_tokens({"a": 400})
    await store.share(right)
    wrong.add_tokens({"a": 1})
    await store.share(wrong, NOW, ahead_s)
    for second in range(1, 11):
        for one, ahead in ((right, 0.0), (wrong, ahead_s)):
            await store.share(one, NOW + timedelta(seconds=second), ahead)
    for one, ahead in ((right, 0.0), (wrong, ahead_s)):
        (a, _) = one.messages([OWN], NOW + timedelta(seconds=10 + ahead))
        assert a.minute_left_tokens == pytest.approx(600 - 401 + 100, abs=2)


async def test_a_budget_smaller_than_a_few_seconds_refill_is_not_used_up_by_usage_within_the_refill() -> None:
    store, one = Shared(), FleetBudgets()
    one.set_budgets([policy(budget=[{"name": "a", "tokens_per_minute": 600, "burst_tokens": 15}])])
    await run(store, [one], 0, 30, 9)
    assert one.stages == {}


async def test_a_budget_without_a_policy_is_dropped() -> None:
    store, one = Shared(), replica()
    one.add_tokens({"a": 500})
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
    made, charges = replica(), Charges(table(thinking(think_tokens=7)))
    charges.begin_policy(has_budgets=True)
    charges.open(0)
    charges.assign(0, ("a",))
    known = Carried("s", {("r0", 0): 7})
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
    charges.open(0)
    charges.add_ended(agent_pb2.EndedThinking(tenant="acme", think_tokens=100))
    charges.add_ended(agent_pb2.EndedThinking(tenant="third", think_tokens=1000))
    made.collect(charges)
    made.collect(charges)
    assert made.counted == {"acme": 107, "all": 1107}
    assert charges.take_by_tenant() == {("acme", ""): 107, ("third", ""): 1000}
