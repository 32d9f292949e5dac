"""What clients ask for, drawn from a seed, and what an answer must be like. Pure but for a tokenizer that is given."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.data import maze

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

START, END, WAIT, FULL_STOP = 4, 5, 9, 8
MARKER = re.compile("</?think>")
THINKING, OPENED, CLOSED = "thinking", "opened", "closed"
TEMPLATES: dict[str, dict[str, Any]] = {
    THINKING: {},
    OPENED: {"open_think": True},
    CLOSED: {"enable_thinking": False},
}
# Prompts whose greedy answers stock vLLM gave beforehand, each in every mode, and the most tokens it gave.
KNOWN = maze.prompts(8, seed=77)
KNOWN_TOKENS = 300
# Words of the vocabulary: two of them with a space between are no text that the tokenizer can write.
CHOICES = ["walk", "where", "ends"]
XARGS: tuple[dict[str, Any], ...] = (
    {"meridian_max_think_tokens": 5},
    {"meridian_max_think_tokens": 40},
    {"meridian_max_think_tokens": 0},
    {"meridian_min_think_tokens": 30, "meridian_tenant": "a"},
    {"meridian_tenant": "b", "meridian_effort": "low"},
    # What clients should not write.
    {"meridian_max_think_tokens": -3},
    {"meridian_max_think_tokens": "many", "meridian_tenant": "x" * 4000},
    {"meridian_max_think_tokens": 1e300, "meridian_min_think_tokens": 0.5},
    {"meridian_min_think_tokens": 2**62, "meridian_slo_class": "\u0000\ud7ff\U0001f600"},
    {"meridian_effort": [1, 2, "high"], "meridian_max_think_tokens": [7]},
)
TOOL_ANSWER = "the walk ends"


@dataclass
class Ask:
    """One request. known: index into KNOWN where stock vLLM's answer is known. leaves_after: pieces of the stream after
    which the client goes away. follow_up: what a tool answers to the first answer, for one more turn."""

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
    """One choice, as the client got it. name: vLLM's for the request."""

    name: str
    tokens: list[int] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    finish: str = ""


def draw(rng: random.Random) -> Ask:
    """A request as some client would make it."""
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
    """Nothing special."""


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
    """The same conversation after a tool has answered."""
    turns = [
        *ask.body["messages"],
        {"role": "assistant", "content": answer.content, "reasoning": answer.reasoning},
        {"role": "tool", "content": ask.follow_up},
    ]
    return Ask("tools", {**ask.body, "messages": turns}, ask.mode)


def complaints(ask: Ask, answer: Answer, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """What is wrong with an answer that was given to the end, whoever governs the engine."""
    found = []
    if answer.finish not in ("stop", "length"):
        found.append(f"finish reason {answer.finish!r}")
    if answer.tokens.count(END) > 1 and ask.known is not None:
        # Where it was cut short on a path it was not taught, the model itself writes another now and then, at once too;
        # that none is forced where nobody thinks is told by the trace.
        found.append(f"{answer.tokens.count(END)} end markers")
    if not 0 < len(answer.tokens) <= ask.body["max_tokens"]:
        found.append(f"{len(answer.tokens)} tokens")
    thinking, saying = split(ask.mode, answer.tokens)
    for name, text, tokens in (("reasoning", answer.reasoning, thinking), ("content", answer.content, saying)):
        # A marker in the midst of either, which the model may draw, is shown or left out by vLLM as its steps fall.
        plain = decode([token for token in tokens if token not in (START, END)])
        if MARKER.sub(" ", text).split() != plain.split():
            found.append(f"{name} is {text[-80:]!r}, its tokens say {plain[-80:]!r}")
    # Who stops in the midst of thinking gives no answer.
    answers = END in answer.tokens or ask.mode == CLOSED
    if ask.choices and answers and answer.finish == "stop" and answer.content.strip() not in ask.choices:
        found.append(f"{answer.content!r} is none of the choices")
    return found


def split(mode: str, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Thinking and answer of generated tokens, as a reader of Qwen3's format has them: markers are neither."""
    if mode == CLOSED:
        return [], tokens
    begun = tokens[1:] if tokens[:1] == [START] else tokens
    end = begun.index(END) if END in begun else len(begun)
    return begun[:end], begun[end + 1 :]


def differs(stock: list[int], tokens: list[int]) -> int | None:
    """Where an answer leaves stock vLLM's; None when it is the same."""
    if tokens == stock:
        return None
    return next((at for at, pair in enumerate(zip(stock, tokens, strict=False)) if pair[0] != pair[1]), len(tokens))


def against_stock(ask: Ask, answer: Answer, stock: list[int], untouched: bool) -> list[str]:
    """Where nothing was decided a greedy answer is stock's; else only an end of thinking may make a difference.

    untouched: nothing of ours was in force while the request lived.
    """
    at = differs(stock, answer.tokens)
    if at is None:
        return []
    place = f"token {at} of {len(stock)}: {answer.tokens[at : at + 4]} instead of {stock[at : at + 4]}"
    if untouched and not ask.own_cap:
        return [f"differs from stock although nothing was decided, {place}"]
    # A forced end writes the marker, or before it what the policy wants to be said: "Wait .", whose first word may be
    # stock vLLM's own.
    thinks = END not in stock[:at] and ask.mode != CLOSED
    said = answer.tokens[max(0, at - 1) : at + 1]
    if not thinks or (said[-1:] not in ([END], [WAIT]) and said != [WAIT, FULL_STOP]):
        return [f"differs from stock other than by an end of thinking, {place}"]
    return []
