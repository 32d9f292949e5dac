"""A budget holds under more load than it allows: a made-up fleet whose requests think until their cap or their end."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from meridian_control.capabilities.budgets.fleet_budgets import stage_of
from meridian_control.capabilities.budgets.token_bucket import charged, left_ratio
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED, shortened
from tests.fakes.tables import in_stages, policy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
RATE, BURST, SPEED = 1000, 60_000, 50
POLICY = policy(
    scheduler={"min_think_tokens": 200},
    budget=[
        {
            "name": "b",
            "tokens_per_minute": RATE * 60,
            "burst_tokens": BURST,
            "soft_think_tokens": 1200,
            "max_think_tokens": 600,
            "min_think_tokens": 200,
            "shadow": False,
        }
    ],
)


def course(load: float, seconds: int, seed: int) -> tuple[int, list[int]]:
    """Return the tokens that were used and the stages, second by second.

    load: thinking per second that requests would do without a budget, as a multiple of the refill. A request thinks
    2,000 tokens on average, at 50 tokens a second. The stage reaches the engines a second later.
    """
    rng, (budget,) = random.Random(seed), POLICY.budget
    account = charged(None, 0, budget, NOW)
    stage: int = UNSHORTENED
    told = stage
    thinking: list[tuple[int, int]] = []
    stages: list[int] = []
    for second in range(seconds):
        own, _ = shortened(POLICY, in_stages([budget], {"b": told}))
        # Every request past its soft budget finds a sentence end within a second.
        limit = min(own.scheduler.max_think_tokens, own.scheduler.soft_think_tokens or own.scheduler.max_think_tokens)
        arrivals = sum(rng.random() < load * RATE / 2000 / 20 for _ in range(20))
        thinking += [(0, round(rng.expovariate(1 / 2000))) for _ in range(arrivals)]
        thinking = [(done + SPEED, wanted) for done, wanted in thinking if done < min(wanted, limit)]
        now = NOW + timedelta(seconds=second)
        account = charged(account, SPEED * len(thinking), budget, now)
        told, stage = stage, stage_of(left_ratio(account, budget, now), stage)
        stages.append(stage)
    return account.used_tokens, stages


@pytest.mark.parametrize("load", [1.5, 3.0, 9.0])
def test_requests_use_what_the_budget_allows_and_little_more(load: float) -> None:
    seconds = 1800
    used, stages = course(load, seconds, seed=1)
    allowed = BURST + RATE * seconds
    assert used <= 1.02 * allowed
    assert used >= 0.95 * allowed, "what the budget allows is used"
    assert max(stages) == {1.5: SOFT_CLOSE, 3.0: LOWER_CAP, 9.0: FLOOR}[load]


def test_less_load_than_the_refill_is_never_shortened() -> None:
    _, stages = course(0.5, 1800, seed=2)
    assert set(stages) == {UNSHORTENED}
