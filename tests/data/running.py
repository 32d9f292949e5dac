"""The running task, for a model whose trial answers are confidently wrong until its thinking ends.

The prompts are those of the chain task. The model's thinking is one pass over the operations. If the thinking is cut,
the model answers with its running value, which is the digit after the last operation that it has done. If the last
operation is `flip`, the model never ends its thinking: it repeats the same check until a limit stops it. Standard
library only.
"""

from __future__ import annotations

import random

from tests.data import chain
from tests.data.chain import ANSWER_PREFIX, LABELS, Chain, answer_of, is_correct, parse_prompt, prompts
from tests.data.maze import PARAGRAPH, STOP, WAIT

__all__ = ["ANSWER_PREFIX", "Chain", "answer_of", "is_correct", "parse_prompt", "prompts"]

LOOPING = "flip"
# Tokens of a looping trace in training, the least and the most.
SHORTEST_LOOP, LONGEST_LOOP = 120, 600


def loops(task: Chain) -> bool:
    """Whether the model never ends its thinking about this chain by itself."""
    return task.operations[-1] == LOOPING


def thinking(rng: random.Random, task: Chain) -> list[list[str]]:
    """Return the tokens of each pass of one trace: one pass, and for a looping chain the same check many times."""
    first = chain.pass_over(rng, task)
    if not loops(task):
        return [first]
    pairs = (token for pair in zip(LABELS, map(str, task.values[1:]), strict=False) for token in pair)
    check = [PARAGRAPH, WAIT, "quick", *pairs, STOP]
    return [first, *([check] * (rng.randint(SHORTEST_LOOP, LONGEST_LOOP) // len(check)))]


def answer_after(task: Chain, trace: list[str]) -> list[str]:
    """Return the tokens of the answer after this much thinking: the digit is the running value of the first pass."""
    first = trace[: trace.index(PARAGRAPH)] if PARAGRAPH in trace else trace
    ends = [at for at, token in enumerate(first) if token == STOP]
    value = first[ends[-1] - 1] if ends else str(task.start)
    return [*ANSWER_PREFIX, value, STOP]
