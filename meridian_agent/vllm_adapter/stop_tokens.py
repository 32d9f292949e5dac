"""Lets stop tokens of a request sleep, in vLLM's scheduler, which looks for each new token in a list of the request.

Runs on the engine-core thread. The workers get a plain list.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meridian_agent.vllm_types import Request


class SleepingTokens(list[int]):
    """The stop tokens of one request. sleeps: says of the request's newest token, a stop token, whether it sleeps."""

    def __init__(self, tokens: Iterable[int], sleeps: Callable[[], bool]) -> None:
        super().__init__(tokens)
        self._sleeps = sleeps

    def __contains__(self, token: object) -> bool:
        return super().__contains__(token) and not self._sleeps()

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        return list, ([*self],)

    def followed_by(self, tokens: Iterable[int]) -> SleepingTokens:
        """Return these stop tokens and others."""
        return SleepingTokens([*self, *tokens], self._sleeps)


def let_sleep(request: Request, sleeps: Callable[[], bool]) -> None:
    """Ask `sleeps` whether a stop token of a request sleeps, each time that the request generates one."""
    tokens = request.sampling_params.stop_token_ids or ()
    if not isinstance(tokens, SleepingTokens):
        replace(request, SleepingTokens(tokens, sleeps))


def stop_also_after(request: Request, tokens: Iterable[int]) -> list[int] | None:
    """Add stop tokens to those of a request, and return the ones before."""
    before = request.sampling_params.stop_token_ids
    if isinstance(before, SleepingTokens):
        replace(request, before.followed_by(tokens))
    else:
        replace(request, [*(before or ()), *tokens])
    return before


def replace(request: Request, tokens: list[int] | None) -> None:
    """Replace a request's stop tokens; vLLM may share the sampling parameters of several requests."""
    params = copy.copy(request.sampling_params)
    params.stop_token_ids = tokens
    request.sampling_params = params
