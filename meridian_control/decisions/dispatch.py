"""Order and share: who is most urgent, and what joins a step. Pure functions of policy, table, time and step cost.

Ranks: lower is more urgent; vLLM schedules in their order and preempts from their end. Between plans the agent ranks by
phase alone, on the same scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decisions.request_table import OUTPUT, THINK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.policy.schema import SchedulerPolicy

# Ranks by phase; within thinking, the more a request has computed the later it is preempted, a rank for each doubling.
OUTPUT_RANK, PROMPT_RANK = agent_pb2.PHASE_RANK_UNSPECIFIED, agent_pb2.PHASE_RANK_PROMPT
THINK_RANK, SUNK_RANKS = agent_pb2.PHASE_RANK_THINK_FIRST, agent_pb2.PHASE_RANK_THINK - agent_pb2.PHASE_RANK_THINK_FIRST
SUNK_TOKENS = 64
RANK_BY_PHASE = np.array([PROMPT_RANK, PROMPT_RANK, THINK_RANK + SUNK_RANKS, OUTPUT_RANK], np.int64)
# Deadlines further away than this, in milliseconds, are all the same.
MAX_SLACK_MS = 511
# A limit is told anew only once it has moved by this share of itself.
DEADBAND = 0.1
# Thinking is left out only where that is expected to make a step this much shorter.
MIN_GAIN = 0.05
# More prompt tokens than any engine computes in a step: no limit.
MAX_PREFILL_TOKENS = 1 << 20
# Prompt tokens that are nearly free.
NEXT_TO_NOTHING_MS = 1.0
# Steps before the cost of a step is known well enough to be used.
WARM_STEPS = 32
# Budgets that the policy leaves to the engine: a step with prompts takes at most so many times what one without takes,
# thinking gets a token in so many budgets of an answer, and paced answers go at a reader's pace.
STRETCH, THINK_BUDGETS, READING_MS = 1.75, 4.0, 100.0
# An answer's budget before the cost of a step is known.
USUAL_MS = 20.0
# Prompt tokens that may join a step at least, where the policy leaves it to the engine: so many times those of late.
HEADROOM, LEAST_PREFILL_TOKENS = 2.0, 16
# More sequences than any engine runs, and more steps than any sequence is left out of.
MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences and tokens that may join a step while answers stream; None is no limit.

    max_skip_steps: steps in a row that a sequence of a limited phase may be left out at most.
    """

    think_per_step: int | None = None
    output_per_step: int | None = None
    max_skip_steps: int = 0
    prefill_tokens_per_step: int | None = None


@dataclass(frozen=True, slots=True)
class Budgets:
    """Milliseconds from one token to the next."""

    output_ms: float
    think_ms: float


class StepCost:
    """The duration of a step: a + b * sequences + c * prefill tokens, in milliseconds.

    Recursive least squares with exponential forgetting (weight LAMBDA per step). Coefficients are never taken below 0.
    prefill_tokens: mean of late, per step.
    """

    LAMBDA = 0.995
    # Brings the three terms to one scale.
    SCALE = np.array([1.0, 1 / 32, 1 / 512])

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0.0
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * 1e3

    def add(self, sequences: int, prefill_tokens: int, step_time_ms: float) -> None:
        """One step's measurement."""
        x = np.array([1.0, sequences, prefill_tokens]) * self.SCALE
        gain = self._covariance @ x
        gain /= self.LAMBDA + x @ gain
        self._weights += gain * (step_time_ms - x @ self._weights)
        covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / self.LAMBDA
        # Directions in which nothing varies would grow without bound.
        if np.trace(covariance) < 1e6:
            self._covariance = (covariance + covariance.T) / 2
        self.steps += 1
        self.prefill_tokens += (1 - self.LAMBDA) * (prefill_tokens - self.prefill_tokens)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """a, b, c in milliseconds, per sequence and per token."""
        a, b, c = np.maximum(self._weights * self.SCALE, 0.0)
        return float(a), float(b), float(c)


def budgets(policy: SchedulerPolicy, table: RequestTable, cost: StepCost) -> Budgets:
    """The policy's budgets; where it names none, what suits the engine's own steps."""
    output_ms = policy.output_tpot_budget_ms
    if not output_ms and policy.strategy == "reasoning_first":
        output_ms = READING_MS
    elif not output_ms:
        a, b, _ = cost.coefficients
        running = int(np.count_nonzero(table.live & ~table.preempted & (table.phase >= THINK)))
        output_ms = STRETCH * (a + b * running) if cost.steps >= WARM_STEPS else USUAL_MS
    return Budgets(output_ms, policy.think_tpot_budget_ms or THINK_BUDGETS * output_ms)


