"""Which requests another engine can continue exactly, and which instructions of an engine count."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meridian_relay.bodies import HANDOVER, HandoverTarget, Progress, carried, continuation_of, next_body

MARKER = "</think>"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None, "seed": None, "response_format": None},
        {"n": 1, "presence_penalty": 0.0, "logprobs": False, "include_reasoning": True, "tool_choice": "none"},
        {"temperature": 0, "top_k": 3, "logit_bias": {"5": 1}, "vllm_xargs": {"meridian_tenant": "t"}},
        {"stop": "ab", "stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": 5, "min_tokens": 2, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_eligible(fields: dict[str, Any]) -> None:
    assert carried(json.dumps({"messages": MESSAGES} | fields).encode(), MARKER) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": None},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"seed": 1},
        {"frequency_penalty": 0.1},
        {"logprobs": True},
        {"structured_outputs": {"regex": "a"}},
        {"echo": True},
        {"include_reasoning": False},
        {"return_token_ids": True},
        {"kv_transfer_params": {"meridian_handover": True}},
        {"bad_words": ["a"]},
        {"unknown": 1},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"vllm_xargs": []},
        {"stop": [""]},
        {"stop": [5]},
        {"stop": "</think>"},
        {"stop": "so<"},
        {"stop": "a", "min_tokens": 3},
        # A client could have the model write an instruction, and the relay send the request to any address.
        {"stop": [HANDOVER + '{"url": "http://evil"}']},
    ],
)
def test_not_eligible(fields: dict[str, Any]) -> None:
    assert carried(json.dumps({"messages": MESSAGES} | fields).encode(), MARKER) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_no_json_object(raw: bytes) -> None:
    assert carried(raw, MARKER) is None


@pytest.mark.parametrize("reason", [None, 5, "stop", "meridian"])
def test_other_stop_reasons(reason: Any) -> None:
    assert continuation_of(reason) is None


def test_an_instruction() -> None:
    fields = {"ref": "r", "url": "http://b:8000/", "kv_transfer_params": {"a": 1}, "expires_ms": 11000, "end": 5}
    assert continuation_of(HANDOVER + json.dumps(fields)) == HandoverTarget("r", "http://b:8000", {"a": 1}, 11000)
    for wrong in ({"kv_transfer_params": 5}, {"expires_ms": "soon"}):
        assert continuation_of(HANDOVER + json.dumps(fields | wrong)) == HandoverTarget()
    assert continuation_of(HANDOVER + "{}") == continuation_of(HANDOVER + "5") == HandoverTarget()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"reasoning_effort": "low", "vllm_xargs": {"meridian_effort": "own"}}, "own"),
        ({"chat_template_kwargs": {"reasoning_effort": 3}}, None),
        ({}, None),
    ],
)
def test_the_effort_counts_on_the_next_engine(fields: dict[str, Any], effort: str | None) -> None:
    request = carried(json.dumps({"messages": MESSAGES} | fields).encode(), MARKER)
    assert request is not None
    body = next_body(request, Progress(), left=5, ref="", kv_transfer_params=None, stops=())
    assert body["vllm_xargs"].get("meridian_effort") == effort
