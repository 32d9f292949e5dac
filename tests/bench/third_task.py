"""The termination benchmark's judgement of loops, on a model some of whose thinking never ends by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.driver import Batch, Completion

# A tail of this many tokens that repeats with one period is a loop.
LOOP_TOKENS, LONGEST_PERIOD = 160, 64


@dataclass(frozen=True)
class Loops:
    """The effect of the loop breaker on the same requests that ended by themselves or looped without it.

    of: requests that looped until `max_tokens`. ended: those whose thinking the loop breaker ended. false: requests
    that ended their thinking by themselves, and whose thinking the loop breaker ended. other: ended requests that
    neither ended nor looped until `max_tokens`, because they left their loop before. empty: ended requests without an
    answer. rounds, tokens: largest number of rounds and of thinking tokens from a loop's begin to the end of thinking.
    """

    ended: int
    of: int
    false: int
    other: int
    empty: int
    rounds: float
    tokens: int


def broken(natural: Sequence[Completion], batch: Batch) -> Loops:
    """Compare each request with itself under the loop breaker; whether it loops is found in its natural tokens."""
    ended = false = other = empty = tokens = of = 0
    rounds = 0.0
    for free, broken_off in zip(natural, batch.completions, strict=True):
        period, begin = loop_of(free.tokens)
        stopped = broken_off.think_tokens < free.think_tokens
        of += bool(period)
        if period and stopped:
            ended += 1
            empty += broken_off.answer_tokens < 2
            looped = max(0, broken_off.think_tokens - begin)
            rounds, tokens = max(rounds, looped / period), max(tokens, looped)
        elif stopped and broken_off.tokens[: broken_off.think_tokens] == free.tokens[: broken_off.think_tokens]:
            false += free.ended
            other += not free.ended
    return Loops(ended, of, false, other, empty, round(rounds, 1), tokens)


def loop_of(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the period of the tail's loop and the thinking tokens before the loop; the period is 0 without a loop."""
    tail = list(tokens[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return 0, 0
    for period in range(1, LONGEST_PERIOD + 1):
        if tail[period:] == tail[:-period]:
            begin = len(tokens) - LOOP_TOKENS
            while begin and tokens[begin - 1] == tokens[begin - 1 + period]:
                begin -= 1
            return period, begin
    return 0, 0


def answered(completions: Sequence[Completion]) -> float:
    """Return the share of requests with an answer of at least two tokens."""
    return sum(c.ended and c.answer_tokens > 1 for c in completions) / len(completions)
