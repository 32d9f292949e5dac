"""Exact cycles of tokens are found, the shortest of them, and nothing else is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meridian_agent.core.token_cycles import (
    KEPT_TOKENS,
    LOOK_TOKENS,
    MAX_PERIOD,
    MIN_ROUNDS,
    MIN_TOKENS,
    SUFFIX_TOKENS,
    TokenCycle,
    TokenTail,
    weight,
)


def tail_of(tokens: list[int]) -> TokenTail:
    tail = TokenTail()
    tail.take(tokens)
    return tail


def slowly(tokens: list[int]) -> TokenCycle | None:
    """Compare the text with itself at each distance, one token after the other."""
    tokens, found = tokens[-KEPT_TOKENS:], list[TokenCycle]()
    for period in range(1, MAX_PERIOD + 1):
        matches = 0
        while matches + period < len(tokens) and tokens[-1 - matches] == tokens[-1 - matches - period]:
            matches += 1
        if matches + period >= max(MIN_ROUNDS * period, MIN_TOKENS):
            found.append(TokenCycle(period, matches + period))
    return max(found, key=lambda cycle: (weight(cycle), -cycle.period), default=None)


@given(
    before=st.lists(st.integers(0, 3), max_size=60),
    cycle=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    rounds=st.integers(1, 5),
    after=st.lists(st.integers(0, 3), max_size=3),
)
@settings(max_examples=150)
def test_it_finds_what_comparing_every_place_finds(
    before: list[int], cycle: list[int], rounds: int, after: list[int]
) -> None:
    tokens = before + cycle * rounds + after
    assert tail_of(tokens).cycle(len(tokens)) == slowly(tokens)


@pytest.mark.parametrize("period", [1, 2, 15, 16, 17, 31, 32, 33, 255, 511, MAX_PERIOD])
def test_every_period_is_found_in_its_second_round(period: int) -> None:
    cycle = list(range(1000, 1000 + period))
    text = [*range(700), *cycle * MIN_ROUNDS, *cycle[:SUFFIX_TOKENS]]
    text += (cycle * MIN_TOKENS)[SUFFIX_TOKENS % period :][:MIN_TOKENS]
    found = tail_of(text).cycle(len(text))
    assert found is not None
    assert found.period == period
    assert found.tokens >= MIN_ROUNDS * period


def test_a_longer_period_is_none() -> None:
    text = list(range(MAX_PERIOD + 1)) * 5
    assert tail_of(text).cycle(len(text)) is None


def test_a_cycle_in_which_every_part_occurs_twice() -> None:
    """Each run of 20 tokens of it stands at two places of a round, so the nearest occurrence is not the period."""
    junction, one, other = list(range(40)), [100], [200]
    cycle = [*junction, *one, *junction, *one, *junction, *other, *junction, *other]
    text = cycle * 4
    assert tail_of(text).cycle(len(text)) == TokenCycle(len(cycle), len(text))


def test_a_short_cycle_at_the_end_of_a_long_one() -> None:
    """The long round ends in a short one, a hundred times: that is the loop, whatever the long one does."""
    cycle = [*range(200), *[1, 2, 3] * 100]
    assert tail_of(cycle * 2).cycle(1000) == TokenCycle(3, 300)


def test_tokens_before_the_thinking_do_not_count() -> None:
    text = [1, 2, 3] * 100
    assert tail_of(text).cycle(90) == TokenCycle(3, 90)
    assert tail_of(text).cycle(MIN_TOKENS - 1) is None


@given(st.lists(st.integers(0, 2**31 - 1), max_size=3 * KEPT_TOKENS), st.data())
@settings(max_examples=15)
def test_taken_in_parts_or_at_once_is_the_same(tokens: list[int], data: st.DataObject) -> None:
    tokens = tokens * 3
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=20)))
    parts = TokenTail()
    for begin, end in pairwise([0, *cuts, len(tokens)]):
        assert begin <= end
        parts.take(tokens[:end])
    assert parts.taken == len(tokens)
    assert parts.cycle(len(tokens)) == tail_of(tokens).cycle(len(tokens))


def test_tokens_that_are_taken_back_are_forgotten() -> None:
    tail = tail_of([1, 2] * 50 + [9] * 40)
    tail.take([1, 2] * 50)
    assert tail.cycle(100) == TokenCycle(2, 100)


def test_memory_stays_bounded() -> None:
    tail, text = TokenTail(), list(range(8 * KEPT_TOKENS))
    for end in range(0, len(text), LOOK_TOKENS):
        tail.take(text[:end])
    assert len(tail._text) <= (2 * KEPT_TOKENS + LOOK_TOKENS) * 4
