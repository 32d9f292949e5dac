"""Reads two facts from vLLM's tokenizer: the texts of its tokens, by which the ends of sentences are found, and how the
chat template treats the thinking of earlier turns."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import TOOLS
from meridian_agent.core.sentences import SentenceTable, TokenText, split_bytes, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.core.phases import Markers

logger = logging.getLogger("vllm.meridian")

# The tool call with which the agent renders chat templates.
TOOL: dict[str, Any] = {"name": "meridiantool", "arguments": {"meridianargument": 1}}


def tokenizer_of(vllm_config: Any) -> Any:
    """Return the engine's tokenizer, or None if the engine runs without a tokenizer."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


# An added token that is no text, such as a marker; the other ones are runs of spaces, words and the like.
MARKUP = re.compile(r"\s*[<\[({|｜].*[>\])}|｜]\s*", re.DOTALL)
# A byte of a vocabulary that has bytes beside its texts.
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# What a decoder writes for bytes that are no character.
NO_CHARACTER = "\ufffd"


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as in GPT-2: printable characters of
    Latin-1 stand for themselves, and the other bytes, in their order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def sentences_of(tokenizer: Any, vocab_size: int) -> tuple[SentenceTable, list[int]]:
    """Return the machine that finds the ends of sentences in this vocabulary, and the ids that the tokenizer cannot
    decode."""
    texts, failed = token_texts(tokenizer, vocab_size)
    return table_of(texts), failed


def token_texts(tokenizer: Any, vocab_size: int) -> tuple[list[TokenText], list[int]]:
    """Return the text of each token by id, and the ids that the tokenizer cannot decode, which count as words."""
    ids = range(min(len(tokenizer), vocab_size))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    special |= {token for text, token in tokenizer.get_added_vocab().items() if MARKUP.fullmatch(text)}
    texts = list[TokenText]()
    failed = list[int]()
    for token, text in zip(ids, _decoded(tokenizer, ids), strict=True):
        if token in special:
            texts.append(TokenText("", special=True))
        elif text is None:
            failed.append(token)
            texts.append(TokenText("word"))
        elif NO_CHARACTER in text and (raw := _raw_bytes(tokenizer, token)):
            texts.append(split_bytes(raw))
        else:
            texts.append(TokenText(text))
    return texts, failed


def _decoded(tokenizer: Any, ids: Sequence[int]) -> list[str | None]:
    """Return the texts of these tokens; None for a token that the tokenizer cannot decode.

    Each token is decoded behind another one, because some decoders leave out the space with which a text begins.
    """
    first = [*tokenizer.encode("a", add_special_tokens=False)[-1:]]
    before = tokenizer.decode(first)
    try:
        texts: list[str] = tokenizer.batch_decode([[*first, token] for token in ids])
    except Exception:
        return [_decoded_alone(tokenizer, first, before, token) for token in ids]
    if not all(text.startswith(before) for text in texts):
        return [_decoded_alone(tokenizer, first, before, token) for token in ids]
    return [text[len(before) :] for text in texts]


def _decoded_alone(tokenizer: Any, first: list[int], before: str, token: int) -> str | None:
    try:
        text = str(tokenizer.decode([*first, token]))
        return text[len(before) :] if text.startswith(before) else str(tokenizer.decode([token]))
    except Exception:
        return None


def _raw_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token; empty if the vocabulary does not have them."""
    named = tokenizer.convert_ids_to_tokens([token])[0]
    if isinstance(named, bytes):
        return named
    if byte := BYTE.fullmatch(named):
        return bytes([int(byte[1], 16)])
    known = BYTE_CHARACTERS
    return bytes(known[c] for c in named) if all(c in known for c in named) else b""


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

        tokenizer, model = tokenizer_of(vllm_config), vllm_config.model_config
        # A model of text has no processor, and to find none vLLM would read the tokenizer once more: up to 1.7 s and
        # 90 MB. With tools vLLM looks for none; which tools, matters only if the tokenizer has several templates.
        has_one = isinstance(getattr(tokenizer, "chat_template", None), str)
        tools: list[Any] | None = [] if has_one and not model.is_multimodal_model else None
        template = resolve_chat_template(tokenizer, None, tools, model_config=model)
    except Exception as error:
        logger.info("meridian: the model's chat template is not known: %s", error)
        return None
    return template if isinstance(template, str) else None


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
