"""One soak: start everything, let it run, bring it to rest, and summarise the findings."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.processes import Control, free_port
from tests.soak import trace, watch
from tests.soak.faults import Faults
from tests.soak.load import Load
from tests.soak.proxy import Proxy
from tests.soak.record import Recording

# A soak goes on until there were so many requests and so many faults; seconds between two looks.
LEAST, LOOK_S = 3, 0.1
FIRST = asyncio.FIRST_COMPLETED
# Longest allowed time without a token while requests wait for one.
STALL_S = 20.0
ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback|RuntimeWarning|never retrieved")
# Log records that the soak itself causes; all lines of one record name the same place.
EXPLAINED = re.compile(rf"meridian: revision \d+ refused|{trace.INJECTED}")
PLACE = re.compile(r"\[(\w+\.py:\d+)\]")
SHOWN = 20


class Soak:
    """A soak, which may be run once. All files are in `out`. together: engine core and worker are one process."""

    def __init__(self, out: Path, seed: int, seconds: float, clients: int, *, together: bool = False) -> None:
        self._out, self._seed, self._seconds, self._clients, self._together = out, seed, seconds, clients, together
        self._found: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Run the soak and return the summary. All processes are stopped in every case."""
        self._control = control = Control(self._out)
        self._proxy = Proxy(free_port(), control.port)
        await self._proxy.open()
        self._recording = Recording(self._out, control)
        chance = random.Random(f"faults {self._seed}")
        self._faults = Faults(control, self._proxy, self._recording.follows, chance, self._seconds)
        target = f"127.0.0.1:{self._proxy.port}"
        self._load = Load(self._out, self._seed, target, self._faults.env, together=self._together)
        try:
            await self._load.begin(lambda: self._faults.untouched)
            lasted = await self._soak()
            return await asyncio.to_thread(self._summary, lasted)
        finally:
            await self._proxy.end()
            control.process.signal(signal.SIGCONT)
            self._load.stop()
            for process in (self._recording.process, control.process):
                process.stop()

    async def _soak(self) -> float:
        """Run requests and faults and return the seconds for which there were requests."""
        load, faults = self._load, self._faults
        watching = asyncio.create_task(load.watch(self._others, lambda: f"{sum(faults.counts.values())} faults, "))
        asking = asyncio.create_task(load.clients.run(self._clients))
        breaking = asyncio.create_task(faults.run())
        wait_s = self._seconds
        while not (await asyncio.wait({watching, asking, breaking}, timeout=wait_s, return_when=FIRST))[0]:
            if self._enough():
                break
            wait_s = LOOK_S
        faults.stop()
        await breaking
        await faults.calm()
        load.clients.stop()
        await asking
        lasted = time.monotonic() - load.began
        self._found += await faults.at_rest()
        await load.end(watching)
        self._found += await self._counted()
        await self._proxy.close()
        await self._recording.finish()
        return lasted

    def _enough(self) -> bool:
        """Return whether the soak is worth a summary; on a busy machine a short one may have done too little."""
        tally = self._load.clients.tally
        return min(tally.requests, sum(self._faults.counts.values())) >= LEAST and tally.compared > 0

    def _others(self) -> dict[str, int]:
        """Return processes that come and go; also keep the recording running."""
        self._recording.keep()
        return {watch.CONTROL: self._control.process.popen.pid}

    async def _counted(self) -> list[str]:
        """Check that vLLM counts at most as many requests as clients made, because probes must not count."""
        made = self._load.clients.tally.choices
        counted = await self._load.counted("vllm:request_success_total")
        return [] if 0 < counted <= made else [f"vLLM counts {counted} requests, clients made {made}"]

    def _logged(self) -> list[str]:
        """Return errors in the logs that the soak does not explain."""
        found = []
        for log in ("served.log", "control.log", "record.log"):
            lines = (self._out / log).read_text(errors="replace").splitlines()
            for _, group in groupby(lines, lambda line: PLACE.findall(line)[:1]):
                record = list(group)
                if not any(map(EXPLAINED.search, record)):
                    found += [f"{log}: {line[:300]}" for line in record if ERROR.search(line)]
        return found

    def _summary(self, lasted: float) -> dict[str, Any]:
        load, faults = self._load, self._faults
        tally, (kept, grown) = load.clients.tally, load.kept(self._seconds)
        audit = trace.audit(self._recording.paths)
        stalled = tally.longest_stall_s
        found = [*self._found, *tally.complaints, *faults.complaints, *audit.violations, *grown, *self._logged()]
        if audit.sessions == audit.joined_late:
            found.append("no session was recorded from its beginning")
        if stalled > STALL_S:
            found.append(f"no token for {stalled:.1f} s while requests waited")
        for line in found[:SHOWN]:
            print(line)
        return {
            "seconds": round(lasted, 1),
            **load.answered(),
            "faults": sum(faults.counts.values()),
            "decisions": audit.decisions,
            "outcomes": sum(audit.outcomes.values()) + audit.unheard,
            "violations": len(found),
            "kinds": dict(tally.kinds),
            "fault_kinds": dict(faults.counts),
            "outcome_kinds": {**audit.outcomes, "stream_ended_first": audit.unheard},
            "sessions": audit.sessions,
            "sessions_joined_late": audit.joined_late,
            "reports": audit.reports,
            "preempted_answers": audit.preempted_answers,
            "longest_stall_s": round(stalled, 2),
            **kept,
        }


async def stock(out: Path, seed: int, seconds: float, clients: int) -> dict[str, Any]:
    """Run the same clients with stock vLLM, without faults; return the parts of a soak's summary that concern it.

    The run shows what stock vLLM's processes keep by themselves, so growth is no violation, and which complaints
    clients have without an agent.
    """
    load = Load(out, seed)
    try:
        # Stock vLLM has no decisions, so every request is untouched.
        await load.begin(lambda: 0)
        watching, asking = asyncio.create_task(load.watch()), asyncio.create_task(load.clients.run(clients))
        await asyncio.wait({watching, asking}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        load.clients.stop()
        await asking
        await load.end(watching)
    finally:
        load.stop()
    lasted, violations = round(load.samples[-1].at_s, 1), len(load.clients.tally.complaints)
    return {"seconds": lasted, "violations": violations, **load.answered(), **load.kept(seconds)[0]}
