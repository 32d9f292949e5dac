"""Compare two engines that both think and answer with a thinking engine and an answering engine, under one load.

A part of `make bench-handover`; the protocol is in tests/bench/handover.md. Arrivals and lengths are those of the
scheduling benchmark (`scheduling_load.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiohttp
import numpy as np

from tests.bench import scheduling_load
from tests.engine.pools import PLACES, POLICY, RELAY
from tests.processes import Process, free_port, wait_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.bench.streamed import Request
    from tests.engine.pools import Pools

T = TypeVar("T")
MIXED, SPLIT = "mixed", "two pools"
POLICIES: dict[str, dict[str, Any]] = {MIXED: {"entropy": {"enabled": False}}, SPLIT: POLICY}
# The thinking engine is above this share of its KV cache (`pools.POLICY`) from its first requests on, and the answering
# engine, with its larger cache, never is.
BLOCKS = {"A": 1024, "B": 9600}
CAPACITY_SEED = 99
# Requests of the closed loop that measures the capacity, for each place of both engines.
ROUNDS = 3
FIGURES = ("itl_p99", "ttot_p99", "throughput")


class Timing(NamedTuple):
    """One request's times in seconds of one clock: the last chunk of its thinking, and each chunk of its answer.

    tokens: output tokens, as vLLM's usage counts them.
    """

    thought_s: float
    answer_s: list[float]
    tokens: int


class Load(NamedTuple):
    """One load. answer_tokens: the median length of an answer."""

    name: str
    answer_tokens: int


class Run(NamedTuple):
    """One run. figures: answer gaps and time to the first answer token in milliseconds, and output tokens a second."""

    arm: str
    seed: int
    figures: dict[str, float]


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


class Client:
    """Sends the requests to one relay. word: returns the word of a prompt for its token id."""

    def __init__(self, session: aiohttp.ClientSession, port: int, word: Callable[[int], str]) -> None:
        self._session, self._url, self._word = session, f"http://127.0.0.1:{port}/v1/chat/completions", word

    async def ask(self, request: Request) -> Timing:
        """Send one request and read its stream. Raises RuntimeError if the request fails."""
        body = {
            "model": "maze",
            "messages": [{"role": "user", "content": " ".join(map(self._word, request.prompt[:-1]))}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "max_tokens": request.think_tokens + 1 + request.answer_tokens,
            "vllm_xargs": {"meridian_max_think_tokens": request.think_tokens},
            "chat_template_kwargs": {"open_think": True},
            "ignore_eos": True,
        }
        timing = Timing(0.0, [], 0)
        async with self._session.post(self._url, json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    timing = read(timing, json.loads(line[6:]), time.perf_counter())
        return timing


def read(timing: Timing, chunk: dict[str, Any], now_s: float) -> Timing:
    """Return the times with those of a chunk that has arrived now. Raises RuntimeError if the chunk is an error."""
    if "error" in chunk:
        raise RuntimeError(f"a stream failed: {chunk['error']}")
    for choice in chunk["choices"]:
        if choice["delta"].get("reasoning"):
            timing = timing._replace(thought_s=now_s)
        if choice["delta"].get("content"):
            timing.answer_s.append(now_s)
    if usage := chunk.get("usage"):
        timing = timing._replace(tokens=usage["completion_tokens"])
    return timing


def figures(timings: Sequence[Timing], began_s: float, ended_s: float) -> dict[str, float]:
    """Return the figures of a run; its throughput is that of all its requests until the last one ends."""
    gaps = np.concatenate([np.diff(timing.answer_s) for timing in timings]) * 1e3
    first = [(timing.answer_s[0] - timing.thought_s) * 1e3 for timing in timings]
    return {
        "itl_p99": float(np.percentile(gaps, 99)),
        "ttot_p99": float(np.percentile(first, 99)),
        "throughput": sum(timing.tokens for timing in timings) / (ended_s - began_s),
    }


def drawn(load: Load, seed: int, count: int) -> list[Request]:
    """Return requests of the scheduling benchmark whose answers have the load's median length."""
    longer = load.answer_tokens / scheduling_load.ANSWER[0]
    found = scheduling_load.requests(seed, count)
    return [replace(request, answer_tokens=round(request.answer_tokens * longer)) for request in found]


