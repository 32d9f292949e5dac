"""The termination benchmark's third task: a model whose trial answers are confidently wrong until its thinking ends.

On this task calibration must recommend no rule, because every rule that ends thinking early ends it with a wrong
answer. Loop breaker and answer reserve must still work. Some of the model's thinking never ends by itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.bench import arms
from tests.bench.arms import Arm
from tests.bench.tasks import RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.bench.calibrate import Calibrated
    from tests.bench.driver import Batch, Completion
    from tests.bench.results import Result
    from tests.bench.termination import Measurement

FOREIGN, LOOPS = "the maze's policy", "loop breaker"
NO_RESERVE, RESERVE = "max_tokens below the thinking", "answer reserve"
BREAKER: dict[str, Any] = {**arms.NATURAL, "loop": {"shadow": False}}
# Tokens of a short request, of which the second number is kept for the answer.
SHORT_TOKENS, RESERVED_TOKENS = 48, 8
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


@dataclass(frozen=True)
class ThirdFindings:
    """recommended: the rule that calibration recommends, empty if it recommends none. why_not: the signals that do not
    tell right stops from wrong ones. answered: share of short requests with an answer, by arm."""

    results: list[Result]
    recommended: str
    why_not: dict[str, str]
    loops: Loops
    answered: dict[str, float]

    def of(self, name: str) -> Result:
        return next(r for r in self.results if r.name == name)


def measure(made: Measurement, requests: int, foreign: dict[str, Any]) -> ThirdFindings:
    """Run the task's arms. requests: number of requests of the calibration. foreign: a policy made for another
    task."""
    made.run_natural()
    calibrated = made.calibrate(requests)
    foreign = arms.with_answer_prefix(foreign, RUNNING.name, RUNNING.answer_prefix)
    made.run(Arm(FOREIGN, foreign, None, "a policy that was calibrated on another task"))
    made.run(Arm(LOOPS, BREAKER, None, "loop.shadow = false, no other rule"))
    reserve = {**arms.NATURAL, "scheduler": {"min_think_tokens": 0, "answer_reserve_tokens": RESERVED_TOKENS}}
    made.run(Arm(NO_RESERVE, arms.NATURAL, None, f"max_tokens = {SHORT_TOKENS}", SHORT_TOKENS))
    note = f"max_tokens = {SHORT_TOKENS}, scheduler.answer_reserve_tokens = {RESERVED_TOKENS}"
    made.run(Arm(RESERVE, reserve, None, note, SHORT_TOKENS))
    made.write_requests()
    return ThirdFindings(
        made.results,
        calibrated.rule if calibrated.recommends else "",
        _why_not(calibrated),
        broken(made.natural.completions, made.batches[LOOPS]),
        {name: answered(made.batches[name].completions) for name in (NO_RESERVE, RESERVE)},
    )


def _why_not(calibrated: Calibrated) -> dict[str, str]:
    return {s["signal"]: s["why_not"] for s in calibrated.report["signals"] if s["why_not"]}


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


def summary(found: ThirdFindings) -> dict[str, Any]:
    """Return the task's part of the last line."""
    return {
        "natural": found.of("natural").short(),
        "policy_of_the_first_task": found.of(FOREIGN).short(),
        "loop_breaker": found.of(LOOPS).short(),
        "recommended": found.recommended or "nothing",
        "answered_without_reserve": round(found.answered[NO_RESERVE], 4),
        "answered_with_reserve": round(found.answered[RESERVE], 4),
    }


def loops(found: ThirdFindings) -> dict[str, int]:
    return {"ended": found.loops.ended, "of": found.loops.of, "false": found.loops.false}


def plain(found: ThirdFindings) -> dict[str, Any]:
    """Return all figures as plain values."""
    return {
        "task": RUNNING.name,
        "arms": [r.plain() for r in found.results],
        "recommended": found.recommended,
        "why_not": found.why_not,
        "loops": asdict(found.loops),
        "answered": found.answered,
    }


def lines(found: ThirdFindings) -> Iterator[str]:
    """Yield the task's section of the report in Markdown."""
    of = found.loops
    yield f"Calibration on other requests of this task recommends {found.recommended or 'no rule'}."
    yield from (f"- {signal}: {why}" for signal, why in found.why_not.items())
    yield ""
    yield (
        f"The loop breaker ended {of.ended} of {of.of} loops, at most {of.tokens} tokens and {of.rounds:g} rounds "
        f"after a loop's begin; {of.empty} of the ended requests had no answer. It ended the thinking of {of.false} "
        f"requests that end it by themselves, and of {of.other} others that never end it but leave their loop."
    )
    yield ""
    yield (
        f"{found.answered[NO_RESERVE]:.1%} of the requests with max_tokens = {SHORT_TOKENS} had an answer without a "
        f"reserve, and {found.answered[RESERVE]:.1%} with a reserve of {RESERVED_TOKENS} tokens."
    )
