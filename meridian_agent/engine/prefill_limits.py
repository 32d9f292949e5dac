"""Limits how many tokens of a step each prompt that is computed in pieces may take, so that EAT probes find room in the
step.

vLLM gives a step's tokens to running requests before it admits others, and a prompt in pieces takes all tokens that are
left. In a step with probes the agent limits the pieces by vLLM's own threshold for long prompts. So the step has as
many tokens as ever, and the prompts lose only the tokens that the probes take. Keeps no state; runs on the engine-core
thread, before vLLM schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from meridian_agent.vllm_adapter import scheduler_api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.vllm_types import Scheduler

# The result of `scheduler_api.wanted_tokens`: tokens of all requests but the prompts in pieces, and tokens of each
# piece.
Wanted: TypeAlias = tuple[int, list[int]]


def piece_limit(pieces: Sequence[int], spare: int) -> int | None:
    """Return the largest number of tokens for each piece with which all pieces together take `spare` tokens; None if
    they take no more than that anyway.

    pieces: tokens that each piece would take without a limit.
    """
    if sum(pieces) <= spare:
        return None
    for at, piece in enumerate(sorted(pieces)):
        share = spare // (len(pieces) - at)
        if piece > share:
            break
        spare -= piece
    return share


def leave_room(scheduler: Scheduler, wanted: Wanted, probes: Sequence[int], may_cut: bool) -> bool:
    """Return whether probes of these sizes find room in the coming step, with smaller pieces of prompts if needed.
    may_cut: prompts may be cut anywhere."""
    budget, (others, pieces) = int(scheduler.max_num_scheduled_tokens), wanted
    if not pieces:
        return others + sum(probes) <= budget
    limit = limit_for(scheduler, wanted, budget, probes)
    if limit is None:
        return True
    return may_cut and limit >= least(scheduler, probes) and scheduler_api.may_cut_prompts(scheduler)


def limit_for(scheduler: Scheduler, wanted: Wanted, budget: int, probes: Sequence[int]) -> int | None:
    """Return the tokens that each prompt in pieces may take of a step of `budget` tokens; None if no limit is
    needed."""
    others, pieces = wanted
    if not pieces:
        return None
    budget = min(budget, scheduler_api.input_tokens(scheduler, len(scheduler.running) + len(probes)))
    return piece_limit(pieces, budget - others - sum(probes))


def least(scheduler: Scheduler, probes: Sequence[int]) -> int:
    """Return the smallest limit that cuts only prompts, because vLLM applies its threshold also to probes and to a
    token with its draft tokens."""
    return int(max(1 + scheduler.num_spec_tokens, *probes))
