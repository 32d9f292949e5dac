"""The arithmetic of a thinking budget."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_control.capabilities.budgets.token_bucket import Account, Usage, charged, left, left_ratio, settled
from meridian_control.policy.shortening_schema import BudgetPolicy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
MINUTE = BudgetPolicy(name="a", tokens_per_minute=600)
BOTH = BudgetPolicy(name="a", tokens_per_minute=600, burst_tokens=1200, tokens_per_day=86_400)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


WIDER = MINUTE.model_copy(update={"tokens_per_minute": 1200})


@pytest.mark.parametrize(
    ("charges", "account", "budget", "seconds", "remains"),
    [
        ([], None, BOTH, 0, (1200, 86_400)),
        ([], None, MINUTE, 0, (600, None)),
        # Usage empties both buckets, and time fills them up to their capacity.
        ([(300, BOTH, 0)], Account(300, 300, 300, NOW), BOTH, 10, (1000, 86_110)),
        ([(300, BOTH, 0)], Account(300, 300, 300, NOW), BOTH, 30, (1200, 86_130)),
        ([(300, BOTH, 0), (100, BOTH, 10)], Account(400, 300, 390, later(10)), BOTH, 10, (900, 86_010)),
        # Changed limits hold at once; a new limit begins with a full bucket.
        ([(300, MINUTE, 0)], Account(300, 300, 0, NOW), WIDER, 0, (900, None)),
        ([(300, MINUTE, 0)], Account(300, 300, 0, NOW), BOTH, 0, (900, 86_400)),
        # A clock that lags refills nothing twice; a time far ahead comes from a wrong clock.
        ([(300, MINUTE, 10), (50, MINUTE, 5)], Account(350, 350, 0, later(10)), MINUTE, 15, (300, None)),
        ([(300, MINUTE, 3600), (50, MINUTE, 0)], Account(350, 350, 0, NOW), MINUTE, 0, (250, None)),
        # Tokens that were rejected come back.
        ([(100, MINUTE, 0), (-30, MINUTE, 0)], Account(70, 70, 0, NOW), MINUTE, 0, (530, None)),
        ([(-30, MINUTE, 0)], Account(0, 0, 0, NOW), MINUTE, 0, (600, None)),
    ],
)
def test_what_is_charged_and_what_remains(
    charges: list[tuple[int, BudgetPolicy, float]],
    account: Account | None,
    budget: BudgetPolicy,
    seconds: float,
    remains: tuple[int, int | None],
) -> None:
    made: Account | None = None
    for tokens, under, at in charges:
        made = charged(made, tokens, under, later(at))
    assert made == account
    assert left(made, budget, later(seconds)) == remains


def test_an_unused_budget_is_full() -> None:
    assert left_ratio(None, BOTH, NOW) == 1


def test_no_usage_is_too_large_for_the_store() -> None:
    most = 2**63 - 1
    account = charged(charged(None, most, BOTH, NOW), most, BOTH, NOW)
    assert account.used_tokens == most
    usage = Usage(most, account, account)
    assert settled(account, usage, BOTH, NOW).used_tokens == most


def test_the_scarcer_bucket_counts() -> None:
    assert left_ratio(charged(None, 600, BOTH, NOW), BOTH, NOW) == 0.5
    day = BudgetPolicy(name="a", tokens_per_minute=10_000, tokens_per_day=20_000)
    assert left_ratio(charged(None, 5_000, day, NOW), day, NOW) == 0.5
    assert left_ratio(charged(None, 15_000, day, later(0)), day, later(60)) == pytest.approx(0.25, abs=0.001)


def test_thinking_beyond_the_budget_is_paid_back_up_to_one_capacity() -> None:
    account = charged(None, 900, MINUTE, NOW)
    assert left_ratio(account, MINUTE, NOW) == -0.5
    assert left_ratio(account, MINUTE, later(30)) == 0
    much = charged(account, 10**9, MINUTE, NOW)
    assert left_ratio(much, MINUTE, NOW) == -1
    assert much.used_tokens == 10**9 + 900
    assert left_ratio(much, MINUTE, later(60)) == 0


@pytest.mark.parametrize("others", [0, 100])
def test_what_a_burst_has_exceeded_is_forgiven_after_an_outage_too(others: int) -> None:
    """A burst of five times the bucket during an outage is paid back by the refill that follows."""
    seen = charged(None, 0, MINUTE, NOW)
    burst = charged(seen, 3000, MINUTE, NOW + timedelta(seconds=1))
    assert burst.minute_missing == 1200
    then = NOW + timedelta(seconds=200)
    alone = charged(burst, 0, MINUTE, then)
    stored = charged(seen, others, MINUTE, then)
    assert settled(stored, Usage(3000, seen, alone), MINUTE, then).minute_missing <= others


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 5, allow_nan=False)), max_size=40))
def test_steady_usage_within_the_refill_never_empties_a_bucket(steps: list[tuple[int, float]]) -> None:
    """The tokens that are missing equal the usage minus the refill, as long as neither bound is reached."""
    account, now, missing = charged(None, 0, MINUTE, NOW), NOW, 0.0
    for tokens, seconds in steps:
        now += timedelta(seconds=seconds)
        missing = max(0.0, missing + tokens - 10 * seconds)
        account = charged(account, tokens, MINUTE, now)
        assert account.minute_missing == pytest.approx(min(missing, 1200), abs=1e-3)
        missing = min(missing, 1200)
    assert account.used_tokens == sum(tokens for tokens, _ in steps)
