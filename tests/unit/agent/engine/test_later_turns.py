"""What is known of later turns: how a request was rendered, and which prompts have come back."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.request_info import MAX_TEMPLATE, TEMPLATE, UNKNOWN_TEMPLATE, template_settings
from meridian_agent.engine.later_turns import MAX_GIVEN_UP, MAX_KINDS, MAX_SETTINGS, UNUSED_S, LaterTurns
from meridian_agent.vllm_adapter.tokenizer import Template
from tests.fakes.engine import FakeEngine
from tests.fakes.linked import until

TOOL_CALL = 9
TEMPLATES = {"{}": Template(True, TOOL_CALL), '{"keep": true}': Template()}


class Told:
    """A `LaterTurns` whose templates are read at once; `notes` has its note at each call."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.read = threading.Event()
        self.now_s = 0.0
        self.turns = LaterTurns(self._read, lambda: self.notes.append(self.turns.note), lambda: self.now_s)
        self.turns.read_anew()
        self._engine = FakeEngine()

    def _read(self, settings: str) -> Template:
        self.read.set()
        return TEMPLATES.get(settings, Template(True))

    def live(self, name: str, chat_template: str = "{}", tenant: str = "", **own: Any) -> Any:
        return self._engine.open(name, tenant=tenant, chat_template=chat_template, **own)


@pytest.mark.parametrize(
    ("settings", "output", "refusal"),
    [
        ("{}", [1, 2], ""),
        ("{}", [1, TOOL_CALL], "a tool call: the next turn repeats its thinking"),
        ('{"keep": true}', [1], "it is not known yet whether the chat template strips the thinking"),
        ("", [1], "it is not known whether a later turn repeats the thinking"),
    ],
)
def test_what_is_not_known_is_kept(settings: str, output: list[int], refusal: str) -> None:
    told = Told()
    assert told.turns.refusal(told.live("a", settings), output) == refusal


def test_a_conversation_without_its_thinking_gives_the_next_turns_up_until_it_comes_back() -> None:
    """Whatever the template keeps, and also if the answer calls a tool."""
    told = Told()
    absent = told.live("a", '{"keep": true}', thinking_absent=True)
    called = told.live("b", thinking_absent=True)
    unknown = told.live("c", "", thinking_absent=True)
    assert [told.turns.refusal(live, [TOOL_CALL]) for live in (absent, called)] == ["", ""]
    assert "not known" in told.turns.refusal(unknown, [])
    told.turns.gave_up(absent, b"1")
    told.turns.arrived(told.live("d", "").info, [b"1"])
    assert "has repeated" in told.turns.refusal(absent, [])
    assert told.turns.refusal(called, [TOOL_CALL]) == ""
    (note,) = told.notes
    assert "earlier turns without thinking" in note


def test_a_structured_answer_may_be_a_tool_call() -> None:
    """vLLM writes the call of a named or required tool as JSON text, without the template's token."""
    told = Told()
    live = told.live("a")
    assert "perhaps a tool call" in told.turns.refusal(live, [1], structured=True)
    assert told.turns.refusal(live, [1]) == ""


def test_settings_of_a_request_are_rendered_once_and_not_without_end() -> None:
    told = Told()
    told.read.clear()
    live = told.live("a", '{"keep": true}')
    told.turns.arrived(live.info, [])
    assert told.read.wait(20)
    for i in range(MAX_SETTINGS * 2):
        told.turns.arrived(told.live(f"r{i}", f'{{"n": {i}}}').info, [])
    last = f'{{"n": {MAX_SETTINGS * 2 - 1}}}'
    assert "not known yet" in told.turns.refusal(told.live("z", last), [])
    assert len(told.turns._asked) == MAX_SETTINGS


def test_settings_that_come_later_are_known_once_others_are_out_of_use() -> None:
    """An engine runs for months, and settings may name the day."""
    told = Told()
    used = '{"n": 0}'
    for i in range(MAX_SETTINGS * 2):
        told.turns.arrived(told.live(f"r{i}", f'{{"n": {i}}}').info, [])
        told.turns.arrived(told.live(f"s{i}", used).info, [])
    told.now_s += UNUSED_S - 1
    told.turns.arrived(told.live("t", used).info, [])
    for i in range(MAX_SETTINGS):
        told.turns.arrived(told.live(f"u{i}", f'{{"early": {i}}}').info, [])
    told.now_s += 1
    for i in range(MAX_SETTINGS * 2):
        told.turns.arrived(told.live(f"v{i}", f'{{"day": {i}}}').info, [])
    known = {f'{{"day": {i}}}' for i in range(MAX_SETTINGS - 1)} | {used}
    assert told.turns._asked.keys() == known
    asyncio.run(until(lambda: told.turns._templates.keys() == known))
    assert told.turns.refusal(told.live("w", '{"day": 0}'), [1]) == ""
    assert "not known yet" in told.turns.refusal(told.live("x", "{}"), [1])
    told.turns.read_anew()
    assert told.turns._templates.keys() == told.turns._asked.keys() == known


def test_a_prompt_that_comes_back_keeps_the_blocks_of_such_requests_only() -> None:
    told = Told()
    first, other, same = told.live("a", tenant="x"), told.live("b", tenant="y"), told.live("c", tenant="x")
    told.turns.gave_up(first, b"1")
    told.turns.gave_up(other, b"2")
    told.turns.arrived(same.info, [b"0", b"3"])
    assert (told.notes, told.turns.note) == ([], "")
    # The prompt may come by another way, such as a completion, of which nothing else is known.
    told.turns.arrived(told.live("d", "").info, [b"0", b"1"])
    told.turns.arrived(told.live("e", "").info, [b"0", b"1"])
    assert told.turns.refusal(same, []) == "a later turn has repeated the thinking of such a request"
    assert told.turns.refusal(other, []) == ""
    (note,) = told.notes
    assert "tenant 'x'" in note
    assert "tenant 'y'" not in note


def test_a_request_that_goes_on_after_a_handover_teaches_nothing() -> None:
    told = Told()
    told.turns.gave_up(told.live("a"), b"1")
    told.turns.arrived(told.live("b", "", handed_over_ref="r").info, [b"1"])
    assert told.notes == []


def test_too_many_kinds_keep_all_blocks() -> None:
    told = Told()
    for i in range(MAX_KINDS + 5):
        told.turns.gave_up(told.live(f"a{i}", tenant=f"t{i}"), i)
        told.turns.arrived(told.live(f"b{i}").info, [i])
    assert len(told.notes) == MAX_KINDS + 1
    assert "all requests" in told.turns.note
    assert told.turns.refusal(told.live("new", tenant="new"), [])


def test_given_up_blocks_are_not_remembered_without_end() -> None:
    told = Told()
    live = told.live("a")
    for i in range(MAX_GIVEN_UP + 1):
        told.turns.gave_up(live, i)
    told.turns.arrived(told.live("b").info, [0])
    assert told.notes == []
    told.turns.arrived(told.live("c").info, [1])
    assert len(told.notes) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{}", "{}"),
        (UNKNOWN_TEMPLATE, ""),
        (None, ""),
        (1, ""),
        (["{}"], ""),
        ("x" * MAX_TEMPLATE, "x" * MAX_TEMPLATE),
        ("x" * (MAX_TEMPLATE + 1), ""),
    ],
)
def test_only_a_short_text_is_taken_for_settings(value: object, expected: str) -> None:
    params = SimpleNamespace(extra_args={TEMPLATE: value} if value is not None else None)
    assert template_settings(SimpleNamespace(sampling_params=params)) == expected
