"""The arms of the scheduling benchmark, and the measured costs from which their budgets are computed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.bench.scheduling_runs import QUIET, STOCK, Arm

if TYPE_CHECKING:
    from tests.bench.scheduling_runs import Costs

STOCK_FCFS, STOCK_PRIORITY, PLAIN = "stock FCFS", "stock priority", "vLLM without the agent"
STRATEGIES = ("reasoning_first", "output_first", "deadline")
DEFAULT = "output_first"
# Positions of the explicit answer budgets on the line from the step time of few sequences (0) to that of a full batch
# (1) and beyond.
FRONTIER = (0.0, 0.5, 1.0, 2.0, 3.0)
# Position of the reader's pace on the same line of step times; `reasoning_first` paces answers at it.
READER = 2.0
THINK_BUDGETS = 4.0
# `reasoning_first` demotes a request that thinks longer than this, which is twice the median of the benchmark's
# requests.
LONG_THINK_TOKENS = 200
MIN_PREFILL_TOKENS = 16


def budget_ms(costs: Costs, position: float) -> float:
    return costs.few_ms + position * (costs.full_ms - costs.few_ms)


def strategy(name: str, costs: Costs) -> Arm:
    """Return a strategy with the policy's defaults and budgets that follow the engine; entropy rules are off."""
    scheduler: dict[str, Any] = {"strategy": name}
    if name == "reasoning_first":
        reading_ms = round(budget_ms(costs, READER), 2)
        scheduler |= {"output_tpot_budget_ms": reading_ms, "long_think_tokens": LONG_THINK_TOKENS}
    return Arm(name, {**QUIET, "scheduler": scheduler})


def explicit(costs: Costs, position: float) -> Arm:
    """Return the default strategy with an explicit budget, of which prompts may take at least half."""
    budget = budget_ms(costs, position)
    scheduler = {
        "strategy": DEFAULT,
        "output_tpot_budget_ms": round(budget, 2),
        "think_tpot_budget_ms": round(THINK_BUDGETS * budget, 2),
        "min_prefill_tokens": max(MIN_PREFILL_TOKENS, int(budget / 2 / costs.prompt_token_ms)),
    }
    return Arm(f"{DEFAULT} at {position:g}", {**QUIET, "scheduler": scheduler})


def main(costs: Costs) -> list[Arm]:
    """Return the arms that need vLLM's default scheduling policy."""
    return [Arm(STOCK_FCFS, STOCK), *(strategy(name, costs) for name in STRATEGIES)]


def frontier(costs: Costs) -> list[Arm]:
    return [explicit(costs, position) for position in FRONTIER]
