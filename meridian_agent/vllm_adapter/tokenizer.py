"""Asks vLLM's tokenizer for the agent: sentence ends, and what the chat template does with earlier turns."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import boundary_flag

if TYPE_CHECKING:
    from meridian_agent.core.phases import Markers

logger = logging.getLogger("vllm.meridian")

# A tool call to render chat templates with.
TOOL: dict[str, Any] = {"name": "meridiantool", "arguments": {"meridianargument": 1}}


def tokenizer_of(vllm_config: Any) -> Any:
    """The engine's tokenizer, or None when it runs without one."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def boundaries(vllm_config: Any) -> bytes:
    """Sentence and paragraph flags of every token id, read from the tokenizer once; empty without one."""
    tokenizer = tokenizer_of(vllm_config)
    if tokenizer is None:
        return b""
    ids = [[i] for i in range(min(len(tokenizer), vllm_config.model_config.get_vocab_size()))]
    return bytes(boundary_flag(text) for text in tokenizer.batch_decode(ids))


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template's way with earlier turns, found by rendering some.

    strips_think: thinking is gone from a turn that a user's turn follows.
    tool_call: token that begins a tool call, where thinking stays in the chat until the tool was answered; else None.
    """

    strips_think: bool = False
    tool_call: int | None = None


def template_of(tokenizer: Any, markers: Markers) -> Template:
    """Render the model's own chat template with thinking in an earlier turn and, where it can, with a tool call.

    A template that keeps thinking in tool loops and does not say where a tool call begins counts as one that keeps all.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return Template()
    known = (markers.starts, markers.ends) if markers.known else ((), ())
    start, end = (tokenizer.decode(list(m[0])) if m else "" for m in known)
    user = {"role": "user", "content": "meridianquestion"}
    said = {"role": "assistant", "content": f"{start}meridianthought{end}meridiananswer"}
    called = {**said, "tool_calls": [{"type": "function", "id": "call00000", "function": dict(TOOL)}]}
    answered = {"role": "tool", "content": "meridianresult", "tool_call_id": "call00000", "name": TOOL["name"]}

    def render(*turns: dict[str, Any]) -> str:
        try:
            return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True))
        except Exception as error:
            logger.info("meridian: the chat template does not render %s: %s", [t["role"] for t in turns], error)
            return ""

    text = render(user, said, user)
    if "meridiananswer" not in text or "meridianthought" in text:
        return Template()
    loop = render(user, called, answered)
    if "meridianthought" not in loop or str(TOOL["name"]) not in loop:
        return Template(strips_think=True)
    before_call = loop[: loop.index(str(TOOL["name"]))].rpartition("meridiananswer")[2]
    general = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    added = set(tokenizer.get_added_vocab().values()).difference(general)
    token = next((t for t in tokenizer.encode(before_call, add_special_tokens=False) if t in added), None)
    return Template(token is not None, token)
