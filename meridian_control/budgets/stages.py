"""Decides how far a thinking budget shortens thinking, from what is left of it. All functions are pure.

As a budget is used up, its stage rises from unshortened to soft_close, lower_cap and floor, and it falls again as the
budget is refilled. Of several budgets that a request counts towards, the one in the highest stage shortens it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import fleet_pb2

from meridian_control.policy.model import Policy, Who, matches_globs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meridian_control.policy.budget_schema import BudgetPolicy
    from meridian_control.policy.schema import SchedulerPolicy

UNSHORTENED = fleet_pb2.BUDGET_STAGE_UNSHORTENED
SOFT_CLOSE, LOWER_CAP = fleet_pb2.BUDGET_STAGE_SOFT_CLOSE, fleet_pb2.BUDGET_STAGE_LOWER_CAP
FLOOR = fleet_pb2.BUDGET_STAGE_FLOOR
# Share of the budget that is left at which each stage begins.
BEGINS = {SOFT_CLOSE: 0.50, LOWER_CAP: 0.25, FLOOR: 0.10}
# A stage ends only once this share more is left than at its beginning, so that stages do not change back and forth.
HYSTERESIS = 0.05


class Shortening(NamedTuple):
    """The budget that shortens a request, its stage, and the request's scheduler values without the budget."""

    budget: str
    stage: int
    without: SchedulerPolicy


def stage_of(left_ratio: float, before: int = UNSHORTENED) -> int:
    """Return the stage of a budget of which the share `left_ratio` is left; before: its stage so far."""
    in_force = (
        stage for stage, share in BEGINS.items() if left_ratio <= share + (HYSTERESIS if before >= stage else 0.0)
    )
    return max(in_force, default=UNSHORTENED)


def budgets_of(policy: Policy, who: Who) -> tuple[BudgetPolicy, ...]:
    """Return the budgets that a request counts towards."""
    return tuple(budget for budget in policy.budget if matches_globs(budget, who))


def shortened(
    own: Policy, budgets: Iterable[BudgetPolicy], stages: Mapping[str, int], *, shadow: bool = False
) -> tuple[Policy, Shortening | None]:
    """Return the policy that holds for a request once the strictest of its budgets has shortened it, and that budget.

    own: the request's policy without budgets. budgets: those that it counts towards. stages: by the budget's name; a
    missing budget is unshortened. shadow: whether to ask the budgets in shadow, which shorten nothing, instead of those
    in force. The budget is None if the request's own values are as strict.
    """
    found = [
        (budget, stage)
        for budget in budgets
        if budget.shadow is shadow and (stage := stages.get(budget.name, UNSHORTENED)) > UNSHORTENED
    ]
    if not found:
        return own, None
    budget, stage = max(found, key=_strictness)
    scheduler = _shortened(own.scheduler, budget, stage)
    if scheduler == own.scheduler:
        return own, None
    return own.model_copy(update={"scheduler": scheduler}), Shortening(budget.name, stage, own.scheduler)


def _strictness(found: tuple[BudgetPolicy, int]) -> tuple[int, int]:
    budget, stage = found
    return stage, -(budget.soft_think_tokens if stage == SOFT_CLOSE else budget.max_think_tokens)


def _shortened(scheduler: SchedulerPolicy, budget: BudgetPolicy, stage: int) -> SchedulerPolicy:
    """Return the scheduler values in a stage; no value falls below the floor, nor rises."""
    floor, cap, soft = max(1, scheduler.min_think_tokens), scheduler.max_think_tokens, budget.soft_think_tokens
    if stage >= LOWER_CAP:
        cap = min(cap, max(floor, budget.max_think_tokens if stage == LOWER_CAP else floor))
        soft = cap // 2
    soft = max(floor, soft)
    if scheduler.soft_think_tokens:
        soft = min(scheduler.soft_think_tokens, soft)
    return scheduler.model_copy(update={"soft_think_tokens": soft, "max_think_tokens": cap})
