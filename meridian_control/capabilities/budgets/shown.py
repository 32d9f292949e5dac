"""Shows budgets in the decision log and on the status page. All functions are pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meridian_control.common.enum_names import stage_name
from meridian_control.engine.shortening import FLOOR, UNSHORTENED
from meridian_control.journal.records import Detail

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meridian.v1 import fleet_pb2

    from meridian_control.capabilities.budgets.charges import Account


@dataclass(frozen=True, slots=True)
class BudgetDetail(Detail):
    """What the decision log shows of a budget that has shortened a request: its name, and the request's stage."""

    name: str
    stage: int

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
        "left_ratio": round(budget.left_ratio, 4),
        "of_minute": _left(budget, "minute_left_tokens", entry.burst_tokens or entry.tokens_per_minute),
        "of_day": _left(budget, "day_left_tokens", entry.tokens_per_day),
        "used_tokens": budget.used_tokens,
    }


def _left(budget: fleet_pb2.Budget, field: Literal["minute_left_tokens", "day_left_tokens"], most: int) -> str:
    """Return what is left of a limit before the most that the limit saves up; empty without the limit."""
    return f"{getattr(budget, field):,.0f} of {most:,}" if budget.HasField(field) else ""


def attention(budgets: Iterable[fleet_pb2.Budget]) -> list[tuple[str, str]]:
    """Return level and sentence of each budget that shortens thinking now."""
    acting = [entry for entry in map(row, budgets) if entry["level"]]
    return [
        (
            entry["level"],
            f"Budget {entry['name']} shortens thinking: {entry['stage']}, {100 * entry['left_ratio']:.0f} % left.",
        )
        for entry in acting
    ]


def tenant_rows(counted: Mapping[Account, int]) -> list[dict[str, Any]]:
    """Return the thinking tokens of each tenant and model on this replica, most tokens first. counted: tokens by
    account."""
    whole = sum(counted.values())
    ordered = sorted(counted.items(), key=lambda entry: (-entry[1], entry[0]))
    return [
        {"tenant": tenant, "model": model, "think_tokens": tokens, "share": tokens / whole if whole else 0.0}
        for (tenant, model), tokens in ordered
    ]
