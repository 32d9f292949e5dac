"""Reads two facts from vLLM's tokenizer: which tokens end a sentence, and how the chat template treats the thinking of
earlier turns."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import boundary_flag
from meridian_agent.core.request_info import TOOLS

if TYPE_CHECKING:
    from meridian_agent.core.phases import Markers

logger = logging.getLogger("vllm.meridian")

# The tool call with which the agent renders chat templates.
TOOL: dict[str, Any] = {"name": "meridiantool", "arguments": {"meridianargument": 1}}


def tokenizer_of(vllm_config: Any) -> Any:
    """Return the engine's tokenizer, or None if the engine runs without a tokenizer."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def boundaries(vllm_config: Any) -> bytes:
    """Return the sentence and paragraph flags of every token id; empty if the engine has no tokenizer."""
    tokenizer = tokenizer_of(vllm_config)
    if tokenizer is None:
        return b""
    ids = [[i] for i in range(min(len(tokenizer), vllm_config.model_config.get_vocab_size()))]
    return bytes(boundary_flag(text) for text in tokenizer.batch_decode(ids))


@dataclass(frozen=True, slots=True)
class Template:
    """How the chat template treats the thinking of earlier turns; found by rendering test turns.

    strips_think: the template removes thinking from an assistant's turn that a user's turn follows.
    tool_call: the token that begins a tool call, if the template keeps thinking until the tool's result has arrived;
    otherwise None.
    """

    strips_think: bool = False
    tool_call: int | None = None


def chat_template_of(vllm_config: Any) -> str | None:
    """Return the text of the chat template that vLLM uses for a request that names none; None if it has none."""
    try:
        from vllm.renderers.hf import resolve_chat_template

        found = resolve_chat_template(tokenizer_of(vllm_config), None, None, model_config=vllm_config.model_config)
    except Exception as error:
        logger.info("meridian: the model's chat template is not known: %s", error)
        return None
    return found if isinstance(found, str) else None


def template_of(tokenizer: Any, markers: Markers, chat_template: str | None, settings: str = "{}") -> Template:
    """Render a chat template with thinking in an earlier turn and, if the template supports it, with a tool call.

    settings: the template's settings as JSON text, as in `RequestInfo.chat_template`. Thinking counts as removed if no
    spelling of the earlier turn brings it into the text: neither in the content, which may be a text or a list of
    parts, nor in a field of its own. A template that keeps thinking while tools are called, but has no token that
    begins a tool call, is treated as a template that keeps all thinking.
    """
    if tokenizer is None or not chat_template:
        return Template()
    known = (markers.starts, markers.ends) if markers.known else ((), ())
    start, end = (tokenizer.decode(list(m[0])) if m else "" for m in known)
    thought, answer = "meridianthought", "meridiananswer"
    user = {"role": "user", "content": "meridianquestion"}
    inline = f"{start}{thought}{end}{answer}"
    said = {"role": "assistant", "content": inline}
    parts = {"role": "assistant", "content": [{"type": "text", "text": inline}]}
    apart = {"role": "assistant", "content": answer, "reasoning": thought, "reasoning_content": thought}
    called = {**said, "tool_calls": [{"type": "function", "id": "call00000", "function": dict(TOOL)}]}
    answered = {"role": "tool", "content": "meridianresult", "tool_call_id": "call00000", "name": TOOL["name"]}

    def render(*turns: dict[str, Any]) -> str:
        try:
            given: dict[str, Any] = json.loads(settings)
            if given.pop(TOOLS, False):
                parameters = {"type": "object", "properties": {}}
                given["tools"] = [{"type": "function", "function": {"name": TOOL["name"], "parameters": parameters}}]
            given |= {"chat_template": chat_template, "tokenize": False, "add_generation_prompt": True}
            return str(tokenizer.apply_chat_template(list(turns), **given))
        except Exception as error:
            logger.info("meridian: the chat template cannot render turns %s: %s", [t["role"] for t in turns], error)
            return ""

    turns: list[dict[str, Any]] = [said, apart]
    if render({**user, "content": [{"type": "text", "text": user["content"]}]}) == render(user):
        turns.append(parts)
    texts = [render(user, turn, user) for turn in turns]
    if answer not in texts[0] or any(thought in text for text in texts):
        return Template()
    loop = render(user, called, answered)
    if thought not in loop or str(TOOL["name"]) not in loop:
        return Template(strips_think=True)
    before_call = loop[: loop.index(str(TOOL["name"]))].rpartition(answer)[2]
    general = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    added = set(tokenizer.get_added_vocab().values()).difference(general)
    token = next((t for t in tokenizer.encode(before_call, add_special_tokens=False) if t in added), None)
    return Template(token is not None, token)
