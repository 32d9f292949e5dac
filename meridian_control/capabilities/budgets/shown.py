"""Shows budgets in the decision log."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meridian.v1 import fleet_pb2

    from meridian_control.journal.records import Compared
    from meridian_control.policy.model import Policy


class BudgetDetail(NamedTuple):
    """What the decision log shows of a budget that has shortened a request: its name, and the request's stage."""

    name: str
    stage: int

    @property
    def ref(self) -> str:
        return ""

    def compared(self, policy: Policy) -> tuple[Compared, ...]:
        return ()

    def fill(self, told: fleet_pb2.LoggedDecision) -> None:
        told.budget, told.budget_stage = self.name, self.stage  # type: ignore[assignment]
