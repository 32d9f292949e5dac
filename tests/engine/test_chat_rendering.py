"""vLLM's own classes tell the engine core how a chat was rendered, or are left as they are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.request_info import EFFORT, MAX_TEMPLATE, TEMPLATE, THINKING_ABSENT, UNKNOWN_TEMPLATE
from meridian_agent.vllm_adapter import chat_rendering

BEGINS = {"add_generation_prompt": True, "continue_final_message": False}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "{}"),
        ({"documents": None, "reasoning_effort": None, "tokenize": False, "return_dict": False}, "{}"),
        ({"tools": None}, "{}"),
        ({"tools": []}, "{}"),
        ({"tools": [{"type": "function"}]}, '{"tools": true}'),
        ({"thinking": True, "a": "b"}, '{"a": "b", "thinking": true}'),
        ({"add_generation_prompt": False}, UNKNOWN_TEMPLATE),
        ({"continue_final_message": True}, UNKNOWN_TEMPLATE),
        ({"a": object()}, UNKNOWN_TEMPLATE),
        ({"a": math.nan}, UNKNOWN_TEMPLATE),
        ({"a": "x" * MAX_TEMPLATE}, UNKNOWN_TEMPLATE),
    ],
)
def test_the_settings_of_a_rendered_chat(given: dict[str, Any], text: str) -> None:
    params = SimpleNamespace(chat_template=None, chat_template_kwargs={**BEGINS, **given})
    assert chat_rendering.text_of(params) == text
    params.chat_template = "{{ messages }}"
    assert chat_rendering.text_of(params) == UNKNOWN_TEMPLATE


def test_what_was_noted_is_copied_unless_the_client_has_said_it() -> None:
    prompt: dict[str, Any] = {"type": "token"}
    params = SimpleNamespace(chat_template=None, chat_template_kwargs={**BEGINS, "reasoning_effort": "low"})
    chat_rendering._note(params, ([[{"role": "user", "content": "q"}]], [prompt]))
    own = {"a": 1}
    for extra, expected in (
        (None, {TEMPLATE: '{"reasoning_effort": "low"}', EFFORT: "low"}),
        (own, {"a": 1, TEMPLATE: '{"reasoning_effort": "low"}', EFFORT: "low"}),
        ({TEMPLATE: UNKNOWN_TEMPLATE, EFFORT: ""}, {TEMPLATE: UNKNOWN_TEMPLATE, EFFORT: ""}),
    ):
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
        chat_rendering._copy(prompt, request)
        assert request.sampling_params.extra_args == expected
    assert own == {"a": 1}, "the caller's own dictionary was changed"
    for untouched in ({"type": "token"}, "a raw prompt", [1, 2]):
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None))
        chat_rendering._copy(untouched, request)
        assert request.sampling_params.extra_args is None
    chat_rendering._copy(prompt, SimpleNamespace(sampling_params=None))


@pytest.mark.parametrize(
    ("turns", "absent"),
    [
        ([], False),
        ([{"content": "four"}], True),
        ([{"content": None, "tool_calls": [{}]}, {"content": "four"}], True),
        ([{"content": "four", "reasoning": "2 + 2"}], False),
        ([{"content": "four", "reasoning_content": "2 + 2"}], False),
        ([{"content": "four"}, {"content": "five", "reasoning": "2 + 3"}], False),
        ([{"content": "<think>2 + 2</think>four"}], False),
        ([{"content": [{"type": "text", "text": "[THINK]2 + 2[/THINK]four"}]}], False),
        ([{"content": "I thought about it: four"}], False),
    ],
)
def test_a_conversation_whose_thinking_has_not_come_back(turns: list[dict[str, Any]], absent: bool) -> None:
    said = [part for turn in turns for part in ({"role": "user", "content": "q"}, {"role": "assistant", **turn})]
    prompt: dict[str, Any] = {}
    params = SimpleNamespace(chat_template=None, chat_template_kwargs=dict(BEGINS))
    chat_rendering._note(params, ([[*said, {"role": "user", "content": "and?"}]], [prompt]))
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None))
    chat_rendering._copy(prompt, request)
    assert request.sampling_params.extra_args == {TEMPLATE: "{}"} | ({THINKING_ABSENT: 1} if absent else {})


def test_an_error_of_the_agent_never_reaches_vllm() -> None:
    class Renderer:
        def render_chat(self, *_: Any) -> Any:
            return [], [{"type": "token"}]

        async def render_chat_async(self, *_: Any) -> Any:
            return [], []

    chat_rendering._wrap_renderer(Renderer)
    assert Renderer().render_chat([], object()) == ([], [{"type": "token"}])
