"""Exact cycles of tokens are found, the shortest of them, and nothing else is; repeated sequences are counted."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meridian_agent.core.token_cycles import (
    DIFFERENT_TOKENS,
    KEPT_TOKENS,
    LOOK_TOKENS,
    MAX_NEW_TOKENS,
    MAX_PERIOD,
    MIN_ROUNDS,
    MIN_TOKENS,
    REPEAT_WINDOW,
    SEQUENCE_SLOTS,
    SEQUENCE_TOKENS,
    SUFFIX_TOKENS,
    RepeatCount,
    TokenCycle,
    TokenTail,
    weight,
)

if TYPE_CHECKING:
    import random


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
@settings(max_examples=400)
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
    assert found.rounds >= MIN_ROUNDS


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
@settings(max_examples=30)
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
    tail, text = TokenTail(), list(range(100_000))
    for end in range(0, len(text), LOOK_TOKENS):
        tail.take(text[:end])
    assert len(tail._text) <= (2 * KEPT_TOKENS + LOOK_TOKENS) * 4


# ------------------------------------------------------------------------------------------------- repeated sequences


def repeated_slowly(tokens: list[int]) -> int:
    """Count with a set of all sequences, which forgets none."""
    seen, hits = set[tuple[int, ...]](), list[bool]()
    for end in range(SEQUENCE_TOKENS, len(tokens) + 1):
        sequence = tuple(tokens[end - SEQUENCE_TOKENS : end])
        hits.append(sequence in seen and len(set(sequence)) >= DIFFERENT_TOKENS)
        seen.add(sequence)
    return sum(hits[-REPEAT_WINDOW:])


def count_of(tokens: list[int], *ends: int) -> int:
    """Count the text's repeated tokens, taken in at these ends, or in steps of LOOK_TOKENS."""
    count, found = RepeatCount(), 0
    for end in ends or (*range(0, len(tokens), LOOK_TOKENS), len(tokens)):
        found = count.take(tokens[:end])
    return found


@given(st.lists(st.integers(1, MAX_NEW_TOKENS), min_size=1, max_size=5))
@settings(max_examples=50)
def test_repeated_tokens_are_the_same_however_they_arrive(lengths: list[int]) -> None:
    tokens = [token for name in range(1000, 1012) for token in (*range(60), name)]
    ends = [0]
    while ends[-1] < len(tokens):
        ends.append(min(len(tokens), ends[-1] + lengths[len(ends) % len(lengths)]))
    assert count_of(tokens, *ends) == count_of(tokens)


@given(st.integers(20, 600), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_table_forgets_few_sequences_of_a_round(length: int, rng: random.Random) -> None:
    """Two sequences that share a place of the table displace each other, so a few repeated tokens are missed."""
    round_ = [rng.randrange(50_000) for _ in range(length)]
    tokens = [token for name in range(50_000, 50_000 + 3000 // length) for token in (*round_, name)]
    assert 0.8 * repeated_slowly(tokens) <= count_of(tokens) <= repeated_slowly(tokens) + 2


def test_only_the_newest_tokens_count_as_repeated() -> None:
    looping = list(range(40)) * 60
    assert count_of(looping) == REPEAT_WINDOW
    assert count_of(looping + list(range(1000, 1000 + REPEAT_WINDOW // 2))) == REPEAT_WINDOW // 2
    assert count_of(looping + list(range(1000, 1000 + REPEAT_WINDOW))) == 0


def test_sequences_of_few_different_tokens_do_not_count_as_repeated() -> None:
    assert count_of([0, 1, 2, 3] * 400) == 0
    assert count_of([0, 1, 2, 3, 4] * 400) == REPEAT_WINDOW


def test_a_count_begins_anew_after_a_gap_and_after_tokens_were_taken_back() -> None:
    looping = list(range(40)) * 60
    count = RepeatCount()
    assert count.take(looping) == MAX_NEW_TOKENS - 40 - SEQUENCE_TOKENS + 1
    before = count.take(looping + looping[:20])
    assert before == MAX_NEW_TOKENS - 40 - SEQUENCE_TOKENS + 1 + 20
    assert count.take(looping) == MAX_NEW_TOKENS - 40 - SEQUENCE_TOKENS + 1


def test_memory_of_sequences_stays_bounded() -> None:
    count, text = RepeatCount(), list(range(100_000))
    for end in range(0, len(text), LOOK_TOKENS):
        count.take(text[:end])
    assert len(count._seen) == SEQUENCE_SLOTS
    assert count._bits.bit_length() <= REPEAT_WINDOW
