"""Where a front end looks for stop strings: vLLM's own detokenizer with the agent's notes, on a real tokenizer, for any
division of the tokens into steps."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.vllm_adapter import stop_strings
from tests.processes import MODEL

WORDS = ("Wait", "walk", ".", "A", "B", "is", "</think>", "\n\n")
STOPS = ("walk", "walk A", ". Wait", "</think>", "is B . A", "A")
# vLLM's detokenizers for tokenizers with and without a part in Rust.
FAST, SLOW = "FastIncrementalDetokenizer", "SlowIncrementalDetokenizer"


@functools.cache
def tokenizer() -> Any:
    # The imports give warnings, so they are not made while tests are collected.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def ids(*words: str) -> list[int]:
    return [tokenizer().encode(word, add_special_tokens=False)[0] for word in words]


def detokenizer(kind: str, stop: list[str], include: bool = False, least: int = 0) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import detokenizer as module

    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=least, skip_special_tokens=False)
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=ids("Wait"), prompt_embeds=None, request_id="r")
    return getattr(module, kind)(tokenizer(), request)


def feed(made: Any, tokens: list[int], asleep: list[bool]) -> str | None:
    """Take one output in, as vLLM's front end does."""
    output = SimpleNamespace(trace_headers=None)
    stop_strings.note(output, asleep)
    if output.trace_headers:
        stop_strings._obey(SimpleNamespace(detokenizer=made), output.trace_headers[stop_strings.NOTE])
    found: str | None = made.update(tokens, False)
    return found


@pytest.mark.parametrize("kind", [FAST, SLOW])
@pytest.mark.parametrize("include", [False, True])
def test_the_answer_alone_is_searched(kind: str, include: bool) -> None:
    @given(
        st.lists(st.tuples(st.sampled_from(WORDS), st.booleans()), min_size=1, max_size=30),
        st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
        st.lists(st.integers(1, 5), min_size=30, max_size=30),
        st.sampled_from([0, 0, 4]),
    )
    def searched(rows: list[tuple[str, bool]], stop: list[str], steps: list[int], least: int) -> None:
        tokens, asleep = ids(*(word for word, _ in rows)), [sleeps for _, sleeps in rows]
        reference = detokenizer(kind, [], include)
        texts = []
        for token in tokens:
            reference.update([token], False)
            texts.append(reference.output_text)
        begins, expected = 0, None
        for at, text in enumerate(texts):
            if asleep[at]:
                begins = len(text)
                continue
            before = len(texts[at - 1]) if at else 0
            ends = sorted(
                (place + len(one), stop.index(one))
                for one in stop
                for place in range(begins, len(text))
                if text.startswith(one, place) and place + len(one) > before
            )
            if ends and at >= least:
                expected = at, stop[ends[0][1]]
                break
        made, at = detokenizer(kind, stop, include, least), 0
        found = None
        for size in steps:
            if at >= len(tokens) or found:
                break
            # An output may have no tokens.
            assert feed(made, [], []) is None
            found = feed(made, tokens[at : at + size], asleep[at : at + size])
            at += size
        if expected is None:
            assert found is None
            assert made.output_text == texts[min(at, len(tokens)) - 1]
            assert made.output_token_ids == tokens
        else:
            assert found == expected[1]
            assert made.output_token_ids == tokens[: expected[0] + 1]
            assert made.output_text.endswith(found) >= include
            assert made.stop == stop

    searched()


def test_after_the_thinking_the_search_is_vllms_own() -> None:
    made = detokenizer(FAST, ["walk A"])
    feed(made, ids("Wait", "walk"), [True, True])
    assert "update" in vars(made)
    for _ in range(6):
        feed(made, ids("."), [False])
    assert "update" not in vars(made)


def test_an_output_without_stop_strings_stays_as_it_is() -> None:
    made = detokenizer(FAST, [])
    assert feed(made, ids("Wait", "walk"), [True, True]) is None
    assert "update" not in vars(made)
    stop_strings._obey(None, "1")
    output = SimpleNamespace(trace_headers={"traceparent": "t"})
    stop_strings.note(output, [False, False])
    assert output.trace_headers == {"traceparent": "t"}
    stop_strings.note(output, [True, False])
    assert output.trace_headers == {"traceparent": "t", stop_strings.NOTE: "10"}
