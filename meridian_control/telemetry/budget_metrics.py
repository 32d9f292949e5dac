"""The metrics of thinking budgets: their entries in the catalogue, and their values.

The series are bounded, because each label value is the name of a budget in the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.metric_entry import counter, gauge
from meridian_control.engine.shortening import UNSHORTENED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.fleet.fleet import Fleet

    Values = list[tuple[tuple[str, ...], float]]

BUDGET = ("budget",)

BUDGETS = (
    counter(
        "meridian_budget_think_tokens_total",
        BUDGET,
        "Thinking tokens that this replica has counted for the budget; the sum over replicas is that of the fleet.",
        "Compare its rate with the budget's `tokens_per_minute`; above it for long, thinking is shortened.",
    ),
    gauge(
        "meridian_budget_left_ratio",
        BUDGET,
        "What is left of the budget's scarcer limit, as a share of what it can save up; below 0 thinking has exceeded "
        "the budget.",
        "Below 0.5: thinking is shortened, unless the budget is in shadow; `meridianctl budgets` shows the stage.",
    ),
    gauge(
        "meridian_budget_stage",
        BUDGET,
        "Stage of the budget: 1 unshortened, 2 soft_close, 3 lower_cap, 4 floor.",
        "4 for long: raise the budget, or find the client that uses it up.",
    ),
    gauge(
        "meridian_budget_unsaved_tokens",
        (),
        "Thinking tokens, summed over all budgets, that this replica has counted since it last reached the store.",
        "Grows: the store does not answer, and a crash of the replica would lose this usage.",
    ),
)


def budgets(fleet: Fleet) -> Iterator[tuple[str, Values]]:
    """Yield each metric with its labels and values, for the budgets of the policies in force."""
    known, now = fleet.budgets, fleet.clock()
    counted: Values = [((name,), known.counted[name]) for name in known.budgets]
    yield "meridian_budget_think_tokens_total", counted
    yield "meridian_budget_left_ratio", [((name,), known.left_ratio(b, now)) for name, b in known.budgets.items()]
    yield "meridian_budget_stage", [((name,), known.stages.get(name, UNSHORTENED)) for name in known.budgets]
    yield "meridian_budget_unsaved_tokens", [((), known.unsaved_tokens)]
