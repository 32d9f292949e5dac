"""Measure the gap between thinking and answer if another engine answers: `make bench-handover`.

The protocol is in tests/bench/handover.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiohttp
import numpy as np

from tests.bench import harness, random_model, scheduling_load
from tests.bench.harness import BenchError, Column
from tests.engine.pools import PLACES, POLICY, RELAY, Pools
from tests.needed import NIXL
from tests.processes import Process, free_port, wait_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from tests.bench.harness import Figures, Session
    from tests.bench.streamed import Request

    Send = Callable[[Request], Awaitable["Said"]]

T = TypeVar("T")
# Thinking tokens of a request, which its own cap ends, and the tokens of its answer.
THINKING, ANSWER = 34, 20
LENGTHS, CONTEXT = (300, 1000, 2000, 4000), 4096
TRANSFER, RECOMPUTE, ONE_ENGINE = ARMS = ("transfer", "recompute", "one_engine")
# Median answer tokens of the load of the scheduling benchmark, and of one whose answers are as long as its thinking;
# and shares of the mixed pool's capacity.
LOADS, SHARES = {"thinking is long": 40, "answers are as long": 100}, (0.7, 1.0)
MIXED, SPLIT = "mixed", "two pools"
POLICIES: dict[str, dict[str, Any]] = {MIXED: {"entropy": {"enabled": False}}, SPLIT: POLICY}
# The thinking engine is above this share of its KV cache (`pools.POLICY`) from its first requests on, and the answering
# engine, with its larger cache, never is.
BLOCKS = {"A": 1024, "B": 9600}
CAPACITY_SEED = 99
# Requests of the closed loop that measures the capacity, for each place of both engines.
ROUNDS = 3
GAPS = (Column("gap_ms", "gap, ms", 0, "ratio"), Column("equal", "equal answers", 2))
POOLS = (
    Column("itl_p99", "answer gap P99, ms", 0, "ratio"),
    Column("ttot_p99", "TTOT P99, ms", 0, "ratio"),
    Column("throughput", "output tokens/s", 0, "ratio"),
    Column("capacity", "capacity, requests/s", 2, "ratio"),
)


# ---------------------------------------------------------------------------------------------------------------- gaps


class Said(NamedTuple):
    """One streamed request: its text, its token ids if they were asked for, the times of the last chunk of its thinking
    and of each chunk of its answer, in seconds of one clock, and its output tokens, as vLLM's usage counts them."""

    text: str
    tokens: list[int]
    thought_s: float
    answer_s: list[float]
    output_tokens: int

    @property
    def gap_s(self) -> float:
        """The seconds between thinking and answer."""
        return self.answer_s[0] - self.thought_s


async def streamed(
    session: aiohttp.ClientSession, port: int, path: str, **fields: Any
) -> AsyncIterator[tuple[dict[str, Any], float]]:
    """Send a request, and yield each chunk of its answer with the time at which it came. Raises RuntimeError if the
    request fails."""
    body = {"model": "maze", "stream": True, "temperature": 0.0, "ignore_eos": True, **fields}
    async with session.post(f"http://127.0.0.1:{port}/v1/{path}", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {await reply.text()}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"a stream failed: {chunk['error']}")
                yield chunk, time.perf_counter()


async def ask(
    session: aiohttp.ClientSession, port: int, words: str, think: int = THINKING, answer: int = ANSWER, **more: Any
) -> Said:
    """Send one request whose thinking its own cap ends. think, answer: tokens. more: further fields of the request."""
    text, tokens, thought_s, answer_s, used = "", list[int](), 0.0, list[float](), 0
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": words}],
        "stream_options": {"include_usage": True},
        "max_tokens": think + 1 + answer,
        "vllm_xargs": {"meridian_max_think_tokens": think},
        "chat_template_kwargs": {"open_think": True},
        **more,
    }
    async for chunk, now_s in streamed(session, port, "chat/completions", **body):
        tokens += chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            tokens += choice.get("token_ids") or []
            if thought := choice["delta"].get("reasoning"):
                text, thought_s = text + thought, now_s
            if said := choice["delta"].get("content"):
                text += said
                answer_s.append(now_s)
        if usage := chunk.get("usage"):
            used = usage["completion_tokens"]
    return Said(text, tokens, thought_s, answer_s, used)


async def recompute(session: aiohttp.ClientSession, port: int, tokens: list[int]) -> tuple[str, float]:
    """Return the answer to known tokens by an engine that has not seen them, and the seconds to its first token."""
    text, first_s, began_s = "", 0.0, time.perf_counter()
    async for chunk, now_s in streamed(session, port, "completions", prompt=tokens, max_tokens=ANSWER):
        if chunk["choices"] and (said := chunk["choices"][0]["text"]):
            text, first_s = text + said, first_s or now_s
    return text, first_s - began_s


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))


