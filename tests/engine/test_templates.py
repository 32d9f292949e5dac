"""The properties of a chat template that the agent finds by rendering it, with a real tokenizer and many templates."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from meridian_agent.core.phases import Markers
from meridian_agent.vllm_adapter.tokenizer import Template, chat_template_of, template_of, tokenizer_of
from tests.processes import MODEL

# As in Qwen3's template, thinking stays after the last question, and tool calls are tagged.
TURN = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and not (KEEP) %}
{%- set content = content.split('</think>')[-1] %}{%- endif %}{{ content }}TOOLS{{ '<|im_end|>' }}{%- endfor %}"""
LAST_QUESTION = """{%- set ns = namespace(last=0) %}{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"""
CALLS = """{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{{- 'TAG{"name": "' + call.function.name + '"}' }}{%- endfor %}{%- endif %}"""


def template(keep: str, tag: str | None = None) -> str:
    tools = CALLS.replace("TAG", tag) if tag is not None else ""
    return LAST_QUESTION + TURN.replace("KEEP", keep).replace("TOOLS", tools)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(MODEL)
    loaded.add_tokens(["<tool_call>"])
    return loaded


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("several", [False, True])
def test_the_template_is_vllms_and_no_tokenizer_is_read_again(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """A tokenizer with several templates has one for tools, which vLLM uses only for requests with tools."""
    from vllm.renderers import hf

    from tests.sim.engine import _base

    config = _base(0)
    own = tokenizer_of(config).chat_template
    named = {"default": own, "tool_use": "{{ messages }}"}
    monkeypatch.setattr(tokenizer_of(config), "chat_template", named if several else own)
    looks = Mock(wraps=hf.cached_get_processor)
    monkeypatch.setattr(hf, "cached_get_processor", looks)
    monkeypatch.setattr(hf, "_PROCESSOR_CHAT_TEMPLATES", {})
    assert chat_template_of(config) == own == (MODEL / "chat_template.jinja").read_text()
    assert looks.called == several
    assert hf.resolve_chat_template(tokenizer_of(config), None, None, model_config=config.model_config) == own
    assert looks.called


AFTER_QUESTION = "loop.index0 > ns.last"


@pytest.mark.parametrize(
    ("chat_template", "strips", "tool_call"),
    [
        (template("false"), True, False),
        (template("false", "<tool_call>"), True, False),
        (template("true", "<tool_call>"), False, False),
        (template(AFTER_QUESTION), True, False),
        (template(AFTER_QUESTION, "<tool_call>"), True, True),
        # Thinking stays in tool loops, but no token marks the beginning of a tool call.
        (template(AFTER_QUESTION, ""), False, False),
        ("{{ raise_exception('no') }}", False, False),
        ("{{ messages[0].content }}", False, False),
    ],
    ids=["strips", "strips-all", "keeps", "no-tools", "qwen3", "untagged-tools", "raises", "first-turn-only"],
)
def test_template(tokenizer: Any, chat_template: str, strips: bool, tool_call: bool) -> None:
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    found = template_of(tokenizer, Markers((tuple(start),), (tuple(end),)), chat_template)
    assert found == Template(strips, tokenizer.convert_tokens_to_ids("<tool_call>") if tool_call else None)


def test_no_template(tokenizer: Any) -> None:
    assert template_of(tokenizer, Markers(((1,),), ((2,),)), None) == Template()
    assert template_of(None, Markers(((1,),), ((2,),)), template("false")) == Template()
