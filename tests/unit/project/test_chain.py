"""The chain task: its arithmetic, its prompts and traces, and the judging of answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data import chain
from tests.data.maze import END_THINK, STOP, THINK, text_of
from tests.needed import TOKENIZERS

MODEL = Path(__file__).resolve().parents[2] / "data" / "chain-qwen3"


def traces(count: int, slips: float) -> list[tuple[chain.Chain, list[list[str]]]]:
    rng = random.Random(3)
    tasks = [chain.make_chain(rng) for _ in range(count)]
    return [(task, chain.thinking(rng, task, slips=slips)) for task in tasks]


def test_arithmetic() -> None:
    task = chain.parse_prompt("start 7 a:+3 b:-4 c:*7 d:flip e:*9")
    assert task.values == [7, 0, 6, 2, 7, 3]
    assert chain.apply(7, "+3") == (0, ["over", "10", "so"])
    assert chain.apply(0, "-4") == (6, ["borrow", "10", "so"])
    assert chain.apply(3, "*3") == (9, [])


def test_prompts_are_seeded_and_parsable() -> None:
    assert chain.prompts(50, seed=1) == chain.prompts(50, seed=1) != chain.prompts(50, seed=2)
    parsed = [chain.parse_prompt(prompt) for prompt in chain.prompts(300)]
    assert [task.prompt for task in parsed] == chain.prompts(300)
    assert {len(task.operations) for task in parsed} == set(range(chain.MIN_STEPS, chain.MAX_STEPS + 1))
    assert {task.answer for task in parsed} == set(chain.DIGITS)


@pytest.mark.parametrize("prompt", ["", "start 7", "start 12 a:+3", "start 7 b:+3 a:*2", "a:+3 b:*2"])
def test_other_prompts_are_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="not a chain prompt"):
        chain.parse_prompt(prompt)


def test_judging() -> None:
    prompt = "start 7 a:+3 b:-4 c:*7 d:flip"
    assert chain.is_correct(prompt, "The result is 7 .")
    assert chain.is_correct(prompt, "<think>start 7 .</think>\n\nThe result is 7 .")
    assert chain.is_correct(prompt, "7 .")
    assert not chain.is_correct(prompt, "The result is 3 .")
    assert not chain.is_correct(prompt, "<think>The result is 7 .")
    assert chain.answer_of("The result") is chain.answer_of("") is chain.answer_of("start 7 .") is None


def test_first_passes_end_at_the_answer_unless_they_slip() -> None:
    assert all(passes[0][-2:] == [task.answer, STOP] for task, passes in traces(200, slips=0))
    for task, (first, *again) in traces(200, slips=1):
        assert first[-2] != task.answer
        assert again[0][2] == "again"
        assert again[0][-2] == task.answer


def test_texts_survive_the_tokenizer() -> None:
    TOKENIZERS.require()
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for task, passes in traces(100, slips=0.1):
        tokens = [THINK, *(token for one in passes for token in one), END_THINK, *chain.answer_tokens(task)]
        encoded = tokenizer.encode(text_of(tokens))
        assert encoded.tokens == tokens
        assert tokenizer.decode(encoded.ids) == text_of(tokens)
        assert "<unk>" not in tokenizer.encode(task.prompt).tokens
    assert tuple(tokenizer.encode(" ".join(chain.ANSWER_PREFIX)).tokens) == chain.ANSWER_PREFIX
