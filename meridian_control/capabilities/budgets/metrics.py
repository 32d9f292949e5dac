"""The metrics of thinking budgets: their entries in the catalogue, and their values.

The series of budgets are bounded, because each label value is the name of a budget in the policy, and those of tenants
by `TenantUsage`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.metric_entry import counter, gauge
from meridian_control.engine.shortening import UNSHORTENED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from meridian_control.capabilities.budgets.charges import TenantUsage
    from meridian_control.capabilities.budgets.fleet_budgets import FleetBudgets
    from meridian_control.fleet.part import Metric

BUDGET = ("budget",)

ENTRIES = (
    counter(
        "meridian_budget_think_tokens_total",
        BUDGET,
        "Thinking tokens that this replica has counted for the budget; the sum over replicas is that of the fleet.",
        "Compare its rate with the budget's `tokens_per_minute`.",
    ),
    gauge(
        "meridian_budget_left_ratio",
        BUDGET,
        "What is left of the budget's scarcer limit, as a share of what it can save up; below 0 it is exceeded.",
        "Below 0.5: thinking is shortened, unless the budget is in shadow.",
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
        "Grows: see the alert MeridianBudgetsUnsaved.",
    ),
    counter(
        "meridian_tenant_think_tokens_total",
        ("tenant", "model"),
        "Thinking tokens that this replica has counted for the tenant; pairs after the first 1000 under `(other)`.",
        "Bill by it. `(other)` grows: let a gateway name the tenants (`MERIDIAN_TENANT_FROM`).",
    ),
)


def values(budgets: FleetBudgets, tenants: TenantUsage, now: datetime) -> Iterator[Metric]:
    """Yield each metric with its labels and values, for the budgets of the policies in force."""
    known = budgets.budgets
    yield "meridian_budget_think_tokens_total", [((name,), budgets.counted[name]) for name in known]
    yield "meridian_budget_left_ratio", [((name,), budgets.left_ratio(b, now)) for name, b in known.items()]
    yield "meridian_budget_stage", [((name,), budgets.stages.get(name, UNSHORTENED)) for name in known]
    yield "meridian_budget_unsaved_tokens", [((), budgets.unsaved_tokens)]
    yield "meridian_tenant_think_tokens_total", tenants.counted.items()
