"""Measure one engine: the time of its steps, its capacity, and one run under one policy."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.bench import scheduling_load as load
from tests.bench.harness import BenchError, Figures
from tests.bench.streamed import PLACES, Request, StreamedEngine, Timeline

QUIET: dict[str, Any] = {"entropy": {"enabled": False}}
STOCK: dict[str, Any] = {**QUIET, "scheduler": {"strategy": "stock"}, "kv_memory": {"enabled": False}}
# Number of sequences whose decode steps are timed, beside a full batch; FEW is about the number that answer at
# capacity.
FEW, TIMED_TOKENS = 8, 60
# Requests that are already present when a run begins.
PRESENT = 24
CAPACITY_SEED = 1_000_000
COUNTERS = {"think_preempted": "preempted_think", "answers_preempted": "output_critical"}


@dataclass(frozen=True)
class Costs:
    """Decode step times with FEW sequences and with a full batch, and the cost of one more prompt token, in
    milliseconds."""

    few_ms: float
    full_ms: float
    prompt_token_ms: float


@dataclass(frozen=True)
class Capacity:
    """The engine's throughput with every place always taken. kv_peak_blocks: the most blocks in use."""

    requests_per_s: float
    tokens_per_s: float
    kv_peak_blocks: int


@dataclass(frozen=True)
class Plan:
    """Values that all runs share. rate: capacity in requests per second. pace_s: the reader's pace, see `qoe`."""

    rate: float
    counted: int
    pace_s: float


async def warm(engine: StreamedEngine, count: int) -> None:
    """Send some requests, because the first steps of an engine are slower than all others."""
    await engine.begin(STOCK)
    await _together(engine, load.uniform(count, load.PROMPT[1], TIMED_TOKENS, seed=CAPACITY_SEED))


async def measure_costs(engine: StreamedEngine) -> Costs:
    """Measure the step times of an otherwise idle engine. Raises BenchError."""
    await engine.begin(STOCK)
    decode_ms = []
    for count in (FEW, PLACES):
        found = await _together(engine, load.uniform(count, load.PROMPT[0], TIMED_TOKENS, seed=count))
        gaps = [np.diff(t.times_s[10:-10]) for t in found]
        decode_ms.append(float(np.median(np.concatenate(gaps))) * 1e3)
    if decode_ms[1] <= decode_ms[0]:
        raise BenchError(f"a step took no longer with {PLACES} sequences than with {FEW}: the machine is busy")
    low, high = load.PROMPT
    first_ms = []
    for size in (low, high):
        alone = [await engine.stream(r) for r in load.uniform(5, size, 2, seed=size)]
        first_ms.append(float(np.median([t.times_s[0] - t.due_s for t in alone])) * 1e3)
    return Costs(decode_ms[0], decode_ms[1], (first_ms[1] - first_ms[0]) / (high - low))


async def run_crowded(engine: StreamedEngine, policy: dict[str, Any], seed: int, counted: int) -> Figures:
    """Let thinking take all places, with more that wait, and measure the short requests of a tenant that arrive
    meanwhile. Each of them comes when the one before has ended, after as many milliseconds as `load.PAUSE_MS` says."""
    await engine.begin(policy)
    before, done = engine.counters(), list[Any]()
    thinkers = iter(load.thinkers(seed))
    ended = False

    async def place() -> None:
        for request in thinkers:
            if ended:
                return
            done.append(await engine.stream(request))

    began_s = time.perf_counter()
    tasks = [asyncio.create_task(place()) for _ in range(PLACES + load.BEHIND)]
    await asyncio.sleep(load.FILLED_S)
    urgent = []
    for request in load.urgent(seed, counted):
        urgent.append(await engine.stream(request))
        await asyncio.sleep(load.PAUSE_MS / 1e3)
    over_s, ended = time.perf_counter(), True
    await asyncio.gather(*tasks)
    stamps = np.concatenate([t.times_s for t in (*done, *urgent)])
    first_ms = np.array([t.times_s[0] - t.due_s for t in urgent]) * 1e3
    tokens = int((stamps <= over_s).sum())
    figures = {
        "urgent_ttft_p50_ms": float(np.median(first_ms)),
        "urgent_ttft_p99_ms": float(np.quantile(first_ms, 0.99)),
        "throughput_tokens_per_s": tokens / (over_s - began_s),
    }
    if before is not None and (after := engine.counters()) is not None:
        figures["preempted"] = float(after.preempted_think - before.preempted_think)
        figures["recomputed_share"] = (after.recomputed_tokens - before.recomputed_tokens) / tokens
    return figures


