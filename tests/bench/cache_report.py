"""Render the findings of the cache benchmark as Markdown, JSON, a picture and the last line. Owns wording and looks."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.bench import cache_load, random_model
from tests.bench.machine import machine
from tests.bench.streamed import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LRU, TIERS, NEVER_HIT = "LRU", "tiers", "never hit first"
ARMS = (LRU, NEVER_HIT, TIERS)
CHATS, TOOLS = "multi-turn", "tool loop"
COLOURS = {LRU: "black", NEVER_HIT: "#4c78a8", TIERS: "#b0163a"}


@dataclass(frozen=True)
class Column:
    """One column of the report: its heading, the figure it shows, and its format."""

    heading: str
    figure: str
    digits: int = 0
    factor: float = 1.0
    extremes: bool = False

    def cell(self, values: list[float]) -> str:
        scaled = [self.factor * v for v in values]
        text = f"{statistics.median(scaled):.{self.digits}f}"
        if self.extremes:
            text += f" ({min(scaled):.{self.digits}f} to {max(scaled):.{self.digits}f})"
        return text


COLUMNS = (
    Column("hit rate, %", "hit_rate", 1, 100.0, True),
    Column("prompt tokens", "prompt_tokens"),
    Column("prompt tokens computed", "prefill_tokens", extremes=True),
    Column("TTFT P50, ms", "ttft_p50_ms", 1, extremes=True),
    Column("P95", "ttft_p95_ms", 1, extremes=True),
    Column("tokens/s", "throughput_tokens_per_s"),
    Column("blocks reclaimed", "blocks_reclaimed"),
    Column("preempted", "preempted"),
    Column("KV peak", "kv_peak", 2),
)


@dataclass(frozen=True)
class ChatRun:
    """One run: an arm with one kind of chats, one cache size and one seed. figures: by name, with the unit in the
    name."""

    arm: str
    kind: str
    share: float
    seed: int
    figures: dict[str, float]


@dataclass(frozen=True)
class Findings:
    """All runs of the benchmark. blocks: number of KV blocks by share; share: the main size's share."""

    runs: list[ChatRun]
    blocks: dict[float, int]
    share: float
    users: int
    repetitions: int

    def values(self, arm: str, kind: str, name: str, share: float | None = None) -> list[float]:
        """Return one figure of all repetitions in the order of their seeds; `share` defaults to the main size."""
        wanted = (arm, kind, self.share if share is None else share)
        return [r.figures[name] for r in sorted(self.runs, key=lambda r: r.seed) if (r.arm, r.kind, r.share) == wanted]

    def median(self, arm: str, kind: str, name: str) -> float:
        return statistics.median(self.values(arm, kind, name))

    def gained(self, kind: str, base: str = LRU) -> float:
        """Return by how many percentage points the tiers' hit rate exceeds another arm's: median of the seeds'
        differences."""
        pairs = zip(self.values(TIERS, kind, "hit_rate"), self.values(base, kind, "hit_rate"), strict=True)
        return 100 * statistics.median(a - b for a, b in pairs)

    def ratio(self, kind: str, name: str, base: str = LRU) -> float:
        """Return a figure of the tiers divided by another arm's: median of the ratios of the same seed."""
        pairs = zip(self.values(TIERS, kind, name), self.values(base, kind, name), strict=True)
        return statistics.median(a / b for a, b in pairs)


def brief(run: ChatRun) -> str:
    f = run.figures
    return (
        f"{run.arm}, {run.kind}, {run.share:g} of the KV, seed {run.seed}: hit rate {f['hit_rate']:.1%}, "
        f"{f['prefill_tokens']:.0f} of {f['prompt_tokens']:.0f} prompt tokens computed, TTFT P50 "
        f"{f['ttft_p50_ms']:.1f} ms, P95 {f['ttft_p95_ms']:.1f} ms, {f['wall_s']:.0f} s, others "
        f"{f['others_cores']:.1f} cores"
    )


