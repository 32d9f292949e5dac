"""Blocks of a finished request that no later prompt can hit in the prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.engine.kv_blocks import unreachable_blocks

BLOCKS = [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("reachable", "expected"),
    [
        (0, {10, 11, 12, 13}),
        (15, {10, 11, 12, 13}),
        (16, {11, 12, 13}),
        (17, {11, 12, 13}),
        (32, {12, 13}),
        (64, set()),
        (100, set()),
    ],
)
def test_from_the_first_block_with_a_generated_token_on(reachable: int, expected: set[int]) -> None:
    assert unreachable_blocks(BLOCKS, reachable, 16, lambda _: 1) == expected


def test_shared_blocks_stay() -> None:
    assert unreachable_blocks(BLOCKS, 16, 16, {10: 1, 11: 2, 12: 1, 13: 3}.__getitem__) == {12}


def test_no_blocks() -> None:
    assert unreachable_blocks([], 5, 16, lambda _: 1) == set()


@given(st.integers(1, 64), st.integers(0, 400), st.integers(0, 400), st.sets(st.integers(0, 40)))
def test_no_block_of_the_prompt_and_none_that_is_shared(
    block_size: int, prompt_tokens: int, generated: int, shared: set[int]
) -> None:
    count = -(-(prompt_tokens + generated) // block_size)
    found = unreachable_blocks(list(range(count)), prompt_tokens, block_size, lambda b: 2 if b in shared else 1)
    for block in range(count):
        holds_generated = (block + 1) * block_size > prompt_tokens
        assert (block in found) == (holds_generated and block not in shared)
