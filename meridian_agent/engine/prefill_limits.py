"""Prompts that are computed in pieces, and how much of a step each may take so that EAT probes find room in it.

vLLM gives a step's tokens to what runs before it admits anything, and such a prompt takes all that is left. For a step
with probes its pieces are limited by vLLM's own threshold for long prompts, so that the step has as many tokens as ever
and a prompt comes late by those of the probes. Keeps nothing; engine-core thread, before vLLM schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from meridian_agent.vllm_adapter import scheduler_api

if TYPE_CHECKING:
    from collections.abc import Sequence

# The result of `scheduler_api.wanted_tokens`: tokens of the others, and of each piece.
Wanted: TypeAlias = tuple[int, list[int]]


def piece_limit(pieces: Sequence[int], spare: int) -> int | None:
    """The most that each piece may have for all of them to take `spare` tokens; None where they take no more.

    pieces: tokens that each would take by itself.
    """
    if sum(pieces) <= spare:
        return None
    for at, piece in enumerate(sorted(pieces)):
        share = spare // (len(pieces) - at)
        if piece > share:
            break
        spare -= piece
    return share


def leave_room(scheduler: Any, wanted: Wanted, probes: Sequence[int], may_cut: bool) -> bool:
    """Whether probes of so many tokens each find room in the coming step, from prompts in pieces if need be. may_cut:
    prompts may be cut anywhere."""
    budget, (others, pieces) = int(scheduler.max_num_scheduled_tokens), wanted
    if not pieces:
        return others + sum(probes) <= budget
    limit = limit_for(scheduler, wanted, budget, probes)
    if limit is None:
        return True
    return may_cut and limit >= least(scheduler, probes) and scheduler_api.may_cut_prompts(scheduler)


def limit_for(scheduler: Any, wanted: Wanted, budget: int, probes: Sequence[int]) -> int | None:
    """Tokens that each prompt in pieces may take of a step of `budget` tokens; None for what vLLM gives it."""
    others, pieces = wanted
    if not pieces:
        return None
    budget = min(budget, scheduler_api.input_tokens(scheduler, len(scheduler.running) + len(probes)))
    return piece_limit(pieces, budget - others - sum(probes))


def least(scheduler: Any, probes: Sequence[int]) -> int:
    """The smallest limit that cuts only prompts: vLLM applies it to probes and to tokens with their drafts, too."""
    return int(max(1 + scheduler.num_spec_tokens, *probes))