@dataclass(frozen=True)
class Aim:
    name: str
    wanted: str
    measured: str
    met: bool


def aims(found: Findings) -> list[Aim]:
    """Return the aims and whether they are met; a tool loop's hit rate within half a point of LRU's counts as no
    loss."""
    gained, ttft, tools = found.gained(CHATS), found.ratio(CHATS, "ttft_p50_ms"), found.gained(TOOLS)
    return [
        Aim("multi-turn hit rate over LRU", ">= 6 points", f"{gained:+.1f}", gained >= 6),
        Aim("multi-turn TTFT P50 against LRU", "<= 0.9", f"{ttft:.2f}", ttft <= 0.9),
        Aim("tool-loop hit rate over LRU", ">= 0 points", f"{tools:+.1f}", tools >= -0.5),
    ]


def markdown(found: Findings) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Findings) -> Iterator[str]:
    yield "# Prefix cache: which blocks are reused first"
    yield ""
    yield from _protocol(found)
    yield ""
    yield "| figure | goal | measured | met |"
    yield "|---|---|---|---|"
    for aim in aims(found):
        yield f"| {aim.name} | {aim.wanted} | {aim.measured} | {'yes' if aim.met else 'no'} |"
    for kind in cache_load.KINDS:
        yield ""
        yield f"## {kind}"
        yield ""
        yield f"| arm | {' | '.join(column.heading for column in COLUMNS)} |"
        yield "|---" * (len(COLUMNS) + 1) + "|"
        for arm in ARMS:
            cells = [column.cell(found.values(arm, kind, column.figure)) for column in COLUMNS]
            yield f"| {arm} | {' | '.join(cells)} |"
        yield ""
        yield (
            f"Compared with never hit first, tiers change the hit rate by {found.gained(kind, NEVER_HIT):+.1f} points "
            "and "
            f"multiply the P50 of TTFT by {found.ratio(kind, 'ttft_p50_ms', NEVER_HIT):.2f}."
        )
    if len(found.blocks) > 1:
        yield ""
        yield from _sizes(found)
    yield ""
    yield "![hit rate and TTFT](cache.png)"


def _sizes(found: Findings) -> Iterator[str]:
    yield "## multi-turn, other sizes of the KV cache"
    yield ""
    yield f"| KV blocks | share | {' | '.join(f'{arm}, hit rate, %' for arm in ARMS)} |"
    yield "|---" * (len(ARMS) + 2) + "|"
    for share, blocks in sorted(found.blocks.items()):
        rates = [100 * statistics.median(found.values(arm, CHATS, "hit_rate", share)) for arm in ARMS]
        yield f"| {blocks} | {share:g} | {' | '.join(f'{rate:.1f}' for rate in rates)} |"


