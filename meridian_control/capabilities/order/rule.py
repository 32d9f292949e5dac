"""Decides the order of requests and their share of a step. All functions are pure.

A lower rank is more urgent: vLLM schedules requests in the order of their ranks and preempts the last one first. The
agent ranks a request by its phase alone, on the same scale, until a plan has another rank for the request in its phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.masks import any_in
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.step_cost import WARM_STEPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable
    from meridian_control.engine.step_cost import StepCost
    from meridian_control.policy.schema import KvMemoryPolicy, SchedulerPolicy

# Ranks by phase, as the agent gives them by itself. A thinking request moves up one rank each time its computed tokens
# double, so that the requests with the most computed tokens are preempted last.
OUTPUT_RANK, PROMPT_RANK = agent_pb2.PHASE_RANK_UNSPECIFIED, agent_pb2.PHASE_RANK_PROMPT
THINK_RANK, SUNK_RANKS = agent_pb2.PHASE_RANK_THINK_FIRST, agent_pb2.PHASE_RANK_THINK - agent_pb2.PHASE_RANK_THINK_FIRST
SUNK_TOKENS = 64
SUNK_BOUNDS = SUNK_TOKENS << np.arange(1, SUNK_RANKS + 1)
RANK_BY_PHASE = np.array([PROMPT_RANK, PROMPT_RANK, THINK_RANK + SUNK_RANKS, OUTPUT_RANK], np.int64)
# Deadlines that are further away than this many milliseconds get the same rank.
MAX_SLACK_MS = 511
# The control plane sends a changed limit only if the limit moved by more than this share of itself.
DEADBAND = 0.1
# Thinking requests are left out of a step only if that is expected to shorten the step by at least this share.
MIN_GAIN = 0.05
# More prompt tokens than any engine computes in a step. A limit of this size would limit nothing.
MAX_PREFILL_TOKENS = 1 << 20
# Prompt tokens are not limited if MAX_PREFILL_TOKENS of them cost less than this many milliseconds.
NEXT_TO_NOTHING_MS = 1.0
# Budgets if the policy sets none. STRETCH: a step with prompt tokens takes at most this many times as long as a step
# without. THINK_BUDGETS: the thinking budget is this many answer budgets. READING_MS: milliseconds per answer token at
# the speed at which a person reads.
STRETCH, THINK_BUDGETS, READING_MS = 1.75, 4.0, 100.0
# Milliseconds per answer token that are budgeted before the cost of a step is known.
USUAL_MS = 20.0
# If the policy sets no minimum of prompt tokens per step, the minimum is HEADROOM times the recent mean, and at least
# LEAST_PREFILL_TOKENS.
HEADROOM, LEAST_PREFILL_TOKENS = 2.0, 16
# Bound for counts of sequences and of steps; no engine reaches it.
MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences and tokens that may join a step while answers stream; None is no limit.

    max_skip_steps: largest number of consecutive steps that may leave out a sequence of a limited phase.
    """

    think_per_step: int | None = None
    output_per_step: int | None = None
    max_skip_steps: int = 0
    prefill_tokens_per_step: int | None = None


LIMITS = tuple(field.name for field in fields(Share))


@dataclass(frozen=True, slots=True)
class Budgets:
    """Milliseconds from one token to the next. holds_prompts: whether prompts are held back to keep `output_ms`."""

    output_ms: float
    think_ms: float
    holds_prompts: bool


def budgets(policy: SchedulerPolicy, table: RequestTable, cost: StepCost, has_thought: bool) -> Budgets:
    """Return the policy's budgets, or budgets from the measured step cost if the policy sets none.

    has_thought: whether a request of the engine has thought. If none has and the policy sets neither an output budget
    nor a minimum of prompt tokens, prompts are not held back: an engine without thinking computes them as stock does.
    """
    holds_prompts = bool(has_thought or policy.output_tpot_budget_ms or policy.min_prefill_tokens)
    output_ms = policy.output_tpot_budget_ms
    if not output_ms and policy.strategy == "reasoning_first":
        output_ms = READING_MS
    elif not output_ms:
        a, b, _ = cost.coefficients
        output_ms = STRETCH * (a + b * sum(_running(table))) if cost.steps >= WARM_STEPS else USUAL_MS
    return Budgets(output_ms, policy.think_tpot_budget_ms or THINK_BUDGETS * output_ms, holds_prompts)


def _running(table: RequestTable) -> tuple[int, int]:
    """Return how many requests think and how many answer, without those that are preempted."""
    running = table.live & ~table.preempted if any_in(table.preempted) else table.live
    phases = table.phase[running].tobytes()
    return phases.count(THINK), phases.count(OUTPUT)