async def _together(engine: StreamedEngine, requests: Sequence[Request]) -> list[Timeline]:
    return list(await asyncio.gather(*(engine.stream(request) for request in requests)))


async def measure_capacity(engine: StreamedEngine, count: int) -> Capacity:
    """Measure a closed loop under stock scheduling, in which a new request is submitted whenever one ends.

    The first and the last requests are left out, because not every place of the engine was taken at their times.
    """
    await engine.begin(STOCK)
    waiting = iter(load.requests(CAPACITY_SEED, count))
    done: list[Timeline] = []

    async def place() -> None:
        for request in waiting:
            done.append(await engine.stream(request))

    await asyncio.gather(*(place() for _ in range(PLACES)))
    finished_s = [t.times_s[-1] for t in done]
    began_s, ended_s = finished_s[PLACES - 1], finished_s[-PLACES]
    stamps = np.concatenate([t.times_s for t in done])
    tokens = int(((stamps > began_s) & (stamps <= ended_s)).sum())
    rate = tokens / (ended_s - began_s)
    blocks = round(engine.meter.kv_peak * (engine.setup.blocks - 1))
    return Capacity(rate * len(done) / len(stamps), rate, blocks)


def qoe(answer_s: Sequence[float], thinking_ended_s: float, pace_s: float) -> float:
    """Return the quality of experience (Andes, arXiv 2404.16283) of one answer: area read divided by area expected.

    The reader expects one token per pace_s from the end of thinking on. The reader reads a token when it has arrived,
    when the tokens before it have been read at pace_s each, and no sooner than expected. Both areas reach to the time
    at which the last token has been read.
    """
    expected = thinking_ended_s + pace_s * np.arange(1, len(answer_s) + 1)
    read, at = np.empty(len(answer_s)), -np.inf
    for i, (arrived, due) in enumerate(zip(answer_s, expected.tolist(), strict=True)):
        at = read[i] = max(arrived, due, at + pace_s)
    until = at + pace_s
    return float((until - read).sum() / (until - expected).sum())


def _percentiles(name: str, seconds: Iterable[float]) -> dict[str, float]:
    values_ms = np.fromiter(seconds, float) * 1e3
    return {f"{name}_p{level}_ms": float(np.percentile(values_ms, level)) for level in (50, 99)}


def figures(
    counted: Sequence[Timeline], everything: Sequence[Timeline], began_s: float, pace_s: float
) -> dict[str, float]:
    """Return the figures of one run. Latencies are those of the counted requests; throughput is that of all requests.

    pace_s: the reader's pace. ttft: due time to first token of any kind. ttot: end marker to first answer token. ttfvt:
    due time to first answer token. itl: gaps between answer tokens, over all of them.
    """
    gaps = np.concatenate([np.diff(t.answer_s) for t in counted])
    finished_s = max(t.times_s[-1] for t in everything)
    tokens = sum(len(t.tokens) for t in everything)
    return {
        **_percentiles("ttft", (t.times_s[0] - t.due_s for t in counted)),
        **_percentiles("ttot", (t.answer_s[0] - t.end_s for t in counted)),
        **_percentiles("ttfvt", (t.answer_s[0] - t.due_s for t in counted)),
        **_percentiles("itl", gaps),
        "qoe": statistics.fmean(qoe(t.answer_s, t.end_s, pace_s) for t in counted),
        "throughput_tokens_per_s": tokens / (finished_s - began_s),
    }


async def run(
    engine: StreamedEngine, policy: dict[str, Any], plan: Plan, seed: int, *, process: load.Process, part: float
) -> Figures:
    """Measure one open-loop run. part: arrivals as a share of the capacity."""
    await engine.begin(policy)
    before = engine.counters()
    began_s = time.perf_counter()

    async def arrive(arrival: load.Arrival) -> Timeline:
        due_s = began_s + arrival.at_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return await engine.stream(arrival.request, due_s)

    arrivals = load.open_loop(process, plan.rate * part, seed, PRESENT, plan.counted)
    timelines = list(await asyncio.gather(*map(arrive, arrivals)))
    chosen = [t for t, arrival in zip(timelines, arrivals, strict=True) if arrival.counted]
    meter, found = engine.meter, figures(chosen, timelines, began_s, plan.pace_s)
    found |= {
        "preempted": meter.preempted,
        "kv_peak": meter.kv_peak,
        "waiting_mean": meter.waiting_sum / meter.steps,
    }
    after = engine.counters()
    if before is not None and after is not None:
        found |= {name: getattr(after, field) - getattr(before, field) for name, field in COUNTERS.items()}
    return found
