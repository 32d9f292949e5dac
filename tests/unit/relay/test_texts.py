"""Text is cut at markers and stop strings alike, however it comes."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_relay.texts import MarkerSplit, ReceivedText, StopMatch, touches
from tests.reached import reached, reaches

MARKER = "</think>"
TEXT = st.lists(st.sampled_from(["a", "b", "ab", "<", "</", "think", ">", "</think>", " "]), min_size=6, max_size=12)


@reaches("a marker", "no marker")
@given(TEXT)
def test_a_marker_may_be_cut_anywhere(parts: list[str]) -> None:
    split, before, after = MarkerSplit(MARKER), "", ""
    for part in parts:
        thought, answer = split.feed(part)
        before, after = before + thought, after + answer
        assert MARKER not in before
    before += split.flush()
    thought, mark, answer = "".join(parts).partition(MARKER)
    reached("a marker" if mark else "no marker")
    assert (before, after, split.over) == (thought, answer, bool(mark))


@reaches("a stop string", "the text's end")
@given(TEXT, st.lists(st.sampled_from(["a", "ba", "bab", " a", "b<"]), max_size=3), st.booleans())
def test_stop_strings_are_found_wherever_text_is_cut(parts: list[str], stops: list[str], include: bool) -> None:
    match, sent, found = StopMatch(stops, include), "", None
    for part in parts:
        text, found = match.feed(part)
        sent += text
        if found is not None:
            break
    else:
        sent += match.flush()
    text = "".join(parts)
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (sent, found) == (text, None)
        reached("the text's end")
        return
    end, stop = min(ends, key=lambda each: each[0])
    assert (sent, found) == (text[: end if include else end - len(stop)], stop)
    reached("a stop string")


def test_a_stop_string_may_begin_in_text_that_was_sent() -> None:
    assert StopMatch(["abc"], include=False, before="xab").feed("cd") == ("", "abc")
    assert StopMatch(["abc"], include=True, before="xab").feed("cd") == ("c", "abc")


@pytest.mark.parametrize(
    ("reasoning", "content", "full", "missing"),
    [
        ("abc", "", "abcd", "d"),
        ("t", "", "<think>tht", "ht"),
        ("abc", "", "\nabc d</think>e", " d</think>e"),
        ("abc", "de", "abc</think>def", "f"),
        ("abc", "de", "abc</think>\n\ndef", "f"),
        ("", "ab", "abc", "c"),
        ("abx", "", "abc", None),
        ("abc", "x", "abc</think>def", None),
    ],
)
def test_text_that_an_engine_held_back(reasoning: str, content: str, full: str, missing: str | None) -> None:
    text = ReceivedText(MARKER, (), include=False)
    text.note(reasoning, content)
    assert text.missing(full) == missing


def test_a_marker_that_has_come_is_no_missing_text() -> None:
    """An engine that finds the stop strings holds back the text after the marker, and its stream breaks there."""
    text = ReceivedText(MARKER, ["end"], include=False)
    assert text.feed(f"foo{MARKER}", thinking=True) == ("foo", "", None)
    assert text.missing(f"foo{MARKER}ab") == "ab"
    assert text.missing("foo") is None


@pytest.mark.parametrize(("stop", "found"), [("think", True), (">\n", True), ("a<", True), ("a</think>", True)])
def test_stop_strings_that_a_marker_can_complete(stop: str, found: bool) -> None:
    assert touches(stop, MARKER) is found
    assert touches("\n\n", MARKER) is False


def test_a_part_takes_no_longer_the_more_text_there_is() -> None:
    """A copy of the whole text for each part took most of a relay's time at 100,000 tokens."""
    text = ReceivedText(MARKER, (), include=False)
    text.note("x" * 1_000_000, "y" * 1_000_000)
    # The first part may make room for those that follow.
    text.note("x", "y")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            text.note("x", "y")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < 1_000_000
    assert text.missing(f"{'x' * 1_001_001}{MARKER}{'y' * 1_001_001}rest") == "rest"
