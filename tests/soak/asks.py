"""The requests of clients, drawn from a seed, and the checks of an answer. Pure, apart from the tokenizer passed in."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.data import maze

START, END, WAIT, FULL_STOP = 4, 5, 9, 8
MARKER = re.compile("</?think>")
THINKING, OPENED, CLOSED = "thinking", "opened", "closed"
TEMPLATES: dict[str, dict[str, Any]] = {
    THINKING: {},
    OPENED: {"open_think": True},
    CLOSED: {"enable_thinking": False},
}
# Prompts whose greedy answers stock vLLM gave beforehand, in every mode, and the largest number of tokens it gave.
KNOWN = maze.prompts(4, seed=77)
KNOWN_TOKENS = 300
# Words of the vocabulary; the tokenizer cannot write a text with two of them and a space between.
CHOICES = ["walk", "where", "ends"]
XARGS: tuple[dict[str, Any], ...] = (
    {"meridian_max_think_tokens": 5},
    {"meridian_max_think_tokens": 40},
    {"meridian_max_think_tokens": 0},
    {"meridian_min_think_tokens": 30, "meridian_tenant": "a"},
    {"meridian_tenant": "b", "meridian_effort": "low"},
    # Values that clients should not send.
    {"meridian_max_think_tokens": -3},
    {"meridian_max_think_tokens": "many", "meridian_tenant": "x" * 4000},
    {"meridian_max_think_tokens": 1e300, "meridian_min_think_tokens": 0.5},
    {"meridian_min_think_tokens": 2**62, "meridian_slo_class": "\u0000\ud7ff\U0001f600"},
    {"meridian_effort": [1, 2, "high"], "meridian_max_think_tokens": [7]},
)
TOOL_ANSWER = "the walk ends"


@dataclass
class Ask:
    """One request.

    known: index into KNOWN if stock vLLM's answer is known. leaves_after: number of stream pieces after which the
    client disconnects. follow_up: a tool's answer to the first answer, for one more turn.
    """

    kind: str
    body: dict[str, Any]
    mode: str = THINKING
    known: int | None = None
    leaves_after: int | None = None
    choices: list[str] = field(default_factory=list)
    follow_up: str = ""

    @property
    def own_cap(self) -> bool:
        return "meridian_max_think_tokens" in self.body.get("vllm_xargs", {})


@dataclass
class Answer:
    """One choice as the client received it. name: vLLM's id of the request."""

    name: str
    tokens: list[int] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    finish: str = ""


def draw(rng: random.Random) -> Ask:
    """Draw a request as a client might send it."""
    known = rng.randrange(len(KNOWN)) if rng.random() < 0.5 else None
    prompt = KNOWN[known] if known is not None else maze.prompts(1, seed=rng.randrange(10_000))[0]
    mode = rng.choice((THINKING, OPENED, OPENED, CLOSED))
    greedy = known is not None or rng.random() < 0.3
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0 if greedy else rng.choice((0.5, 1.0, 1.0)),
        "max_tokens": KNOWN_TOKENS if known is not None else rng.choice((1, 20, 150, 300, 600)),
    }
    if TEMPLATES[mode]:
        body["chat_template_kwargs"] = TEMPLATES[mode]
    ask = Ask("greedy" if greedy else "sampled", body, mode, known)
    if not greedy and rng.random() < 0.3:
        body["seed"] = rng.randrange(1000)
    {0: _leaves, 1: _several, 2: _structured, 3: _tools, 4: _says, 5: _says}.get(rng.randrange(12), _as_it_is)(ask, rng)
    return ask


def _as_it_is(ask: Ask, rng: random.Random) -> None:
    """Leave the request as it is."""


def _leaves(ask: Ask, rng: random.Random) -> None:
    ask.kind, ask.leaves_after = "aborted", rng.choice((0, 1, 2, 5, 20, 60, 150))


def _several(ask: Ask, rng: random.Random) -> None:
    ask.kind, ask.known = "several", None
    ask.body |= {"n": rng.choice((2, 3)), "temperature": 1.0}


def _structured(ask: Ask, rng: random.Random) -> None:
    ask.kind, ask.known, ask.choices = "structured", None, CHOICES
    ask.body |= {"structured_outputs": {"choice": CHOICES}, "max_tokens": 600}