def ranks(policy: SchedulerPolicy, table: RequestTable, budget: Budgets, now_ms: float) -> NDArray[np.int64]:
    """Every slot's rank, [slots]. now_ms: time on the table's clock."""
    phase = np.minimum(table.phase, OUTPUT)
    total = table.prompt_tokens + table.think_tokens + table.output_tokens
    if policy.strategy == "deadline":
        allowed = np.where(phase == OUTPUT, budget.output_ms, budget.think_ms)
        slack = np.clip(table.token_ms + allowed - now_ms, 0, MAX_SLACK_MS).astype(np.int64)
        first_answer_token = (phase == OUTPUT) & (table.output_tokens == 0)
        by_deadline: NDArray[np.int64] = np.where(first_answer_token, 0, 1 + slack)
        return by_deadline
    sunk = np.minimum(np.log2(np.maximum(total / SUNK_TOKENS, 1.0)), SUNK_RANKS).astype(np.int64)
    rank: NDArray[np.int64] = RANK_BY_PHASE[phase] - np.where(phase == THINK, sunk, 0)
    if policy.strategy == "reasoning_first":
        demoted = (phase == THINK) & (table.think_tokens >= policy.long_think_tokens)
        rank = np.where((phase == THINK) & ~demoted, OUTPUT_RANK, rank)
        rank = np.where(phase == OUTPUT, PROMPT_RANK + 1, rank)
    return rank


def changed_ranks(
    policy: SchedulerPolicy, table: RequestTable, budget: Budgets, now_ms: float
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Slots whose rank differs from what the agent was told, and their new ranks, [changed]."""
    if policy.strategy == "stock":
        return np.zeros(0, np.intp), np.zeros(0, np.int64)
    rank = ranks(policy, table, budget, now_ms)
    slots = np.flatnonzero(table.live & (rank != table.rank))
    return slots, rank[slots]


def share(policy: SchedulerPolicy, table: RequestTable, budget: Budgets, cost: StepCost, in_force: Share) -> Share:
    """The share of a step: as much as the answers' budget leaves room for, by the measured cost of steps.

    No limit where it would not make steps shorter. While no answer streams it is the share for a single one: the agent
    limits nothing until that one is there, and the step of its first token is then short too. in_force: the share told
    last.
    """
    running = table.live & ~table.preempted
    answering = max(1, int(np.count_nonzero(running & (table.phase == OUTPUT))))
    thinking = int(np.count_nonzero(running & (table.phase == THINK)))
    if policy.strategy == "stock" or cost.steps < WARM_STEPS:
        return Share()
    a, b, c = cost.coefficients
    if policy.strategy == "reasoning_first":
        return _paced_answers(answering, thinking, a + b * (answering + thinking), budget.output_ms)
    joining, limit, max_skip = thinking, None, 0
    whole = a + b * (answering + thinking)
    if thinking and whole > budget.output_ms:
        room = _whole((budget.output_ms - a) / b) - answering if b else thinking
        if policy.strategy == "output_first":
            room = min(room, -_whole(-policy.think_batch_multiplier * answering))
        # As many as it takes for each to have its token within its own budget.
        fair = -_whole(-thinking * max(budget.output_ms, a + b * answering) / budget.think_ms)
        wanted = min(thinking, max(room, fair, 1))
        if a + b * (answering + wanted) <= (1 - MIN_GAIN) * whole:
            joining = limit = _settled(wanted, in_force.think_per_step)
            max_skip = max(0, _whole(budget.think_ms / (a + b * (answering + joining))) - 1)
    spare = budget.output_ms - a - b * (answering + joining)
    prefill = None
    if c * MAX_PREFILL_TOKENS > max(spare, NEXT_TO_NOTHING_MS):
        least = policy.min_prefill_tokens or max(LEAST_PREFILL_TOKENS, -_whole(-HEADROOM * cost.prefill_tokens))
        prefill = _settled(max(least, math.floor(spare / c)), in_force.prefill_tokens_per_step)
    return Share(limit, None, max_skip, prefill)


def _paced_answers(answering: int, thinking: int, whole_ms: float, budget_ms: float) -> Share:
    """Each answer gets a token per budget, in turns, and thinking all the rest."""
    turns = _whole(budget_ms / whole_ms) if whole_ms else 1
    if not thinking or turns < 2:
        return Share()
    return Share(output_per_step=math.ceil(answering / turns), max_skip_steps=turns - 1)


def _whole(number: float) -> int:
    """The integer below, of a number that may be anything between minus and plus infinity."""
    return math.floor(min(max(number, -MANY), MANY))


def _settled(wanted: int, in_force: int | None) -> int:
    """The limit in force where the wanted one is about the same."""
    return in_force if in_force is not None and abs(wanted - in_force) <= DEADBAND * in_force else wanted
