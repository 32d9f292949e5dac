"""Compare the orders in which blocks of the prefix cache are reused, on a real engine: `make bench-cache`.

The protocol is in tests/bench/cache.md.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from tests.bench import harness, random_model, scheduling_runs
from tests.bench.harness import Column, Figures, Session
from tests.bench.random_model import FIRST_WORD, LAST_WORD, TOOL_CALL
from tests.bench.scheduling_runs import STOCK
from tests.bench.streamed import BLOCK_TOKENS, Request, Setup, StreamedEngine, Timeline

USERS, WARM_REQUESTS = 8, 8
LRU, TIERS = "LRU", "tiers"
CHATS, TOOLS = "multi-turn", "tool loop"
# All arms keep vLLM's own dispatch order, so that only the reuse of cached blocks differs.
POLICIES = {LRU: STOCK, TIERS: {**STOCK, "kv_memory": {"enabled": True}}}
COLUMNS = (
    Column("hit_rate", "hit rate, %", 1, "difference", 100),
    Column("prefill_tokens", "prompt tokens computed", 0, "ratio"),
    Column("ttft_p50_ms", "TTFT P50, ms", 1, "ratio"),
    Column("ttft_p95_ms", "P95", 1, "ratio"),
    Column("throughput_tokens_per_s", "tokens/s", 0),
    Column("blocks_reclaimed", "blocks reclaimed", 0),
    Column("preempted", "preempted", 0),
    Column("kv_peak", "KV peak", 2),
)

# ---------------------------------------------------------------------------------------------------------------- load

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
    CHATS: (MultiTurn, MULTI_TURN),
    TOOLS: (ToolLoop, TOOL_LOOP),
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


# ------------------------------------------------------------------------------------------------------------ the arms


async def run_chats(running: StreamedEngine, arm: str, kind: str, tokenizer: Any, seed: int) -> Figures:
    """Run all chats of one kind, in turns in a fixed order and with USERS requests in flight."""
    waiting = deque(chats(kind, tokenizer, seed))
    await running.begin(POLICIES[arm])
    before, done = running.counters(), list[Timeline]()

    async def user() -> None:
        while waiting:
            chat = waiting.popleft()
            if (request := chat.next()) is None:
                continue
            timeline = await running.stream(request)
            chat.took(timeline)
            done.append(timeline)
            waiting.append(chat)

    began_s = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(USERS)))
    wall_s = time.perf_counter() - began_s
    after, meter = running.counters(), running.meter
    ttft_ms = np.array([t.times_s[0] - t.due_s for t in done]) * 1e3
    reclaimed = after.blocks_reclaimed - before.blocks_reclaimed if before is not None and after is not None else 0
    return {
        "hit_rate": meter.hits / meter.queries,
        "prefill_tokens": meter.queries - meter.hits,
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p95_ms": float(np.percentile(ttft_ms, 95)),
        "throughput_tokens_per_s": sum(len(t.tokens) for t in done) / wall_s,
        "kv_peak": meter.kv_peak,
        "preempted": meter.preempted,
        "blocks_reclaimed": reclaimed,
    }


async def measure(session: Session) -> dict[str, Any]:
    from transformers import AutoTokenizer

    options, runs = session.options, session.runs
    model = random_model.make(session.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    blocks = {share: round(share * reachable_blocks(USERS)) + 1 for share in (options.share, *options.other_shares)}
    for share, size in blocks.items():
        main = share == options.share
        with closing(StreamedEngine(Setup(model, size), session.folder / f"{share:g}")) as running:
            await scheduling_runs.warm(running, WARM_REQUESTS)
            for kind in KINDS if main else (CHATS,):

                async def run(arm: str, seed: int, kind: str = kind, running: StreamedEngine = running) -> Figures:
                    return await run_chats(running, arm, kind, tokenizer, seed)

                case = kind if main else f"{kind}, {share:g} of the KV blocks"
                await session.rounds(list(POLICIES), run, options.repetitions if main else 1, case=case)
    text = f"{blocks[options.share]} KV blocks of {BLOCK_TOKENS} tokens; `--repetitions {options.repetitions}`."
    session.table("Arms", text, COLUMNS, LRU)
    gained = runs.difference(TIERS, LRU, "hit_rate", CHATS)
    ttft = runs.ratio(TIERS, LRU, "ttft_p50_ms", CHATS)
    tools = runs.difference(TIERS, LRU, "hit_rate", TOOLS)
    session.goal("multi-turn hit rate over LRU", ">= 6 points", gained, 1, 100)
    session.goal("multi-turn TTFT P50 over LRU", "<= 0.9", ttft, 2)
    session.goal("tool-loop hit rate over LRU", ">= -0.5 points", tools, 1, 100)
    names = ("hit_rate", "prefill_tokens", "ttft_p50_ms", "ttft_p95_ms")
    arms = {
        arm: {kind: {name: runs.median(arm, name, kind).rounded() for name in names} for kind in KINDS}
        for arm in POLICIES
    }
    ratios = {"hit_rate": round(100 * gained.value, 2), "ttft_p50": ttft.rounded()}
    ratios |= {"tool_loop_hit_rate": round(100 * tools.value, 2)}
    ratios |= {"tool_loop_ttft_p50": runs.ratio(TIERS, LRU, "ttft_p50_ms", TOOLS).rounded()}
    return {"arms": arms, "ratios": ratios}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repetitions", type=int, default=3, help="runs of each arm, each with its own seed")
    add("--share", type=float, default=1.0, help="KV blocks, as a share of those with which nothing is computed twice")
    add("--other-shares", type=float, nargs="*", default=[0.75, 1.5], help="further sizes, measured once each")
    add("--quick", action="store_true", help="run one repetition of one size")


def check(_: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.quick:
        given.repetitions, given.other_shares = 1, []


if __name__ == "__main__":
    harness.main("cache", "Prefix cache", __doc__, options, measure, calm=True, check=check)
