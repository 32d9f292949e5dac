"""The running task: its traces, the answers after a cut, and the benchmark's judgement of loops."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import third_task
from tests.data import chain, running, train_chain, train_running, training
from tests.data.maze import END_THINK, STOP


def tasks(count: int) -> list[chain.Chain]:
    rng = random.Random(5)
    return [chain.make_chain(rng) for _ in range(count)]


def test_thinking_is_one_pass_and_endless_if_the_last_operation_flips() -> None:
    looping = 0
    for task in tasks(300):
        first, *checks = running.thinking(random.Random(1), task)
        assert first[-2:] == [task.answer, STOP]
        assert bool(checks) == (task.operations[-1] == "flip")
        assert len({tuple(check) for check in checks}) <= 1
        looping += bool(checks)
    assert 10 < looping < 100


def test_a_cut_answers_with_the_running_value() -> None:
    """Each sentence's end adds one operation; a cut inside a sentence leaves the value as it was."""
    for task in tasks(60):
        trace = [token for one in running.thinking(random.Random(2), task) for token in one]
        ends = [at for at, token in enumerate(trace) if token == STOP][: len(task.values)]
        for at in range(len(trace) + 1):
            done = sum(end < at for end in ends)
            value = task.values[max(0, done - 1)]
            assert running.answer_after(task, trace[:at]) == [*running.ANSWER_PREFIX, str(value), STOP]


@pytest.mark.parametrize("cut", [0.0, 1.0])
def test_training_texts_end_as_the_trace_does(cut: float) -> None:
    """A looping trace has no end marker, unless the trace is cut."""
    stage = train_chain.Stage(steps=1, rate=0.0, cut=cut)
    for task in tasks(100):
        text = training.completion(random.Random(3), train_running.RECIPE, task, stage)
        words = [token for token, _ in text]
        assert (END_THINK in words) == (bool(cut) or not running.loops(task))
        assert {(token, wanted) for token, wanted in text if token == END_THINK} == (
            {(END_THINK, not cut)} if END_THINK in words else set()
        )
        if END_THINK in words:
            answer = words[-3]
            thought = words[1 : words.index(END_THINK)]
            kept = [word for word in thought if word in train_running.RECIPE.index]
            assert answer == (running.answer_after(task, kept)[-2] if cut else task.answer)


@pytest.mark.parametrize(("period", "before"), [(1, 0), (7, 30), (32, 5), (64, 1)])
def test_a_loop_in_the_tail_is_found(period: int, before: int) -> None:
    tokens = [*range(1000, 1000 + before), *(list(range(period)) * 400)[:400]]
    assert third_task.loop_of(tokens) == (period, before)


def test_no_loop_is_found_elsewhere() -> None:
    rng = random.Random(4)
    assert third_task.loop_of([rng.randrange(9) for _ in range(500)]) == (0, 0)
    assert third_task.loop_of([1] * 20) == (0, 0)
    assert third_task.loop_of([*[1] * 400, 2]) == (0, 0)


def completion(tokens: list[int], think_tokens: int, answer_tokens: int) -> Any:
    return SimpleNamespace(
        tokens=tuple(tokens), think_tokens=think_tokens, answer_tokens=answer_tokens, ended=answer_tokens > 0
    )


def test_each_request_is_compared_with_itself() -> None:
    """The first request's loop is ended, the second's is not, the third never looped and is cut all the same, and the
    fourth, which leaves its loop and never ends, is cut too."""
    loop, plain = list(range(10)) * 40, list(range(100))
    natural = [completion(loop, 400, 0), completion(loop, 400, 0), completion(plain, 90, 5)]
    natural.append(completion([*loop, *plain], 500, 0))
    now = [completion([*loop[:200], -1, 5, 5], 200, 2), natural[1], completion([*plain[:50], -1, 5], 50, 1)]
    now.append(completion([*loop[:200], -1, 5, 5], 200, 2))
    found = third_task.broken(natural, SimpleNamespace(completions=now))  # type: ignore[arg-type]
    assert found == third_task.Loops(ended=1, of=2, false=1, other=1, empty=0, rounds=20.0, tokens=200)
