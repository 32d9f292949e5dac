"""The arms of the scheduling benchmark, and what their budgets are made from. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.scheduling_runs import QUIET, STOCK, Arm

if TYPE_CHECKING:
    from tests.bench.scheduling_runs import Costs

STOCK_FCFS, STOCK_PRIORITY, PLAIN = "stock FCFS", "stock priority", "vLLM without the agent"
STRATEGIES = ("reasoning_first", "output_first", "deadline")
DEFAULT = "output_first"
# Where the answers' budget lies on the line from the step time of few sequences (0) to that of a full batch (1).
POSITION = 2.0
FRONTIER = (0.0, 0.5, 1.0, 3.0)
THINK_BUDGETS = 4.0
# Thinking longer than this is demoted by reasoning_first: twice the median here.
LONG_THINK_TOKENS = 200
MIN_PREFILL_TOKENS = 16


def budget_ms(costs: Costs, position: float) -> float:
    return costs.few_ms + position * (costs.full_ms - costs.few_ms)


def min_prefill_tokens(costs: Costs, budget: float) -> int:
    """As many prompt tokens as take half the budget."""
    return max(MIN_PREFILL_TOKENS, int(budget / 2 / costs.prompt_token_ms))


def strategy(name: str, costs: Costs, position: float, label: str = "") -> Arm:
    """A strategy with its budgets; everything else is the policy's default, entropy rules are off."""
    budget = budget_ms(costs, position)
    scheduler = {
        "strategy": name,
        "output_tpot_budget_ms": round(budget, 2),
        "think_tpot_budget_ms": round(THINK_BUDGETS * budget, 2),
        "min_prefill_tokens": min_prefill_tokens(costs, budget),
        "long_think_tokens": LONG_THINK_TOKENS,
    }
    return Arm(label or name, {**QUIET, "scheduler": scheduler})


def main(costs: Costs, position: float) -> list[Arm]:
    """The arms that need vLLM's default policy."""
    return [Arm(STOCK_FCFS, STOCK), *(strategy(name, costs, position) for name in STRATEGIES)]


def frontier(costs: Costs, position: float) -> list[Arm]:
    """The default strategy with other budgets."""
    return [strategy(DEFAULT, costs, p, f"{DEFAULT} at {p:g}") for p in FRONTIER if p != position]