class Gaps:
    """Measures the arms one after another, each time with new prompts, because an engine knows a prompt it has seen."""

    def __init__(self, pools: Pools, names: list[str]) -> None:
        self._pools, self._names, self._chance = pools, names, random.Random(5)
        self._alone_s = 0.0

    async def gap(self, arm: str, length: int) -> Figures:
        """Return the gap of one request. equal: whether its answer is the same text as the one engine's. The arm
        transfer measures one_engine, too, with the same prompt."""
        a, b = self._pools["A"].port, self._pools["B"].port
        words = " ".join(self._chance.choices(self._names, k=min(length, CONTEXT - 96)))
        async with client() as session:
            if arm == RECOMPUTE:
                known = await ask(session, a, words, return_token_ids=True)
                text, gap_s = await recompute(session, b, known.tokens[:-ANSWER])
                return {"gap_ms": gap_s * 1e3, "equal": float(known.text.endswith(text))}
            if arm == TRANSFER:
                found = await ask(session, self._pools.relay_port, words)
                alone = await ask(session, a, words)
                self._alone_s = alone.gap_s
                return {"gap_ms": found.gap_s * 1e3, "equal": float(found.text == alone.text)}
        return {"gap_ms": self._alone_s * 1e3}


def words_of(folder: Path) -> list[str]:
    """Return words that the model's tokenizer makes one token of."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    wanted = range(random_model.FIRST_WORD, random_model.LAST_WORD + 1)
    return [word for word, token in vocabulary.items() if token in wanted]


# --------------------------------------------------------------------------------------------------------- under load


def bind(pools: Pools) -> None:
    """Give each engine core its own half of the machine's cores, as two engines on GPUs do not share one."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    for name, own in (("A", cores[:half]), ("B", cores[-half:])):
        server = pools[name].process.popen.pid
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if os.getpgid(int(process.name)) == server != int(process.name):
                    for thread in (process / "task").iterdir():
                        os.sched_setaffinity(int(thread.name), own)


def figures(answers: Sequence[Said], began_s: float, ended_s: float) -> Figures:
    """Return the figures of a run; its throughput is that of all its requests until the last one ends."""
    gaps = np.concatenate([np.diff(said.answer_s) for said in answers]) * 1e3
    first = [said.gap_s * 1e3 for said in answers]
    return {
        "itl_p99": float(np.percentile(gaps, 99)),
        "ttot_p99": float(np.percentile(first, 99)),
        "throughput": sum(said.output_tokens for said in answers) / (ended_s - began_s),
    }


def drawn(answer_tokens: int, seed: int, count: int) -> list[Request]:
    """Return requests of the scheduling benchmark whose answers have this median length."""
    longer = answer_tokens / scheduling_load.ANSWER[0]
    found = scheduling_load.requests(seed, count)
    return [replace(request, answer_tokens=round(request.answer_tokens * longer)) for request in found]


class Comparison:
    """Both arms on the same two engines, one after the other. word: returns the word of a prompt for its token id."""

    def __init__(self, pools: Pools, word: Callable[[int], str], counted: int) -> None:
        self._pools, self._word, self._counted = pools, word, counted
        self._mixed_port = free_port()
        command = [sys.executable, "-c", RELAY, "--listen", f"127.0.0.1:{self._mixed_port}", "--metrics-listen", ""]
        for name in ("A", "B"):
            command += ["--thinking", f"http://127.0.0.1:{pools[name].port}"]
        self._relay = Process(command, pools.folder / "mixed.log")
        wait_for(self._serves, 30, "the relay of the mixed pool to serve")

    def _serves(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._mixed_port), timeout=5):
            return True
        return False

    def stop(self) -> None:
        self._relay.stop()

    async def _session(self, arm: str, run: Callable[[Send], Awaitable[T]]) -> T:
        """Return the result of `run` on idle engines under the arm's policy. `run` gets a function that sends a
        request."""
        self._pools.until(lambda engine: engine.kv_used == 0 and engine.running == 0, "free blocks")
        self._pools.apply(POLICIES[arm])
        port = self._mixed_port if arm == MIXED else self._pools.relay_port
        async with client() as session:

            def send(request: Request) -> Awaitable[Said]:
                words = " ".join(map(self._word, request.prompt[:-1]))
                return ask(session, port, words, request.think_tokens, request.answer_tokens)

            return await run(send)

    async def capacity(self, answer_tokens: int, arm: str) -> float:
        """Return the requests a second of a closed loop in which every place of both engines is taken."""

        async def closed(send: Send) -> float:
            waiting = iter(drawn(answer_tokens, CAPACITY_SEED, 2 * PLACES * ROUNDS))
            ended: list[float] = []

            async def place() -> None:
                for request in waiting:
                    await send(request)
                    ended.append(time.perf_counter())

            await asyncio.gather(*(place() for _ in range(2 * PLACES)))
            # At the beginning and at the end not every place is taken.
            return (len(ended) - 4 * PLACES) / (ended[-2 * PLACES] - ended[2 * PLACES])

        return await self._session(arm, closed)

    async def run(self, answer_tokens: int, arm: str, rate: float, seed: int) -> Figures:
        """Measure one open-loop run with Poisson arrivals. rate: requests a second."""

        async def open_loop(send: Send) -> Figures:
            requests = drawn(answer_tokens, seed, self._counted)
            due = np.cumsum(scheduling_load.gaps("poisson", rate, self._counted, seed))
            began_s = time.perf_counter()

            async def arrive(request: Request, at_s: float) -> Said:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                return await send(request)

            answers = await asyncio.gather(*map(arrive, requests, due.tolist()))
            return figures(answers, began_s, time.perf_counter())

        return await self._session(arm, open_loop)


