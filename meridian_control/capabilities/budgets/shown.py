"""Shows budgets in the decision log and on the status page. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_control.common.enum_names import stage_name
from meridian_control.common.plain_data import percent
from meridian_control.engine.shortening import FLOOR, UNSHORTENED

if TYPE_CHECKING:
    from meridian.v1 import fleet_pb2

    from meridian_control.journal.records import Compared
    from meridian_control.policy.model import Policy

# Largest number of budgets on the page.
MAX_ROWS = 256


class BudgetDetail(NamedTuple):
    """What the decision log shows of a budget that has shortened a request: its name, and the request's stage."""

    name: str
    stage: int

    @property
    def ref(self) -> str:
        return ""

    def compared(self, policy: Policy) -> tuple[Compared, ...]:
        return ()

    def fill(self, message: fleet_pb2.LoggedDecision) -> None:
        message.budget, message.budget_stage = self.name, self.stage  # type: ignore[assignment]


def row(budget: fleet_pb2.Budget) -> dict[str, Any]:
    """Return a thinking budget's row; `level` says whether the budget shortens thinking now."""
    entry = budget.policy
    globs = {"model": entry.model, "tenant": entry.tenant, "class": entry.slo_class, "effort": entry.effort}
    acts = budget.stage > UNSHORTENED and not entry.shadow
    return {
        "name": entry.name,
        "requests": ", ".join(f"{name} {glob}" for name, glob in globs.items() if glob) or "every request",
        "stage": stage_name(budget.stage).replace("_", " ") + ", in shadow" * entry.shadow,
        "level": ("bad" if budget.stage == FLOOR else "warn") if acts else "",
        "left": percent(budget.left_ratio),
        "tokens_per_minute": entry.tokens_per_minute,
        "tokens_per_day": entry.tokens_per_day,
        "used_tokens": budget.used_tokens,
    }
