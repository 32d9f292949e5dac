"""The arithmetic of a thinking budget: one token bucket for the minute and one for the day.

A bucket holds at most its capacity, and regains tokens evenly. An account keeps the tokens that are missing from full
buckets, so that an account without usage is full whatever the limits are, and a change of the limits takes effect at
once. All functions are pure; times are passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

    from meridian_control.policy.shortening_schema import BudgetPolicy

MINUTE_S, DAY_S = 60.0, 86_400.0
# A bucket misses at most this many times its capacity. Thinking that exceeds an empty budget is paid back from later
# refills, but no load, however large, keeps a bucket empty for longer than it takes to refill it once.
MOST_MISSING = 2.0


class Bucket(NamedTuple):
    """A bucket's capacity in tokens, and its refill in tokens per second; both are 0 if the budget has no such
    limit."""

    capacity_tokens: float
    tokens_per_s: float


class Account(NamedTuple):
    """The usage of a budget. used_tokens: thinking tokens since the budget was first used. minute_missing and
    day_missing: tokens that were missing from each bucket at the time `updated_at`."""

    used_tokens: int
    minute_missing: float
    day_missing: float
    updated_at: datetime


def minute_limit(budget: BudgetPolicy) -> Bucket:
    capacity = budget.burst_tokens or budget.tokens_per_minute
    return Bucket(float(capacity), budget.tokens_per_minute / MINUTE_S)


def day_limit(budget: BudgetPolicy) -> Bucket:
    return Bucket(float(budget.tokens_per_day), budget.tokens_per_day / DAY_S)


def charged(before: Account | None, tokens: int, budget: BudgetPolicy, now: datetime) -> Account:
    """Return the account after `tokens` more thinking tokens.

    before: None if the budget has not been used. tokens: may be negative, because engines take back rejected tokens.
    The replicas' clocks may differ: an account's time never goes back, so that no second is refilled twice.
    """
    old = before or Account(0, 0.0, 0.0, now)
    updated_at = max(old.updated_at, now)
    elapsed_s = (updated_at - old.updated_at).total_seconds()
    minute = _missing(old.minute_missing, tokens, minute_limit(budget), elapsed_s)
    day = _missing(old.day_missing, tokens, day_limit(budget), elapsed_s)
    return Account(max(0, old.used_tokens + tokens), minute, day, updated_at)


def left(account: Account | None, budget: BudgetPolicy, now: datetime) -> tuple[float | None, float | None]:
    """Return the tokens that are left in the bucket for the minute and in that for the day, negative if thinking has
    exceeded the budget; None for a limit that the budget does not have."""
    then = charged(account, 0, budget, now)
    found = (
        (minute_limit(budget), then.minute_missing),
        (day_limit(budget), then.day_missing),
    )
    minute, day = (limit.capacity_tokens - missing if limit.capacity_tokens else None for limit, missing in found)
    return minute, day


def left_ratio(account: Account | None, budget: BudgetPolicy, now: datetime) -> float:
    """Return what is left of the scarcer bucket, as a share of its capacity: 1 if it is full, below 0 if thinking has
    exceeded the budget."""
    limits = minute_limit(budget), day_limit(budget)
    tokens = left(account, budget, now)
    shares = (there / limit.capacity_tokens for there, limit in zip(tokens, limits, strict=True) if there is not None)
    return min(shares, default=1.0)


def _missing(before: float, tokens: int, limit: Bucket, elapsed_s: float) -> float:
    refilled = max(0.0, before - limit.tokens_per_s * elapsed_s)
    return min(max(0.0, refilled + tokens), MOST_MISSING * limit.capacity_tokens)