def _tools(ask: Ask, rng: random.Random) -> None:
    ask.kind, ask.follow_up = "tools", TOOL_ANSWER


def _says(ask: Ask, rng: random.Random) -> None:
    ask.kind = "xargs"
    ask.body["vllm_xargs"] = rng.choice(XARGS)


def next_turn(ask: Ask, answer: Answer) -> Ask:
    """Return the next turn of the conversation, after a tool has answered."""
    turns = [
        *ask.body["messages"],
        {"role": "assistant", "content": answer.content, "reasoning": answer.reasoning},
        {"role": "tool", "content": ask.follow_up},
    ]
    return Ask("tools", {**ask.body, "messages": turns}, ask.mode)


def complaints(ask: Ask, answer: Answer, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return what is wrong with a complete answer, whether or not the engine is governed."""
    found = []
    if answer.finish not in ("stop", "length"):
        found.append(f"finish reason {answer.finish!r}")
    if answer.tokens.count(END) > 1 and ask.known is not None:
        # Only known prompts are checked: on a path cut short that it was not trained on, the model sometimes writes
        # another end marker itself. The trace shows that none is forced outside thinking.
        found.append(f"{answer.tokens.count(END)} end markers")
    if not 0 < len(answer.tokens) <= ask.body["max_tokens"]:
        found.append(f"{len(answer.tokens)} tokens")
    thinking, saying = split(ask.mode, answer.tokens)
    for name, text, tokens in (("reasoning", answer.reasoning, thinking), ("content", answer.content, saying)):
        # If the model draws a marker inside either part, vLLM shows it or not depending on its steps, so it is left
        # out.
        plain = decode([token for token in tokens if token not in (START, END)])
        if MARKER.sub(" ", text).split() != plain.split():
            found.append(f"{name} is {text[-80:]!r}, its tokens say {plain[-80:]!r}")
    # A request that stops in the middle of thinking gives no answer.
    answers = END in answer.tokens or ask.mode == CLOSED
    if ask.choices and answers and answer.finish == "stop" and answer.content.strip() not in ask.choices:
        found.append(f"{answer.content!r} is none of the choices")
    return found


def split(mode: str, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Split generated tokens into thinking and answer, as a reader of Qwen3's format does; markers belong to
    neither."""
    if mode == CLOSED:
        return [], tokens
    begun = tokens[1:] if tokens[:1] == [START] else tokens
    end = begun.index(END) if END in begun else len(begun)
    return begun[:end], begun[end + 1 :]


def differs(stock: list[int], tokens: list[int]) -> int | None:
    """Return the index of the first token that differs from stock vLLM's, or None if the answers are equal."""
    if tokens == stock:
        return None
    return next((at for at, pair in enumerate(zip(stock, tokens, strict=False)) if pair[0] != pair[1]), len(tokens))


def against_stock(ask: Ask, answer: Answer, stock: list[int], untouched: bool) -> list[str]:
    """Check a greedy answer: without a decision it equals stock's, otherwise only an end of thinking may make a
    difference.

    untouched: no decision was in force while the request lived.
    """
    at = differs(stock, answer.tokens)
    if at is None:
        return []
    place = f"token {at} of {len(stock)}: {answer.tokens[at : at + 4]} instead of {stock[at : at + 4]}"
    # The default answer reserve, a quarter of so few tokens, needs no decision. An agent that was off when the reserve
    # began ends thinking as soon as it is on again.
    reserved = at >= KNOWN_TOKENS - KNOWN_TOKENS // 4 and answer.tokens[at : at + 1] == [END]
    if untouched and not (ask.own_cap or reserved):
        return [f"differs from stock although nothing was decided, {place}"]
    # A forced end writes the marker, or first the policy's closing text "Wait .", whose first word may be stock vLLM's
    # own.
    thinks = END not in stock[:at] and ask.mode != CLOSED
    said = answer.tokens[max(0, at - 1) : at + 1]
    if not thinks or (said[-1:] not in ([END], [WAIT]) and said != [WAIT, FULL_STOP]):
        return [f"differs from stock other than by an end of thinking, {place}"]
    return []
