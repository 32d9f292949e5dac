"""One soak: starts everything, lets it run, brings it to rest, and sums up what was found."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx

from tests.engine import ENGINE_ARGS
from tests.engine.test_served import Served
from tests.processes import ENGINE_ENV, MODEL, Control, Process, free_port, wait_for
from tests.soak import picture, trace, watch
from tests.soak.clients import Clients
from tests.soak.faults import Faults
from tests.soak.proxy import Proxy
from tests.soak.record import Recording

if TYPE_CHECKING:
    from pathlib import Path

# Steady enough for slopes, and no load.
SAMPLE_S, SHOW_S = 1.0, 30.0
# After the start, and for each process, before what it keeps counts; a quarter of the run in short ones.
WARM_S = 180.0
# Longest that no token may come while requests wait for one.
STALL_S = 20.0
# Where the pool is small, requests are preempted.
OPTIONS = ("--num-gpu-blocks-override", str(ENGINE_ARGS["num_gpu_blocks_override"]))
ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback|RuntimeWarning|never retrieved")
# Lines that say what this soak does to them.
EXPLAINED = re.compile(r"meridian: revision \d+ refused")
SHOWN = 20


class Soak:
    """Everything lies in `out`; it may be run once."""

    def __init__(self, out: Path, seed: int, seconds: float, clients: int) -> None:
        self._out, self._seed, self._seconds, self._clients = out, seed, seconds, clients
        self._samples: list[watch.Sample] = []
        self._rates: picture.Rates = []
        self._found: list[str] = []
        self._began = 0.0

    async def run(self) -> dict[str, Any]:
        """Returns the summary. What was started is stopped, whatever happens."""
        out = self._out
        stock = Process(
            [sys.executable, "-m", "tests.soak.stock", str(out / "stock.json")],
            out / "stock.log",
            {**ENGINE_ENV, "MERIDIAN_CONTROL": ""},
        )
        control = Control(out)
        self._proxy = Proxy(free_port(), control.port)
        await self._proxy.open()
        self._server = Served(out, f"127.0.0.1:{self._proxy.port}", options=OPTIONS)
        try:
            self._recording = Recording(out, control)
            await asyncio.to_thread(wait_for, self._server.ready, 240, "vLLM to serve")
            await asyncio.to_thread(wait_for, lambda: stock.popen.poll() is not None, 240, "stock vLLM's answers")
            return await self._soak(control, json.loads((out / "stock.json").read_text()))
        finally:
            await self._proxy.end()
            control.process.signal(signal.SIGCONT)
            for process in (stock, self._recording.process, self._server.process, control.process):
                process.stop()

    async def _soak(self, control: Control, stock: dict[str, list[list[int]]]) -> dict[str, Any]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._faults = Faults(control, self._proxy, random.Random(f"faults {self._seed}"), self._seconds)
        self._load = Clients(
            f"http://127.0.0.1:{self._server.port}",
            random.Random(f"asks {self._seed}"),
            stock,
            lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
            lambda: self._faults.untouched,
        )
        self._began = time.monotonic()
        watching = asyncio.create_task(self._watch(control))
        asking = asyncio.create_task(self._load.run(self._clients))
        breaking = asyncio.create_task(self._faults.run())
        await asyncio.wait({watching, asking, breaking}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        self._faults.stop()
        await breaking
        await self._faults.calm()
        self._load.stop()
        await asking
        lasted = time.monotonic() - self._began
        self._found += await self._faults.at_rest()
        watching.cancel()
        await asyncio.wait({watching})
        self._found += await self._counted()
        await self._proxy.close()
        await self._recording.finish()
        return await asyncio.to_thread(self._summary, lasted)

    async def _watch(self, control: Control) -> None:
        """Sample the processes, keep a recording going, and say how it goes."""
        roles, shown, before = watch.roles(self._server.process.popen.pid), 0.0, (0.0, 0, 0)
        assert len(roles) == 3, f"vLLM's processes are {roles}"
        while True:
            now = time.monotonic() - self._began
            pids = {**roles, watch.CONTROL: control.process.popen.pid}
            found = [watch.sample(now, role, pid) for role, pid in pids.items()]
            self._samples += [one for one in found if one is not None]
            self._recording.keep()
            if now - shown >= SHOW_S or now >= before[0] + 5:
                before = self._rate(now, before)
            if now - shown >= SHOW_S:
                shown = now
                self._show(now)
            await asyncio.sleep(SAMPLE_S)

    def _rate(self, now: float, before: tuple[float, int, int]) -> tuple[float, int, int]:
        tally, (then, requests, tokens) = self._load.tally, before
        took = now - then
        self._rates.append((now, (tally.requests - requests) / took, (tally.tokens - tokens) / took))
        return now, tally.requests, tally.tokens

    def _show(self, now: float) -> None:
        tally, memory = self._load.tally, {one.role: one.rss_mb for one in self._samples[-4:]}
        print(
            f"{now:5.0f} s: {tally.requests} requests, {tally.tokens} tokens, {len(tally.failed)} failed, "
            f"{sum(self._faults.counts.values())} faults, {len(tally.complaints)} complaints, "
            + ", ".join(f"{role} {mb:.0f} MB" for role, mb in memory.items()),
            flush=True,
        )

    async def _counted(self) -> list[str]:
        """vLLM has counted no more requests than clients made: probes are none."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._server.port}") as client:
            lines = (await client.get("/metrics")).text.splitlines()
        counted = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))
        if 0 < counted <= self._load.tally.choices:
            return []
        return [f"vLLM counts {counted:.0f} requests, clients made {self._load.tally.choices}"]

    def _logged(self) -> list[str]:
        """Errors in the logs that nothing here explains."""
        found = []
        for log in ("served.log", "control.log", "record.log"):
            lines = (self._out / log).read_text(errors="replace").splitlines()
            found += [f"{log}: {line[:300]}" for line in lines if ERROR.search(line) and not EXPLAINED.search(line)]
        return found

    def _summary(self, lasted: float) -> dict[str, Any]:
        tally, faults = self._load.tally, self._faults
        # So that a soak whose reckoning is stopped leaves what it takes.
        watch.save(self._samples, self._out / "processes.csv")
        audit = trace.audit(self._recording.paths)
        warm_s = min(WARM_S, self._seconds / 4)
        # Too short a time shows how a process warms up, not what it keeps.
        length_s = lasted if self._seconds >= 2 * WARM_S else 0.0
        rss_mb, grown = watch.grown(self._samples, warm_s, length_s)
        stalled = tally.longest_stall_s
        found = [*self._found, *tally.complaints, *faults.complaints, *audit.violations, *grown, *self._logged()]
        if audit.sessions == audit.joined_late:
            found.append("no session was recorded from its beginning")
        if stalled > STALL_S:
            found.append(f"no token for {stalled:.1f} s while requests waited")
        events = [(at - self._began, kind) for at, kind in faults.events]
        picture.draw(self._samples, self._rates, events, self._out / "soak.png")
        for line in found[:SHOWN]:
            print(line)
        return {
            "seconds": round(lasted, 1),
            "requests": tally.requests,
            "failed": len(tally.failed),
            "faults": sum(faults.counts.values()),
            "decisions": audit.decisions,
            "outcomes": sum(audit.outcomes.values()) + audit.unheard,
            "rss_growth_mb": round(rss_mb, 2),
            "violations": len(found),
            "seed": self._seed,
            "tokens": tally.tokens,
            "equal_to_stock": {"compared": tally.compared, "untouched": tally.untouched},
            "kinds": dict(tally.kinds),
            "fault_kinds": dict(faults.counts),
            "outcome_kinds": {**audit.outcomes, "stream_ended_first": audit.unheard},
            "sessions": audit.sessions,
            "sessions_joined_late": audit.joined_late,
            "reports": audit.reports,
            "preempted_answers": audit.preempted_answers,
            "longest_stall_s": round(stalled, 2),
            "growth": {
                name: {role: round(g, 2) for role, g in watch.growth(self._samples, name, warm_s, length_s).items()}
                for name in watch.LIMITS
            },
        }