class Comparison:
    """Both arms on the same two engines, one after the other. word: as in Client."""

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

    async def _session(self, arm: str, run: Callable[[Client], Awaitable[T]]) -> T:
        self._pools.until(lambda engine: engine.kv_used == 0 and engine.running == 0, "free blocks")
        self._pools.apply(POLICIES[arm])
        port = self._mixed_port if arm == MIXED else self._pools.relay_port
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
            return await run(Client(session, port, self._word))

    async def capacity(self, load: Load, arm: str) -> float:
        """Return the requests a second of a closed loop in which every place of both engines is taken."""

        async def closed(client: Client) -> float:
            waiting = iter(drawn(load, CAPACITY_SEED, 2 * PLACES * ROUNDS))
            ended: list[float] = []

            async def place() -> None:
                for request in waiting:
                    await client.ask(request)
                    ended.append(time.perf_counter())

            await asyncio.gather(*(place() for _ in range(2 * PLACES)))
            # At the beginning and at the end not every place is taken.
            return (len(ended) - 4 * PLACES) / (ended[-2 * PLACES] - ended[2 * PLACES])

        return await self._session(arm, closed)

    async def run(self, load: Load, arm: str, rate: float, seed: int) -> Run:
        """Measure one open-loop run with Poisson arrivals. rate: requests a second."""

        async def open_loop(client: Client) -> Run:
            requests = drawn(load, seed, self._counted)
            due = np.cumsum(scheduling_load.gaps("poisson", rate, self._counted, seed))
            began_s = time.perf_counter()

            async def arrive(request: Request, at_s: float) -> Timing:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                return await client.ask(request)

            timings = await asyncio.gather(*map(arrive, requests, due.tolist()))
            return Run(arm, seed, figures(timings, began_s, time.perf_counter()))

        return await self._session(arm, open_loop)


def compare(pools: Pools, word: Callable[[int], str], loads: Sequence[Load], args: Any) -> Table:
    """Return the runs of both arms by load and share of the mixed pool's capacity. args: the command line."""
    table = Table({}, {})
    if not args.shares:
        return table
    comparison = Comparison(pools, word, args.counted)
    try:
        for load in loads:
            # The first closed loop also takes the handshakes and fills the engines' caches.
            for arm in (SPLIT, MIXED):
                table.capacity[load.name, arm] = asyncio.run(comparison.capacity(load, arm))
            print(table.capacity, flush=True)
            for share in args.shares:
                rate = share * table.capacity[load.name, MIXED]
                for seed in range(args.repetitions):
                    arms = (MIXED, SPLIT) if seed % 2 else (SPLIT, MIXED)
                    found = [asyncio.run(comparison.run(load, arm, rate, seed)) for arm in arms]
                    table.runs.setdefault((load.name, share), []).extend(found)
                    print(found, flush=True)
    finally:
        comparison.stop()
    return table


class Table(NamedTuple):
    """capacity: requests a second by load and arm. runs: by load and share of the mixed pool's capacity."""

    capacity: dict[tuple[str, str], float]
    runs: dict[tuple[str, float], list[Run]]

    def ratios(self, load: str, share: float) -> dict[str, float]:
        """Return the two pools' figures divided by the mixed pool's with the same seed, as medians over the seeds."""
        runs = {(run.arm, run.seed): run.figures for run in self.runs[load, share]}
        seeds = sorted({seed for _, seed in runs})
        each = {name: [runs[SPLIT, seed][name] / runs[MIXED, seed][name] for seed in seeds] for name in FIGURES}
        return {name: round(statistics.median(values), 3) for name, values in each.items()}

    def lines(self) -> list[str]:
        """Return the lines of the report; none if nothing was compared."""
        if not self.runs:
            return []
        said = ["", "## Two pools against a mixed pool under load", ""]
        said += ["| load | of the mixed pool's capacity | arm | answer gap P99, ms | TTOT P99, ms | output tokens/s |"]
        said += ["|---|---|---|---|---|---|"]
        for (load, share), runs in self.runs.items():
            for arm in (MIXED, SPLIT):
                each = [run.figures for run in runs if run.arm == arm]
                cells = [f"{statistics.median(one[name] for one in each):.0f}" for name in FIGURES]
                said.append(f"| {load} | {share:g} | {arm} | {' | '.join(cells)} |")
            told = ", ".join(f"{name} {value:.2f}" for name, value in self.ratios(load, share).items())
            said.append(f"| {load} | {share:g} | ratio, median of the pairs | {told} | | |")
        told = ", ".join(f"{load}, {arm}: {rate:.2f}" for (load, arm), rate in self.capacity.items())
        return [*said, "", f"Capacity in requests a second, closed loop: {told}", ""]
