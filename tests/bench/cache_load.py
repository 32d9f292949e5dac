"""Chats for the cache benchmark: the prompt of each turn, which depends on the answers to the turns before it.

The chats are seeded. The module does not use an engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tests.bench.random_model import FIRST_WORD, LAST_WORD, TOOL_CALL
from tests.bench.streamed import BLOCK_TOKENS, Request

if TYPE_CHECKING:
    from numpy.random import Generator

    from tests.bench.streamed import Timeline

SYSTEM_PROMPTS, SYSTEM_TOKENS = 3, 300
# A drawn length differs from its mean by at most this fraction.
VARIATION = 0.25
TEMPLATE: dict[str, Any] = {"add_generation_prompt": True, "open_think": True}


@dataclass(frozen=True)
class Lengths:
    """Mean lengths in tokens. says: a user's turn or a tool's result."""

    chats: int
    turns: int
    says: int
    think: int
    answer: int


MULTI_TURN = Lengths(chats=24, turns=4, says=40, think=200, answer=40)
TOOL_LOOP = Lengths(chats=16, turns=5, says=40, think=80, answer=16)


class Chat(Protocol):
    """One conversation: `next` returns the request of the next turn, or None at the end; `took` receives its
    timeline."""

    def next(self) -> Request | None: ...

    def took(self, timeline: Timeline) -> None: ...


class Drawn:
    """Draws the random words and lengths of one chat."""

    def __init__(self, tokenizer: Any, seed: list[int]) -> None:
        self._tokenizer, self._rng = tokenizer, np.random.default_rng(seed)

    def words(self, count: int) -> str:
        return words(self._tokenizer, self._rng, count)

    def length(self, mean: int) -> int:
        return int(self._rng.integers(round(mean * (1 - VARIATION)), round(mean * (1 + VARIATION)), endpoint=True))


def words(tokenizer: Any, rng: Generator, count: int) -> str:
    drawn = rng.integers(FIRST_WORD, LAST_WORD, count, endpoint=True).tolist()
    return " ".join(tokenizer.convert_ids_to_tokens(drawn))


def system_prompts(tokenizer: Any, seed: int) -> list[str]:
    return [words(tokenizer, np.random.default_rng([seed, i]), SYSTEM_TOKENS) for i in range(SYSTEM_PROMPTS)]


class MultiTurn:
    """A chat in which a user asks, reads the answer and asks again. The chat template strips thinking from earlier
    turns."""

    def __init__(self, tokenizer: Any, name: str, system: str, seed: list[int]) -> None:
        self._tokenizer, self._name, self._drawn = tokenizer, name, Drawn(tokenizer, seed)
        self._messages = [{"role": "system", "content": system}]
        self._turn = 0

    def next(self) -> Request | None:
        if self._turn == MULTI_TURN.turns:
            return None
        drawn, shape = self._drawn, MULTI_TURN
        self._messages.append({"role": "user", "content": drawn.words(drawn.length(shape.says))})
        ids = self._tokenizer.apply_chat_template(self._messages, return_dict=False, **TEMPLATE)
        self._turn += 1
        name = f"{self._name}-{self._turn}"
        return Request(name, tuple(ids), drawn.length(shape.think), drawn.length(shape.answer))

    def took(self, timeline: Timeline) -> None:
        answer = timeline.tokens[timeline.request.think_tokens + 1 :]
        self._messages.append({"role": "assistant", "content": self._tokenizer.decode(list(answer))})


class ToolLoop:
    """A chat of one question, in which every turn but the last ends with a tool call.

    Each prompt repeats all the tokens generated so far, thinking included, because Qwen3's template keeps them until
    the next question.
    """

    def __init__(self, tokenizer: Any, name: str, system: str, seed: list[int]) -> None:
        self._tokenizer, self._name, self._drawn = tokenizer, name, Drawn(tokenizer, seed)
        question = self._drawn.words(self._drawn.length(TOOL_LOOP.says))
        turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        self._ids = list(tokenizer.apply_chat_template(turns, return_dict=False, **TEMPLATE))
        self._tool_call = tokenizer.convert_tokens_to_ids(TOOL_CALL)
        self._turn = 0

    def next(self) -> Request | None:
        if self._turn == TOOL_LOOP.turns:
            return None
        self._turn += 1
        ends_with = self._tool_call if self._turn < TOOL_LOOP.turns else None
        drawn, name = self._drawn, f"{self._name}-{self._turn}"
        lengths = drawn.length(TOOL_LOOP.think), drawn.length(TOOL_LOOP.answer)
        return Request(name, tuple(self._ids), *lengths, ends_with)

    def took(self, timeline: Timeline) -> None:
        result = self._drawn.words(self._drawn.length(TOOL_LOOP.says))
        tail = f"<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n<think>"
        self._ids += [*timeline.tokens, *self._tokenizer.encode(tail, add_special_tokens=False)]


KINDS: dict[str, tuple[type[MultiTurn] | type[ToolLoop], Lengths]] = {
    "multi-turn": (MultiTurn, MULTI_TURN),
    "tool loop": (ToolLoop, TOOL_LOOP),
}


def chats(kind: str, tokenizer: Any, seed: int) -> list[Chat]:
    """Return all chats of a run; the same seed always gives the same words and lengths."""
    make, shape = KINDS[kind]
    systems = system_prompts(tokenizer, seed)
    return [
        make(tokenizer, f"{kind}-{seed}-{i}", systems[i % SYSTEM_PROMPTS], [seed, SYSTEM_PROMPTS, i])
        for i in range(shape.chats)
    ]


def reachable_blocks(users: int) -> int:
    """Return the number of blocks with which an ideal cache would compute no prefix twice.

    The blocks hold every multi-turn chat's last prompt, each system prompt once, and the tokens that `users` requests
    generate.
    """
    shape = MULTI_TURN
    own = shape.turns * shape.says + (shape.turns - 1) * shape.answer
    running = users * math.ceil((shape.think + shape.answer) / BLOCK_TOKENS)
    systems = SYSTEM_PROMPTS * math.ceil(SYSTEM_TOKENS / BLOCK_TOKENS)
    return shape.chats * math.ceil(own / BLOCK_TOKENS) + systems + running
