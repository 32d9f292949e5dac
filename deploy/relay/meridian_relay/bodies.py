"""Decides which chat requests another engine can continue, and writes what the relay asks engines for. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meridian_relay.texts import touches

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HANDOVER = "meridian-handover:"
# Fields of a chat request that mean the same in a completion, whatever part of the output is in its prompt.
CARRIED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
    "priority",
    "user",
    "session_id",
    "cache_salt",
)
# Fields that shape the prompt, or that the relay changes for a completion.
READ = (
    "messages",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "thinking_token_budget",
    "stream",
    "stream_options",
    "stop",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    "vllm_xargs",
)
# Fields that are carried with 0 only, because the penalties count the tokens of the output alone. An engine may have
# another default.
PENALTIES = "presence_penalty", "frequency_penalty"
# Fields that are allowed with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    **dict.fromkeys(PENALTIES, 0),
    "length_penalty": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "use_beam_search": False,
    "include_reasoning": True,
    "return_token_ids": False,
    "response_format": {"type": "text"},
    "tool_choice": "none",
}
COUNTS = ("max_tokens", "max_completion_tokens", "min_tokens")
THINK_LIMITS = ("meridian_max_think_tokens", "meridian_min_think_tokens")
# Marks a request that the relay can continue on another engine; the agent reads it.
CANDIDATE = "meridian_handover_candidate"
# Facts about a chat that its completion does not say; the agent reads them.
CHAT_MARK, EFFORT = "meridian_chat", "meridian_effort"


@dataclass(frozen=True)
class CarriedRequest:
    """A chat request that another engine can continue. body: the client's fields that are not null."""

    body: dict[str, Any]
    stops: tuple[str, ...]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def usage_wanted(self) -> bool:
        return bool(self.body.get("stream_options", {}).get("include_usage"))

    @property
    def include_stop(self) -> bool:
        return bool(self.body.get("include_stop_str_in_output"))

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens to generate; None if the client sets none."""
        limit: int | None = self.body.get("max_completion_tokens", self.body.get("max_tokens"))
        return limit

    def first_body(self) -> dict[str, Any]:
        """Return the chat request to a thinking engine."""
        return self.body | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "vllm_xargs": {**self.body.get("vllm_xargs", {}), CANDIDATE: 1},
        }


@dataclass
class HandoverTarget:
    """Where and how to continue a request, as the engine that thought says.

    url: the base URL, empty if it cannot be read. kv_transfer_params: None if the engine at the URL must recompute.
    expires_ms: milliseconds from the arrival. max_tokens: the limit in force on the engine that thought, which may be
    lower than the client's; None if the engine does not say it.
    """

    ref: str = ""
    url: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    expires_ms: float = 0
    max_tokens: int | None = None


@dataclass
class Progress:
    """The tokens of a request so far. thinking: whether no token of the answer is known."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    thinking: bool = True


def carried(raw: bytes, marker: str) -> CarriedRequest | None:
    """Return the request of a body that another engine can continue; None if the body must go to one engine as it is.

    `marker` is the text that ends thinking.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    body = {name: value for name, value in body.items() if value is not None}
    if not all(name in CARRIED or name in READ or NEUTRAL.get(name) == value for name, value in body.items()):
        return None
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not (_typed(body) and _only_text(body.get("messages")) and _usable(stops, marker)):
        return None
    # Stop strings count only after min_tokens, which the relay could not tell from the text.
    return None if stops and body.get("min_tokens") else CarriedRequest(body, tuple(stops))


def _typed(body: dict[str, Any]) -> bool:
    """Whether the fields that the relay reads have their types; an engine reports other types to the client."""
    options = body.get("stream_options", {})
    return (
        all(type(body.get(name, 0)) is int for name in COUNTS)
        and all(isinstance(body.get(name, False), bool) for name in ("stream", "include_stop_str_in_output"))
        and isinstance(body.get("vllm_xargs", {}), dict)
        and isinstance(options, dict)
        and not (options and not body.get("stream"))
        and not any(value for name, value in options.items() if name != "include_usage")
    )


def _only_text(messages: Any) -> bool:
    """Whether there are messages and all are text, so that token ids are the whole prompt."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(content is None or isinstance(content, str | list) for content in contents) and all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts
    )


def _usable(stops: Any, marker: str) -> bool:
    """Whether the relay can find the stop strings itself, and none can pass for an engine's instruction."""
    return isinstance(stops, list) and all(
        isinstance(stop, str) and stop and not touches(stop, marker) and not stop.startswith(HANDOVER) for stop in stops
    )


def continuation_of(stop_reason: Any) -> HandoverTarget | None:
    """Read the instruction in a final chunk's stop_reason; None if the reason is another one."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(HANDOVER):
        return None
    try:
        fields = json.loads(stop_reason.removeprefix(HANDOVER))
        params = fields["kv_transfer_params"]
        if params is not None and not isinstance(params, dict):
            raise TypeError("kv_transfer_params must be an object")
        limit = fields.get("max_tokens")
        if limit is not None and type(limit) is not int:
            raise TypeError("max_tokens must be an integer")
        url, expires_ms = str(fields["url"]).rstrip("/"), float(fields["expires_ms"])
        return HandoverTarget(str(fields["ref"]), url, params, expires_ms, limit)
    except (KeyError, TypeError, ValueError):
        return HandoverTarget()


def next_body(
    request: CarriedRequest,
    progress: Progress,
    *,
    left: int,
    ref: str,
    kv_transfer_params: dict[str, Any] | None,
    stops: Sequence[str],
) -> dict[str, Any]:
    """Return the completion that continues a request.

    left: the tokens that may still be generated. ref: the reference of the handover, empty without one. stops: the stop
    strings that the engine finds; those that it does not get, the relay finds. The agent reads a chat's thinking in a
    completion like that in a chat: stops sleep, and the effort counts.
    """
    own, done = request.body, len(progress.tokens)
    body = {name: own[name] for name in (*CARRIED, *PENALTIES) if name in own}
    body |= {
        "prompt": progress.prompt + progress.tokens,
        "max_tokens": left,
        "min_tokens": max(0, own.get("min_tokens", 0) - done),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    xargs = {name: value for name, value in own.get("vllm_xargs", {}).items() if name not in {*THINK_LIMITS, CANDIDATE}}
    xargs["meridian_prompt_tokens"] = len(progress.prompt)
    xargs.setdefault(CHAT_MARK, 1)
    said = own.get("reasoning_effort") or own.get("chat_template_kwargs", {}).get("reasoning_effort")
    if isinstance(said, str):
        xargs.setdefault(EFFORT, said)
    if ref:
        xargs["meridian_handover"] = ref
    if progress.thinking:
        # The end marker may be a special token. The limits count generated tokens, vLLM's budget counts the prompt's.
        body["skip_special_tokens"] = False
        limits = {name: own.get("vllm_xargs", {}).get(name) for name in THINK_LIMITS}
        xargs |= {name: max(0, n - done) for name, n in limits.items() if isinstance(n, int | float)}
        if "thinking_token_budget" in own:
            body["thinking_token_budget"] = own["thinking_token_budget"]
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    if stops:
        body["stop"] = list(stops)
    return body | {"vllm_xargs": xargs}