def ranks(policy: SchedulerPolicy, table: RequestTable, budget: Budgets, now_ms: float) -> NDArray[np.int64]:
    """Return the rank of every slot, [slots]. now_ms: time on the table's clock."""
    phase = table.phase
    if policy.strategy == "deadline":
        allowed = np.where(phase == OUTPUT, budget.output_ms, budget.think_ms)
        slack = np.clip(table.token_ms + allowed - now_ms, 0, MAX_SLACK_MS).astype(np.int64)
        first_answer_token = (phase == OUTPUT) & (table.output_tokens == 0)
        by_deadline: NDArray[np.int64] = np.where(first_answer_token, 0, 1 + slack)
        return by_deadline
    total = table.prompt_tokens + table.think_tokens + table.output_tokens
    thinks = phase == THINK
    rank: NDArray[np.int64] = RANK_BY_PHASE.take(phase) - thinks * SUNK_BOUNDS.searchsorted(total, side="right")
    if policy.strategy == "reasoning_first":
        demoted = thinks & (table.think_tokens >= policy.long_think_tokens)
        rank = np.where(thinks & ~demoted, OUTPUT_RANK, rank)
        rank = np.where(phase == OUTPUT, PROMPT_RANK + 1, rank)
    return rank


def changed_ranks(
    policy: SchedulerPolicy, table: RequestTable, budget: Budgets, now_ms: float
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the slots whose rank differs from the one that is in force on the agent, and the ranks of all slots,
    [slots]. The strategy is not "stock".

    A request that has begun or has changed its phase since the newest plan has the rank of its phase on the agent: the
    agent drops the rank of the earlier phase, and ignores ranks that were decided from a report before the change.
    """
    rank = ranks(policy, table, budget, now_ms)
    in_force = np.where(table.phase == table.ranked_phase, table.rank, RANK_BY_PHASE.take(table.phase))
    return (table.live & (rank != in_force)).nonzero()[0], rank


def share(policy: SchedulerPolicy, table: RequestTable, budget: Budgets, cost: StepCost, in_force: Share) -> Share:
    """Return the share of a step that fits into the budget of the answers, by the measured step cost.

    A limit that would not shorten the step is left out. While no answer streams, the share is computed for one answer:
    the agent applies no limit until an answer streams, and then the step of that answer's first token is short as well.
    in_force: the share that was sent last.
    """
    thinking, answering = _running(table)
    answering = max(1, answering)
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
        # Number of thinking sequences per step that lets each of them have a token within the thinking budget.
        fair = -_whole(-thinking * max(budget.output_ms, a + b * answering) / budget.think_ms)
        wanted = min(thinking, max(room, fair, 1))
        if a + b * (answering + wanted) <= (1 - MIN_GAIN) * whole:
            joining = limit = _settled(wanted, in_force.think_per_step)
            max_skip = max(0, _whole(budget.think_ms / (a + b * (answering + joining))) - 1)
    spare = budget.output_ms - a - b * (answering + joining)
    prefill = None
    if budget.holds_prompts and c * MAX_PREFILL_TOKENS > max(spare, NEXT_TO_NOTHING_MS):
        least = policy.min_prefill_tokens or max(LEAST_PREFILL_TOKENS, -_whole(-HEADROOM * cost.prefill_tokens))
        prefill = _settled(max(least, math.floor(spare / c)), in_force.prefill_tokens_per_step)
    return Share(limit, None, max_skip, prefill)


def _paced_answers(answering: int, thinking: int, whole_ms: float, budget_ms: float) -> Share:
    """Return the share that gives each answer one token per budget, in turns, and the remaining room to thinking."""
    turns = _whole(budget_ms / whole_ms) if whole_ms else 1
    if not thinking or turns < 2:
        return Share()
    return Share(output_per_step=math.ceil(answering / turns), max_skip_steps=turns - 1)


def _whole(number: float) -> int:
    """Round a number down to an integer within ±MANY; the number may be infinite."""
    return math.floor(min(max(number, -MANY), MANY))


def _settled(wanted: int, in_force: int | None) -> int:
    """Return the limit in force if the wanted limit is within DEADBAND of it, else the wanted limit."""
    return in_force if in_force is not None and abs(wanted - in_force) <= DEADBAND * in_force else wanted


def hold_admission(policy: KvMemoryPolicy, table: RequestTable, kv_tokens: int, kv_used: float) -> bool:
    """Whether thinking uses more than its share of `kv_tokens` cache tokens while a preempted answer waits.

    Requests with a common beginning share its blocks, so together they may have more tokens than the cache in use: then
    thinking has its part of that by the tokens of all. kv_used: fraction of the cache in use, 0 if it is not known.
    """
    if not policy.enabled or kv_tokens == 0:
        return False
    if not any_in(table.preempted) or not any_in(table.live & table.preempted & (table.phase == OUTPUT)):
        return False
    running = table.live & ~table.preempted & ~table.queued
    tokens = (table.prompt_tokens + table.think_tokens + table.output_tokens)[running]
    thinking, whole = int(tokens[table.phase[running] == THINK].sum()), int(tokens.sum())
    used = min(whole, (kv_used or 1.0) * kv_tokens)
    return thinking > 0 and used * (thinking / whole) > policy.think_phase_memory_fraction * kv_tokens
