"""Tells the engine core how vLLM rendered the chat of a request: with the model's own chat template and with which
settings, as `meridian_chat_template` in the request's sampling parameters; and whether the client has sent earlier
turns back without their thinking, as `meridian_thinking_absent`.

Only the process that renders chats knows it: a server has --chat-template and --default-chat-template-kwargs, and a
request may have a template and settings of its own. The engine core finds out whether that template strips thinking
from earlier turns. A request that is not rendered from a chat, such as a completion, gets no such text, nor does a
request whose rendering cannot be told in short.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import (
    EFFORT,
    MAX_TEMPLATE,
    TEMPLATE,
    THINKING_ABSENT,
    TOOLS,
    UNKNOWN_TEMPLATE,
)
from meridian_agent.vllm_adapter import after_import, required_api

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("vllm.meridian")

# Names under which facts are noted in vLLM's rendered prompt, a dictionary, as in the sampling parameters.
NOTED = (TEMPLATE, EFFORT, THINKING_ABSENT)
# Words of which one stands in an assistant's text that contains its thinking, whatever the model's markers are.
THINKING = re.compile("think|thought|reason|analysis", re.IGNORECASE)
WITHOUT = "the KV blocks of all finished requests stay in vLLM's own order of reuse"


def install() -> None:
    """Wrap vLLM's renderer of chats and the class that makes the engine core's requests, now or when this process
    imports them. Never raises."""
    after_import.wrap(required_api.RENDERER, _wrap_renderer, WITHOUT)
    after_import.wrap(required_api.INPUTS, _wrap_inputs, WITHOUT)


def _wrap_renderer(renderer_class: Any) -> None:
    """Wrap the two methods that render chats. Renderers of other kinds, which use no template, are other classes."""
    render, render_async = renderer_class.render_chat, renderer_class.render_chat_async

    @functools.wraps(render)
    def render_chat(self: Any, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        rendered = render(self, conversations, chat_params, *args, **kwargs)
        _unless_it_fails(_note, chat_params, rendered)
        return rendered

    @functools.wraps(render_async)
    async def render_chat_async(self: Any, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        rendered = await render_async(self, conversations, chat_params, *args, **kwargs)
        _unless_it_fails(_note, chat_params, rendered)
        return rendered

    renderer_class.render_chat, renderer_class.render_chat_async = render_chat, render_chat_async


def _wrap_inputs(inputs_class: Any) -> None:
    """Wrap the method that makes the engine core's request from a rendered prompt."""
    process = inputs_class.process_inputs

    @functools.wraps(process)
    def process_inputs(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, request_id, prompt, *args, **kwargs)
        _unless_it_fails(_copy, prompt, request)
        return request

    inputs_class.process_inputs = process_inputs


def _unless_it_fails(run: Callable[..., None], *args: Any) -> None:
    try:
        run(*args)
    except Exception:
        # A client may be able to cause the error as often as it likes, so there is no traceback for each.
        logger.debug("meridian: a request's chat template was not noted", exc_info=True)


def _note(chat_params: Any, rendered: Any) -> None:
    """Note in the rendered prompts how their chats were rendered."""
    effort = (chat_params.chat_template_kwargs or {}).get("reasoning_effort")
    noted = {TEMPLATE: text_of(chat_params), EFFORT: effort if isinstance(effort, str) else ""}
    for conversation, prompt in zip(*rendered, strict=True):
        said = {**noted, THINKING_ABSENT: int(comes_without_thinking(conversation))}
        prompt.update({name: value for name, value in said.items() if value})


def comes_without_thinking(conversation: Sequence[Any]) -> bool:
    """Return whether a conversation has turns of the assistant, and surely all of them without their thinking: neither
    in a field of its own nor in the text. The next turn of such a conversation will probably come without it, too."""
    turns = [turn for turn in conversation if turn.get("role") == "assistant"]
    return bool(turns) and not any(
        turn.get("reasoning") or turn.get("reasoning_content") or THINKING.search(str(turn.get("content") or ""))
        for turn in turns
    )


def _copy(prompt: Any, request: Any) -> None:
    """Add what a rendered prompt has noted to the request's sampling parameters, unless they have it already."""
    params = request.sampling_params
    if params is None or not isinstance(prompt, dict):
        return
    extra = params.extra_args or {}
    if added := {name: prompt[name] for name in NOTED if prompt.get(name) and name not in extra}:
        # The dictionary belongs to the caller's parameters, too.
        params.extra_args = {**extra, **added}


def text_of(chat_params: Any) -> str:
    """Return the settings with which the model's own chat template rendered a chat, as JSON text; UNKNOWN_TEMPLATE if
    another template did, if the chat goes on within an assistant's turn, or if the settings have no short text."""
    given = {name: value for name, value in (chat_params.chat_template_kwargs or {}).items() if value is not None}
    begins_turn = given.pop("add_generation_prompt", False) and not given.pop("continue_final_message", False)
    # LLM.chat names these two, which do not change the text.
    given.pop("tokenize", None), given.pop("return_dict", None)
    if given.pop("tools", None):
        given[TOOLS] = True
    if chat_params.chat_template is not None or not begins_turn:
        return UNKNOWN_TEMPLATE
    try:
        text = json.dumps(given, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return UNKNOWN_TEMPLATE
    return text if len(text) <= MAX_TEMPLATE else UNKNOWN_TEMPLATE
