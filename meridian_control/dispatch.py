"""Order and share: answers first, and how much thinking joins a step. Pure functions of policy, table and step time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.requests import OUTPUT, THINK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.policy import SchedulerPolicy
    from meridian_control.requests import RequestTable

# Rank by phase, lower is more urgent: prompt 1, think 2, output 0 (index is meridian.v1.Phase).
RANK_BY_PHASE = np.array([1, 1, 2, 0], np.int64)
# A limit on thinking is lifted again only once steps are this far below the budget.
RELEASE = 0.7


@dataclass(frozen=True, slots=True)
class Share:
    """How thinking joins steps while answers stream. think_per_step None: no limit."""

    think_per_step: int | None = None
    max_skip_steps: int = 0


def changed_ranks(table: RequestTable) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Slots whose rank differs from what the agent was told, and their new ranks; updates the table."""
    rank = RANK_BY_PHASE[np.minimum(table.phase, OUTPUT)]
    slots = np.flatnonzero(table.live & (rank != table.rank))
    table.rank[slots] = rank[slots]
    return slots, rank[slots]


def share(policy: SchedulerPolicy, table: RequestTable, step_time_ms: float, limited: bool) -> Share:
    """Limit thinking to a multiple of the answers once steps exceed the answers' budget.

    step_time_ms: smoothed step time. limited: whether a limit is in force already.
    """
    running = table.live & ~table.preempted
    answering = int(np.count_nonzero(running & (table.phase == OUTPUT)))
    thinking = int(np.count_nonzero(running & (table.phase == THINK)))
    budget = policy.output_tpot_budget_ms * (RELEASE if limited else 1.0)
    allowed = math.ceil(policy.think_batch_multiplier * answering)
    if not answering or thinking <= allowed or step_time_ms <= budget:
        return Share()
    return Share(allowed, max(0, int(policy.think_tpot_budget_ms / step_time_ms) - 1))
