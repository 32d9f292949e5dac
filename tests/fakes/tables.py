"""Request tables in a given state, for tests of the rules that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.engine.request_table import OUTPUT, THINK, RequestTable
from meridian_control.engine.shortening import UNSHORTENED, Staged
from meridian_control.engine.signals import add_eat_samples, rpdi
from meridian_control.policy.model import Policy
from meridian_control.policy.shortening_schema import BudgetPolicy

WINDOW = 4


def policy(**sections: Any) -> Policy:
    """Return the default policy with some fields changed: policy(entropy={"ema_alpha": 0.5})."""
    return Policy.model_validate(sections)


def table(*rows: dict[str, Any], window: int = WINDOW) -> RequestTable:
    """Return a table with one request per row, in slots 0, 1, ...; each row names columns and their values."""
    made = RequestTable(window, capacity=2)
    for slot, row in enumerate(rows):
        made.open(agent_pb2.RequestOpened(slot=slot, request_id=f"r{slot}", phase=row.get("phase", THINK)))
        made.put(slot, **row)
    # A sentence end keeps the RPDI of the request at that point.
    made.boundary_rpdi[:, 0] = np.where(made.boundary_now, rpdi(made), made.boundary_rpdi[:, 0])
    return made


def add_sample(made: RequestTable, slot: int, eat_nats: float, ema_alpha: float, think_tokens: int) -> None:
    """Add one EAT sample of one request."""
    add_eat_samples(made, np.array([slot]), np.array([eat_nats]), ema_alpha, np.array([think_tokens]))


def in_stages(budgets: Iterable[BudgetPolicy], stages: Mapping[str, int]) -> list[Staged]:
    """Return the budgets that are in a stage above unshortened. stages: by the budget's name; a missing budget is
    unshortened."""
    by_budget = ((budget, stages.get(budget.name, UNSHORTENED)) for budget in budgets)
    return [Staged("budget", budget, stage) for budget, stage in by_budget if stage > UNSHORTENED]


def thinking(**columns: Any) -> dict[str, Any]:
    return {"phase": THINK, **columns}


def answering(**columns: Any) -> dict[str, Any]:
    return {"phase": OUTPUT, **columns}


def tokens(rows: Iterable[Sequence[Any]]) -> agent_pb2.TokenColumns:
    """Return columns from rows of (slot, phase, flags, entropy[, rank[, log-probability[, likeliest one]]])."""
    columns = agent_pb2.TokenColumns()
    for slot, phase, flags, entropy, *rest in rows:
        columns.slot.append(slot)
        columns.phase.append(phase)
        columns.flags.append(flags)
        columns.entropy_nats.append(entropy)
        columns.end_rank.append(rest[0] if rest else 0)
        columns.end_logprob_nats.append(rest[1] if len(rest) > 1 else float("nan"))
        if len(rest) > 2:
            columns.top_logprob_nats.append(rest[2])
    return columns
