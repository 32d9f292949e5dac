"""Measure the gap between thinking and answer if another engine answers: `make bench-handover`.

The protocol is in tests/bench/handover.md. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import openai

from tests.bench import handover_pools, random_model
from tests.bench.handover_pools import Load
from tests.engine.pools import POLICY, Pools
from tests.needed import NIXL

# Thinking tokens of a request, which its own cap ends, and the tokens of its answer.
THINKING, ANSWER = 34, 20
LENGTHS = (300, 1000, 2000, 4000)
CONTEXT = 4096
# The load of the scheduling benchmark, and one whose answers are as long as its thinking. Shares of the mixed pool's
# capacity.
LOADS = Load("thinking is long", 40), Load("answers are as long", 100)
SHARES = 0.7, 1.0


class Said(NamedTuple):
    """One streamed request: its text, its token ids if they were asked for, and the gap in seconds between the last
    chunk of its thinking and the first of its answer."""

    text: str
    tokens: list[int]
    gap_s: float


async def ask(port: int, words: str, *, with_tokens: bool = False) -> Said:
    """Send one request whose thinking its own cap ends."""
    extra: dict[str, Any] = {
        "vllm_xargs": {"meridian_max_think_tokens": THINKING},
        "chat_template_kwargs": {"open_think": True},
        "ignore_eos": True,
        **({"return_token_ids": True} if with_tokens else {}),
    }
    text, tokens, thought_s, answered_s = "", list[int](), 0.0, 0.0
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=600) as client:
        chunks = await client.chat.completions.create(
            model="maze",
            messages=[{"role": "user", "content": words}],
            stream=True,
            temperature=0.0,
            max_tokens=THINKING + 1 + ANSWER,
            extra_body=extra,
        )
        async for chunk in chunks:
            now_s = time.perf_counter()
            tokens += getattr(chunk, "prompt_token_ids", None) or []
            for choice in chunk.choices:
                tokens += getattr(choice, "token_ids", None) or []
                if thought := getattr(choice.delta, "reasoning", None):
                    text, thought_s = text + thought, now_s
                if choice.delta.content:
                    text += choice.delta.content
                    answered_s = answered_s or now_s
    return Said(text, tokens, answered_s - thought_s)


async def recompute(port: int, tokens: list[int]) -> tuple[str, float]:
    """Return the answer to known tokens by an engine that has not seen them, and the seconds to its first token."""
    url = f"http://127.0.0.1:{port}/v1"
    text, first_s, began_s = "", 0.0, time.perf_counter()
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=600) as client:
        chunks = await client.completions.create(
            model="maze",
            prompt=tokens,
            stream=True,
            temperature=0.0,
            max_tokens=ANSWER,
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].text:
                first_s = first_s or time.perf_counter()
                text += chunk.choices[0].text
    return text, first_s - began_s


class Row(NamedTuple):
    """The gaps in milliseconds after prompts of one length, by repetition, and how many answers were equal."""

    tokens: int
    transfer: list[float]
    recompute: list[float]
    one_engine: list[float]
    equal: int
    of: int


async def measure(pools: Pools, length: int, repetitions: int, chance: random.Random, names: list[str]) -> Row:
    """Measure the arms one after another, each time with new prompts, because an engine knows a prompt it has seen."""
    row = Row(length, [], [], [], 0, 0)
    a, b = pools["A"].port, pools["B"].port
    equal = 0
    for _ in range(repetitions):
        first, second = (" ".join(chance.choices(names, k=length)) for _ in range(2))
        handed_over = await ask(pools.relay_port, first)
        alone = await ask(a, first)
        row.transfer.append(handed_over.gap_s * 1e3)
        row.one_engine.append(alone.gap_s * 1e3)
        known = await ask(a, second, with_tokens=True)
        text, gap_s = await recompute(b, known.tokens[:-ANSWER])
        row.recompute.append(gap_s * 1e3)
        equal += (handed_over.text == alone.text) + known.text.endswith(text)
    return row._replace(equal=equal, of=2 * repetitions)


def words_of(folder: Path) -> list[str]:
    """Return words that the model's tokenizer makes one token of."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    wanted = range(random_model.FIRST_WORD, random_model.LAST_WORD + 1)
    return [word for word, token in vocabulary.items() if token in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--counted", type=int, default=96, help="requests of a run under load")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not NIXL.found():
        raise SystemExit(NIXL.reason)
    model = random_model.make(Path(tempfile.gettempdir()) / "meridian-random-29m")
    options = ["--model", str(model), "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT)]
    chance, names = random.Random(5), words_of(model)
    blocks = handover_pools.BLOCKS
    with (
        tempfile.TemporaryDirectory() as folder,
        Pools(Path(folder), step_ms=0.0, options=options, blocks=blocks) as pools,
    ):
        handover_pools.bind(pools)
        pools.apply(POLICY)
        # The first handover of a pair of engines also takes their handshake.
        asyncio.run(measure(pools, 100, 2, chance, names))
        rows = []
        for length in args.lengths:
            rows.append(asyncio.run(measure(pools, min(length, CONTEXT - 96), args.repetitions, chance, names)))
            print(rows[-1], flush=True)
        loaded = handover_pools.compare(pools, lambda token: names[token % len(names)], LOADS, args)
        results = pools.metrics("relay", "meridian_relay_requests_total{")
        pools.until(lambda engine: engine.kv_used == 0, "free blocks")
    report = table(rows, results) + "\n".join(loaded.lines())
    print(report)
    if args.save:
        (Path(__file__).parent / "results" / "handover.md").write_text(report)
    failed = sum(value for key, value in results.items() if '"failed"' in key)
    ratios = loaded.ratios(LOADS[0].name, args.shares[-1]) if args.shares else {}
    print(json.dumps({**summary(rows, int(failed)), "pools": ratios}))


def table(rows: list[Row], results: dict[str, float]) -> str:
    lines = ["# Gap between thinking and answer", ""]
    lines += ["| prompt tokens | transfer, ms | recompute, ms | one engine, ms | transfer of recompute | equal |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        gaps = [statistics.median(arm) for arm in (row.transfer, row.recompute, row.one_engine)]
        cells = [row.tokens, *(f"{gap:.0f}" for gap in gaps), f"{gaps[0] / gaps[1]:.2f}", f"{row.equal} of {row.of}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    counted = {key.partition('"')[2].partition('"')[0]: int(value) for key, value in results.items()}
    return "\n".join([*lines, "", f"Results of the relay's requests: {counted}", ""])


def summary(rows: list[Row], failed: int) -> dict[str, Any]:
    """Return the figures of the length that is nearest to 1,000 tokens, and the sums over all lengths."""
    near = min(rows, key=lambda row: abs(row.tokens - 1000))
    gaps = {name: round(statistics.median(getattr(near, name)), 1) for name in ("transfer", "recompute", "one_engine")}
    return {
        "equal": sum(row.equal for row in rows),
        "of": sum(row.of for row in rows),
        "gap_ms": gaps,
        "leaked_blocks": 0,
        "failed": failed,
    }


if __name__ == "__main__":
    main()
