"""Whatever breaks, and wherever: the client gets the answer of one unbroken engine, and one result is counted."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.relay.relayed import PARAMS, Answer, ask, engines, handover, relaying
from tests.fakes.vllm_server import FakeVllm, Plan, Script

# Whole characters, parts of characters, white space, and beginnings of the end marker and of stop strings.
PIECES = [b"a", b"b ", b"ab", b"\n", b"<", b"</th", b"x<", b" end", b"\xe2", b"\x82\xac", b"\xf0\x9f", b"\x98\x80"]
PIECES += [character.encode() for character in "é€😀"]
STOPS = ["ab", "aba", " end", "b a", "€", "\n\n", "a\nb"]


class Course(NamedTuple):
    """A course of events. `home`, `other` and `answering` say where these engines' streams break; None for nowhere."""

    script: Script
    hands_over: bool
    transfers: bool
    home: Plan
    other: Plan
    answering: Plan
    fields: dict[str, Any]


@st.composite
def courses(draw: st.DrawFn) -> Course:
    pieces = st.lists(st.sampled_from(PIECES), max_size=15)
    thinking, answer = draw(pieces), draw(pieces)
    # vLLM never sends bytes that are no character if a stop token follows them.
    while b"".join(thinking).decode(errors="replace").endswith("\ufffd"):
        thinking.pop()
    script = Script(thinking, answer)

    def plan() -> Plan:
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        breaks = draw(st.none() | st.integers(0, len(script.tokens)))
        status = draw(st.sampled_from([None] * 9 + [500]))
        return Plan(sizes, breaks, draw(st.booleans()) and breaks is not None, status=status)

    fields: dict[str, Any] = {"max_tokens": draw(st.sampled_from([100, 100, 12, 5, 1]))}
    if draw(st.booleans()):
        fields["stop"] = draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=2))
        fields["include_stop_str_in_output"] = draw(st.booleans())
    return Course(
        script, draw(st.sampled_from([True, True, False])), draw(st.booleans()), plan(), plan(), plan(), fields
    )


def summary(answer: Answer) -> tuple[Any, ...]:
    return answer.status, answer.text("reasoning"), answer.text("content"), answer.ending()


def counts(answer: Answer, details: bool) -> dict[str, Any]:
    usage = answer.usage()
    return usage if details else {name: n for name, n in usage.items() if isinstance(n, int)}


async def compare(course: Course) -> None:
    """Serve one request over engines that break, and compare the answer with that of an engine of its own."""
    async with engines(course.script, 4) as (home, other, answering, whole):
        instruction = handover(answering.url, PARAMS if course.transfers else None)
        home.plans = deque([course.home])
        other.plans = deque([course.other])
        answering.plans = deque([course.answering])
        if course.hands_over:
            course.home.handover = course.other.handover = instruction
        async with relaying(home.url, other.url) as relayed:
            expected = await ask(relayed.session, whole.url, **course.fields)
            answer = await relayed.ask(**course.fields)
            assert sum(relayed.results().values()) == 1
            result = next(iter(relayed.results()))
            assert relayed.value("meridian_relay_in_flight") == 0
    legs = [*home.seen, *other.seen, *answering.seen]
    if answer.error is not None:
        assert (result, len(legs) > 1) == ("failed", True)
        return
    assert summary(answer) == summary(expected)
    thought_whole = any("completion_tokens_details" in chunk.get("usage", {}) for chunk in answer.chunks)
    if expected.ending()[0] == "stop" and expected.ending()[1] is not None and len(legs) > 1:
        # A stop string that the relay finds may end within a chunk of several tokens.
        spare = max(map(max, (course.home.sizes, course.other.sizes, course.answering.sizes))) - 1
        assert 0 <= answer.usage()["completion_tokens"] - expected.usage()["completion_tokens"] <= spare
    else:
        assert counts(answer, thought_whole) == counts(expected, thought_whole)
    assert result == expected_result(course, home, other, answering)


def expected_result(course: Course, home: FakeVllm, other: FakeVllm, answering: FakeVllm) -> str:
    """Return the result that the requests which the engines have seen lead to."""
    if continued(home) or continued(other):
        return "finished_on_thinking_engine"
    if continued(answering):
        return "handed_over" if course.transfers else "recomputed"
    return "one_engine"


def continued(engine: FakeVllm) -> bool:
    """Whether an engine was asked to continue a request after its handover."""
    return any("meridian_handover" in body.get("vllm_xargs", {}) for _, body in engine.seen)


@given(courses())
def test_one_answer(course: Course) -> None:
    asyncio.run(compare(course))


@pytest.mark.parametrize(("stop", "include"), [("nowhere", False), ("swer is", True), ("k mo", False)])
async def test_every_break_with_stop_strings(stop: str, include: bool) -> None:
    """An engine holds text back that may begin a stop string, and another engine's text may complete the string."""
    script = Script([b"so ", b"think ", b"more"], [b"\n\n", b"an", b"swer ", b"is ", *split("é"), b"!"])
    for breaks, (size, aborts) in itertools.product(range(len(script.tokens)), ((1, False), (1, True), (3, False))):
        broken = Plan([size], breaks, aborts)
        for home, answering in ((broken, Plan()), (Plan([size]), broken)):
            fields = {"max_tokens": 100, "stop": stop, "include_stop_str_in_output": include}
            await compare(Course(script, answering != Plan(), True, home, Plan(), answering, fields))


def split(character: str) -> list[bytes]:
    return [bytes([byte]) for byte in character.encode()]
