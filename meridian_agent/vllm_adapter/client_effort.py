"""Copies the effort that a client names in OpenAI's or Anthropic's API into the request's sampling parameters, as
`meridian_effort`, because vLLM passes no effort from the API server's process to the engine core.

vLLM's Anthropic API builds chat completion requests, so two classes of requests cover all APIs with an effort.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import CANDIDATE, CHAT, EFFORT, TEMPLATE, UNKNOWN_TEMPLATE
from meridian_agent.vllm_adapter import after_import, required_api

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.meridian")

METHOD = "to_sampling_params"
WITHOUT = "the effort that its clients name reaches no policy"


def install() -> None:
    """Wrap the request classes of vLLM's API servers, now or when this process imports their modules; log a missing
    thinking_token_budget."""
    after_import.wrap(required_api.API_SERVER, _wrap, WITHOUT)
    if lacks := required_api.missing(required_api.Imported(), required_api.BUDGET):
        logger.warning("meridian: vLLM lacks %s: clients' budgets reach no policy", ", ".join(lacks))


def _wrap(request_class: Any) -> None:
    """Wrap the method through which a request becomes sampling parameters."""
    setattr(request_class, METHOD, _copying(getattr(request_class, METHOD)))


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a request's method so that its sampling parameters contain the request's effort."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        try:
            _copy(self, params)
        except Exception:
            # A client may be able to cause the error as often as it likes, so there is no traceback for each.
            logger.debug("meridian: a request's effort was not copied", exc_info=True)
        return params

    return to_sampling_params


def _copy(request: Any, params: Any) -> None:
    """Add to a request's sampling parameters what its client said in its API, unless the client has set the same in
    vllm_xargs itself."""
    extra = params.extra_args or {}
    # Both classes of requests are chats.
    said: dict[str, Any] = {EFFORT: effort_of(request), CHAT: 1}
    if getattr(request, "return_token_ids", None) and extra.get(CANDIDATE) != 1:
        # The client, and not a relay, asks for the tokens, so its next prompt may consist of them, thinking included.
        said[TEMPLATE] = UNKNOWN_TEMPLATE
    if added := {name: value for name, value in said.items() if value and name not in extra}:
        # vLLM may use the client's own vllm_xargs as extra_args, and the client's request must stay as it is.
        params.extra_args = {**extra, **added}


def effort_of(request: Any) -> str:
    """Return the effort that a client's request names in its API; empty if it names none. Chat completions have
    reasoning_effort, responses have reasoning.effort."""
    reasoning = getattr(request, "reasoning", None)
    effort = getattr(request, "reasoning_effort", None) or getattr(reasoning, "effort", None)
    return effort if isinstance(effort, str) else ""
