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
# The store keeps used tokens as 64-bit integers, which only a broken or hostile agent fills.
MAX_USED_TOKENS = 2**63 - 1
# Seconds by which an account's time may be ahead of the clock that reads it.
MOST_AHEAD_S = 60.0


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


class Usage(NamedTuple):
    """The thinking tokens that a replica has counted since it last read an account. seen: the account as the replica
    read it. alone: the same account, moved on by the replica's own usage and all of the refill. The times of both are
    of the replica's clock."""

    tokens: int
    seen: Account
    alone: Account


def minute_limit(budget: BudgetPolicy) -> Bucket:
    capacity = budget.burst_tokens or budget.tokens_per_minute
    return Bucket(float(capacity), budget.tokens_per_minute / MINUTE_S)


def day_limit(budget: BudgetPolicy) -> Bucket:
    return Bucket(float(budget.tokens_per_day), budget.tokens_per_day / DAY_S)


def full(now: datetime) -> Account:
    """Return the account of a budget that has not been used."""
    return Account(0, 0.0, 0.0, now)


def charged(before: Account | None, tokens: int, budget: BudgetPolicy, now: datetime) -> Account:
    """Return the account after `tokens` more thinking tokens, which came evenly since the account's time.

    before: None if the budget has not been used. tokens: may be negative, because engines take back rejected tokens.
    An account's time does not go back, so that no second is refilled twice; but an account that is more than
    MOST_AHEAD_S ahead of `now` comes from a clock that was wrong, and goes on from `now`.
    """
    old = before or full(now)
    since_s = (now - old.updated_at).total_seconds()
    updated_at = old.updated_at if -MOST_AHEAD_S <= since_s < 0 else now
    minute, day = (
        _bounded(missing + tokens - limit.tokens_per_s * max(0.0, since_s), limit)
        for missing, limit in _buckets(old, budget)
    )
    return Account(_counted(old.used_tokens + tokens), minute, day, updated_at)


def settled(before: Account | None, usage: Usage, budget: BudgetPolicy, now: datetime) -> Account:
    """Return the stored account after a replica's usage, which may be older than what other replicas have stored.

    The refill of the time in which the tokens came pays for them first, as far as neither the replica's own course nor
    the usage of the others needed it. No bucket misses more than in the replica's own course, which has forgiven what
    exceeded MOST_MISSING, and the usage of the others together. So tokens count the same whether they are stored every
    second or after an outage of the store.
    """
    old = charged(before, 0, budget, now)
    seen, alone = usage.seen, usage.alone
    took_s = max(0.0, (alone.updated_at - seen.updated_at).total_seconds())
    others = old.used_tokens - seen.used_tokens
    buckets = []
    for (missing, limit), (first, _), (last, _) in zip(
        _buckets(old, budget), _buckets(seen, budget), _buckets(alone, budget), strict=True
    ):
        refill = limit.tokens_per_s * took_s
        # Usage adds to the missing tokens, and the refill that is needed takes from them; the rest was not needed.
        unneeded = missing - first - others + refill
        absorbed = usage.tokens - (last - max(0.0, first - refill))
        paid = max(0.0, min(unneeded, absorbed, usage.tokens))
        buckets.append(_bounded(min(missing + usage.tokens - paid, last + max(0, others)), limit))
    minute, day = buckets
    return Account(_counted(old.used_tokens + usage.tokens), minute, day, old.updated_at)


def _counted(tokens: int) -> int:
    """Return a number of used tokens that the store can keep, whatever engines have reported."""
    return min(max(0, tokens), MAX_USED_TOKENS)


def left(account: Account | None, budget: BudgetPolicy, now: datetime) -> tuple[float | None, float | None]:
    """Return the tokens that are left in the bucket for the minute and in that for the day, negative if thinking has
    exceeded the budget; None for a limit that the budget does not have."""
    then = _buckets(charged(account, 0, budget, now), budget)
    minute, day = (limit.capacity_tokens - missing if limit.capacity_tokens else None for missing, limit in then)
    return minute, day


def left_ratio(account: Account | None, budget: BudgetPolicy, now: datetime) -> float:
    """Return what is left of the scarcer bucket, as a share of its capacity: 1 if it is full, below 0 if thinking has
    exceeded the budget."""
    limits = minute_limit(budget), day_limit(budget)
    tokens = left(account, budget, now)
    shares = (there / limit.capacity_tokens for there, limit in zip(tokens, limits, strict=True) if there is not None)
    return min(shares, default=1.0)


def _buckets(account: Account, budget: BudgetPolicy) -> tuple[tuple[float, Bucket], tuple[float, Bucket]]:
    """Return what is missing from each bucket, beside the bucket."""
    return (account.minute_missing, minute_limit(budget)), (account.day_missing, day_limit(budget))


def _bounded(missing: float, limit: Bucket) -> float:
    return min(max(0.0, missing), MOST_MISSING * limit.capacity_tokens)