def _protocol(found: Findings) -> Iterator[str]:
    import vllm

    chats, tools = cache_load.MULTI_TURN, cache_load.TOOL_LOOP
    others = [run.figures["others_cores"] for run in found.runs]
    yield (
        f"vLLM {vllm.__version__} on {machine()}, float32, eager, one thread; a Qwen3 of "
        f"{random_model.parameters() / 1e6:.0f} M random weights. Engine core, worker, client and `meridian-control` "
        f"are separate processes; other programs used {statistics.median(others):.2f} cores in the median run, and at "
        f"most {max(others):.2f}. The engine has {found.blocks[found.share]} KV blocks of {BLOCK_TOKENS} tokens, which "
        f"is {found.share:g} of the blocks for every multi-turn chat's last prompt, the system prompts once, and the "
        f"tokens that {found.users} requests generate."
    )
    yield ""
    yield (
        f"Multi-turn: {chats.chats} chats of {chats.turns} turns, one of {cache_load.SYSTEM_PROMPTS} system prompts of "
        f"{cache_load.SYSTEM_TOKENS} tokens each, turns of {chats.says} tokens, {chats.think} of thinking and "
        f"{chats.answer} of answer, each within {cache_load.VARIATION:.0%}; the chat template strips thinking from "
        f"earlier turns. Tool loops: {tools.chats} chats of one question and {tools.turns - 1} tool calls, with "
        "results of "
        f"{tools.says} tokens, {tools.think} of thinking and {tools.answer} of answer per turn; every prompt repeats "
        "all generated tokens, and every turn but the last ends with the token that begins a tool call. There are "
        f"{found.users} requests in flight, chats take turns, and a chat's next turn follows without a pause. The "
        f"number of repetitions is {found.repetitions}; each has its own words and lengths, which are the same in all "
        "arms. Figures are medians, with the lowest and the highest value in brackets."
    )
    yield ""
    yield (
        "All arms schedule requests in vLLM's own order. The arm LRU has `kv_memory.enabled = false`, and the arm "
        "tiers "
        "has `true`. The arm never hit first reuses blocks that no other request ever hit before all other blocks, "
        "least recently used first in each class (after vLLM pull requests 51909 and 55998), in a separate engine with "
        "the same number of blocks. Hits and prompt tokens are vLLM's own counters."
    )


def as_json(found: Findings) -> dict[str, Any]:
    """Return all figures as plain values."""
    import vllm

    return {
        "vllm": vllm.__version__,
        "machine": machine(),
        "repetitions": found.repetitions,
        "blocks": found.blocks,
        "share": found.share,
        "users": found.users,
        "aims": [asdict(aim) for aim in aims(found)],
        "runs": [{"arm": r.arm, "kind": r.kind, "share": r.share, "seed": r.seed, **r.figures} for r in found.runs],
        "summary": summary(found),
    }


def summary(found: Findings) -> dict[str, Any]:
    """Return the last line. hit_rate: points over LRU; ttft_p50: tiers divided by LRU; both for multi-turn chats."""
    names = ("hit_rate", "prefill_tokens", "ttft_p50_ms", "ttft_p95_ms")
    arms = {
        arm: {kind: {n: round(found.median(arm, kind, n), 4) for n in names} for kind in cache_load.KINDS}
        for arm in ARMS
    }
    return {
        "arms": arms,
        "ratios": {
            "hit_rate": round(found.gained(CHATS), 2),
            "ttft_p50": round(found.ratio(CHATS, "ttft_p50_ms"), 4),
            "tool_loop_hit_rate": round(found.gained(TOOLS), 2),
            "tool_loop_ttft_p50": round(found.ratio(TOOLS, "ttft_p50_ms"), 4),
        },
    }


def write(found: Findings, folder: Path) -> list[Path]:
    """Write the report's three files and return their paths."""
    paths = [folder / f"cache.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(as_json(found), indent=1) + "\n")
    paths[1].write_text(markdown(found))
    draw(found, paths[2])
    return paths


def draw(found: Findings, path: Path) -> None:
    """Draw the hit rate and the TTFT of each arm, by kind of chats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = (("hit_rate", "hit rate, %", 100.0), ("ttft_p50_ms", "TTFT P50, ms", 1.0))
    for axes, (name, label, factor) in zip(figure.subplots(1, 2), panels, strict=True):
        for index, arm in enumerate(ARMS):
            at = [i + (index - 1) * 0.25 for i in range(len(cache_load.KINDS))]
            values = [[factor * v for v in found.values(arm, kind, name)] for kind in cache_load.KINDS]
            middle = [statistics.median(v) for v in values]
            below = [m - min(v) for m, v in zip(middle, values, strict=True)]
            above = [max(v) - m for m, v in zip(middle, values, strict=True)]
            axes.bar(at, middle, 0.22, yerr=[below, above], color=COLOURS[arm], ecolor="grey", capsize=3, label=arm)
        axes.set_xticks(range(len(cache_load.KINDS)), list(cache_load.KINDS))
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
