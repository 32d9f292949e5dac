"""Compare the orders in which blocks of the prefix cache are reused, on a real engine: `make bench-cache`.

The protocol is in tests/bench/README.md. The module owns the order of events. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import cache_load, cache_report, program, random_model, scheduling_runs
from tests.bench.cache_report import LRU, NEVER_HIT, TIERS, ChatRun
from tests.bench.machine import Calm, add_calm_options
from tests.bench.scheduling_runs import STOCK, Arm
from tests.bench.streamed import Setup, engine
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.streamed import StreamedEngine, Timeline

RESULTS = Path(__file__).parent / "results"
USERS = 8
WARM_REQUESTS = 8
NEVER_HIT_SCHEDULER = "tests.bench.cache_never_hit.NeverHitFirst"
# All arms keep vLLM's own dispatch order, so that only the reuse of cached blocks differs.
ARMS: dict[str | None, list[Arm]] = {
    None: [Arm(LRU, STOCK), Arm(TIERS, {**STOCK, "kv_memory": {"enabled": True}})],
    NEVER_HIT_SCHEDULER: [Arm(NEVER_HIT, STOCK)],
}


@dataclass(frozen=True)
class Options:
    """The command line.

    share: KV blocks, as a fraction of the blocks with which no prefix would be computed twice. other_shares: further
    fractions, each of which is measured once with multi-turn chats.
    """

    repetitions: int
    share: float
    other_shares: list[float]
    quick: bool
    output: Path
    save: bool
    quiet_cores: float
    patience_s: float


def blocks_of(share: float) -> int:
    return round(share * cache_load.reachable_blocks(USERS)) + 1


async def run_chats(running: StreamedEngine, arm: Arm, kind: str, tokenizer: Any, seed: int) -> dict[str, float]:
    """Run all chats of one kind, in turns in a fixed order and with USERS requests in flight, and return the
    figures."""
    waiting = deque(cache_load.chats(kind, tokenizer, seed))
    await running.begin(arm.policy)
    before = running.counters()
    done: list[Timeline] = []

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
    after = running.counters()
    ttft_ms = np.array([t.times_s[0] - t.due_s for t in done]) * 1e3
    meter = running.meter
    reclaimed = after.blocks_reclaimed - before.blocks_reclaimed if before is not None and after is not None else 0
    return {
        "hit_rate": meter.hits / meter.queries,
        "prompt_tokens": meter.queries,
        "prefill_tokens": meter.queries - meter.hits,
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p95_ms": float(np.percentile(ttft_ms, 95)),
        "throughput_tokens_per_s": sum(len(t.tokens) for t in done) / wall_s,
        "kv_peak": meter.kv_peak,
        "preempted": meter.preempted,
        "blocks_reclaimed": reclaimed,
        "wall_s": wall_s,
    }


async def run_all(options: Options) -> cache_report.Findings:
    from transformers import AutoTokenizer

    model = random_model.make(options.output / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    runs: list[ChatRun] = []
    calm = Calm(options.quiet_cores, options.patience_s)
    for share in (options.share, *options.other_shares):
        kinds = list(cache_load.KINDS) if share == options.share else [cache_report.CHATS]
        repetitions = options.repetitions if share == options.share else 1
        for scheduler, arms in ARMS.items():
            setup = Setup(model, blocks_of(share), scheduler=scheduler)
            with engine(setup, options.output / f"{'rival' if scheduler else 'engine'}-{share:g}") as running:
                await scheduling_runs.warm(running, WARM_REQUESTS)
                for seed, kind in itertools.product(range(repetitions), kinds):
                    for arm in arms[:: -1 if seed % 2 else 1]:
                        one = partial(run_chats, running, arm, kind, tokenizer, seed)
                        figures, others = await calm.measure(one)
                        figures["others_cores"] = others
                        runs.append(ChatRun(arm.name, kind, share, seed, figures))
                        print(
                            f"{arm.name}, {kind}, {share:g} KV, seed {seed}: {cache_report.brief(runs[-1])}", flush=True
                        )
    blocks = {share: blocks_of(share) for share in (options.share, *options.other_shares)}
    return cache_report.Findings(runs, blocks, options.share, USERS, options.repetitions)


def run(options: Options) -> None:
    """Run the whole benchmark. Raises BenchError."""
    options.output.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(run_all(options))
    paths = cache_report.write(found, options.output)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        for path in paths:
            shutil.copy(path, RESULTS / path.name)
    print(f"\n{cache_report.markdown(found)}\nwritten: {', '.join(map(str, paths))}")
    print(json.dumps(cache_report.summary(found)))


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--repetitions", type=int, default=3, help="runs of each arm, each with its own seed")
    add(
        "--share",
        type=float,
        default=1.0,
        help="KV blocks, as a fraction of those with which nothing is computed twice",
    )
    add(
        "--other-shares",
        type=float,
        nargs="*",
        default=[0.75, 1.5],
        help="further sizes of the KV cache, measured once each",
    )
    add("--quick", action="store_true", help="run one repetition of one size")
    add("--output", type=Path, default=ROOT / "build" / "bench-cache")
    add("--save", action="store_true", help="copy the results to tests/bench/results")
    add_calm_options(parser)
    given = parser.parse_args(arguments)
    if given.quick:
        given.repetitions, given.other_shares = 1, []
    return Options(**vars(given))


if __name__ == "__main__":
    program.main(lambda: run(parse()))
