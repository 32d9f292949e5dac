"""vLLM's server under the clients' load, governed or not: the part that a soak and a run of stock vLLM share.

The module owns the server, the clients and the samples over time. The module runs on the soak's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.engine import ENGINE_ARGS
from tests.engine.served import APART, TOGETHER, Served
from tests.processes import ENGINE_ENV, MODEL, Process, wait_for
from tests.soak import watch
from tests.soak.clients import Clients

# Intervals in seconds: frequent enough for slopes, and too rare to be a load.
SAMPLE_S, SHOW_S = 1.0, 30.0
START_S = 400.0
# Seconds after the start of each process until its growth counts; a third of the run in short runs. Until then the
# worker's memory for each number of rows, beside oneDNN's cache, grows in steps.
WARM_S = 400.0
# oneDNN keeps up to 1,024 compiled primitives, several for each number of rows. With that limit a worker would grow by
# 300 MB, which would hide any other growth.
ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
# A small pool of KV blocks, so that requests are preempted.
OPTIONS = ("--num-gpu-blocks-override", str(ENGINE_ARGS["num_gpu_blocks_override"]))


class Load:
    """The server and its clients.

    control: address at which the agent finds its control plane; empty for stock vLLM. env: further environment
    variables of the server. together: engine core and worker are one process.

    `samples` are the figures, by seconds since `begin`; all files are in `out`.
    """

    clients: Clients

    def __init__(
        self, out: Path, seed: int, control: str = "", env: dict[str, str] | None = None, *, together: bool = False
    ) -> None:
        self._out, self._seed = out, seed
        self.samples: list[watch.Sample] = []
        self.began = 0.0
        self._steps = 0
        # The front end, the engine core, and the worker if it is a process of its own.
        self._processes = 2 if together else 3
        self.server = Served(
            out, control, options=OPTIONS, more={**(TOGETHER if together else APART), **ENV, **(env or {})}
        )
        answers = [sys.executable, "-m", "tests.soak.stock", str(out / "stock.json")]
        self._stock = Process(answers, out / "stock.log", {**ENGINE_ENV, **TOGETHER, "MERIDIAN_CONTROL": ""})

    async def begin(self, untouched: Callable[[], int]) -> None:
        """Wait until the server is up and stock vLLM's answers are known; then create `clients` and start the clock."""
        from transformers import AutoTokenizer

        await asyncio.to_thread(wait_for, self.server.ready, START_S, "vLLM to serve")
        await asyncio.to_thread(wait_for, lambda: self._stock.popen.poll() is not None, START_S, "stock vLLM's answers")
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.clients = Clients(
            f"http://127.0.0.1:{self.server.port}",
            random.Random(f"asks {self._seed}"),
            json.loads((self._out / "stock.json").read_text()),
            lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
            untouched,
        )
        self.began = time.monotonic()

    def stop(self) -> None:
        for process in (self._stock, self.server.process):
            process.stop()

    async def watch(self, others: Callable[[], dict[str, int]] = dict, more: Callable[[], str] = str) -> None:
        """Sample the processes and the `others` by role, and print the progress with the text of `more`, until
        cancelled."""
        roles = watch.roles(self.server.process.popen.pid)
        assert len(roles) == self._processes, f"vLLM's processes are {roles}"
        shown = 0.0
        while True:
            now = time.monotonic() - self.began
            found = [watch.sample(now, role, pid) for role, pid in (roles | others()).items()]
            self.samples += [one for one in found if one is not None]
            if now >= shown + SHOW_S:
                shown = now
                self._show(now, more())
            await asyncio.sleep(SAMPLE_S)

    def _show(self, now: float, more: str) -> None:
        tally, memory = self.clients.tally, {one.role: one.rss_mb for one in self.samples[-4:]}
        print(
            f"{now:5.0f} s: {tally.requests} requests, {tally.tokens} tokens, {len(tally.failed)} failed, "
            f"{len(tally.complaints)} complaints, {more}"
            + ", ".join(f"{role} {mb:.0f} MB" for role, mb in memory.items()),
            flush=True,
        )

    async def counted(self, name: str) -> int:
        """Return the sum of vLLM's counters with this name."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.server.port}") as client:
            lines = (await client.get("/metrics")).text.splitlines()
        return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))

    async def end(self, watching: asyncio.Task[None]) -> None:
        """End the samples, and count vLLM's steps before the server stops, because stock vLLM keeps some memory of
        each."""
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        self._steps = await self.counted("vllm:iteration_tokens_total_count")

    def answered(self) -> dict[str, Any]:
        """Return what the clients had, for the summary."""
        tally = self.clients.tally
        return {
            "requests": tally.requests,
            "failed": len(tally.failed),
            "seed": self._seed,
            "tokens": tally.tokens,
            "equal_to_stock": {"compared": tally.compared, "untouched": tally.untouched},
        }

    def kept(self, seconds: float) -> tuple[dict[str, Any], list[str]]:
        """Return the growth of the processes for the summary, and the growth that is too large.

        seconds: the requested duration of the run.
        """
        # The samples are saved first, so that they remain if the evaluation is stopped.
        watch.save(self.samples, self._out / "processes.csv")
        warm_s, lasted = min(WARM_S, seconds / 3), self.samples[-1].at_s
        # A shorter run would show how a process warms up instead of what it keeps.
        length_s = lasted if seconds >= 2 * WARM_S else 0.0
        worst, found = watch.grown(self.samples, warm_s, length_s, self._steps)
        growth = {
            name: {role: round(g, 2) for role, g in watch.growth(self.samples, name, warm_s, length_s).items()}
            for name in watch.LIMITS
        }
        stock_mb = round(watch.stock_keeps_mb(self._steps), 2)
        kept = {"steps": self._steps, "rss_growth_mb": round(worst, 2), "stock_keeps_mb": stock_mb, "growth": growth}
        return kept, found