async def loads(session: Session, pools: Pools, word: Callable[[int], str]) -> dict[str, float]:
    """Measure both arms under both loads; return the ratios of the first load at the largest share."""
    given, runs, cases = session.options, session.runs, list[str]()
    comparison = Comparison(pools, word, given.counted)
    try:
        for name, answer_tokens in LOADS.items():
            case, capacity = f"{name}, capacity", dict[str, float]()
            # The first closed loop also takes the handshakes and fills the engines' caches.
            for arm in (SPLIT, MIXED):
                capacity[arm] = await comparison.capacity(answer_tokens, arm)
                session.add(arm, {"capacity": capacity[arm]}, case=case)
            cases.append(case)
            for share in given.shares:
                rate = share * capacity[MIXED]

                async def run(arm: str, seed: int, tokens: int = answer_tokens, rate: float = rate) -> Figures:
                    return await comparison.run(tokens, arm, rate, seed)

                cases.append(f"{name}, {share:g} of the mixed pool's capacity")
                await session.rounds((SPLIT, MIXED), run, given.repetitions, case=cases[-1])
    finally:
        comparison.stop()
    text = f"The same two engines in both arms; {given.counted} requests a run."
    session.table("Two pools against a mixed pool under load", text, POOLS, MIXED, cases)
    judged = f"{next(iter(LOADS))}, {given.shares[-1]:g} of the mixed pool's capacity"
    ratios = {name: runs.ratio(SPLIT, MIXED, name, judged) for name in ("itl_p99", "ttot_p99", "throughput")}
    session.goal(f"two pools' answer gap P99 over the mixed pool's, {judged}", "<= 0.5", ratios["itl_p99"], 2)
    session.goal(f"two pools' throughput over the mixed pool's, {judged}", ">= 0.97", ratios["throughput"], 2)
    return {name: found.rounded(3) for name, found in ratios.items()}


async def measure(session: Session) -> dict[str, Any]:
    if not NIXL.found():
        raise BenchError(NIXL.reason)
    given, runs = session.options, session.runs
    model = random_model.make(Path(tempfile.gettempdir()) / "meridian-random-29m")
    flags = ["--model", str(model), "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT)]
    names = words_of(model)
    with Pools(session.fresh(), step_ms=0.0, options=flags, blocks=BLOCKS) as pools:
        bind(pools)
        pools.apply(POLICY)
        gaps = Gaps(pools, names)
        # The first handover of a pair of engines also takes their handshake.
        for _ in range(2):
            for arm in ARMS:
                await gaps.gap(arm, 100)
        for length in given.lengths:
            for number in range(given.repetitions):
                # The one engine's gap is that of the prompt that was handed over just before.
                for arm in (TRANSFER, ONE_ENGINE, RECOMPUTE):
                    session.add(arm, await gaps.gap(arm, length), number, f"{length} prompt tokens")
        cases = runs.cases()
        session.table("Gap between thinking and answer", "Steps have no pace.", GAPS, RECOMPUTE, cases)
        pools_ratios = {}
        if given.shares:
            pools_ratios = await loads(session, pools, lambda token: names[token % len(names)])
        results = pools.metrics("relay", "meridian_relay_requests_total{")
        pools.until(lambda engine: engine.kv_used == 0, "free blocks")
    near = f"{min(given.lengths, key=lambda length: abs(length - 1000))} prompt tokens"
    session.goal(f"transfer over recompute, {near}", "<= 0.2", runs.ratio(TRANSFER, RECOMPUTE, "gap_ms", near), 2)
    equal = [run.figures["equal"] for run in runs.all if "equal" in run.figures]
    return {
        "equal": int(sum(equal)),
        "of": len(equal),
        "gap_ms": {arm: runs.median(arm, "gap_ms", near).rounded(1) for arm in ARMS},
        "leaked_blocks": 0,
        "failed": int(sum(value for key, value in results.items() if '"failed"' in key)),
        "pools": pools_ratios,
    }


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=LENGTHS, help="prompt tokens")
    add("--repetitions", type=int, default=5)
    add("--shares", type=float, nargs="*", default=SHARES, help="shares of the mixed pool's capacity")
    add("--counted", type=int, default=96, help="requests of a run under load")


if __name__ == "__main__":
    harness.main("handover", "Handover to another engine", __doc__, options, measure)
