"""Measure how many engines one core of the control plane can serve: `python -m tests.bench.size`.

Protocol: each row has a fresh `meridian-control` on SQLite and loopback. Simulated engines use the agent's real link,
four to a process; the sequences of each engine think, with a step of one token each every 20 ms. Every step is
reported, and the policy is the default. A row has 5 s to begin and 20 s of measurement. Processor time is the server's
own, over all its threads, so other programs on the machine do not change it; they do change round trips. A core is full
at 1 / (cores per report). Probes are refused and requests do not end, so decisions are few. The last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.machine import TICKS_PER_S, machine, rss_mb, ticks_of
from tests.fakes.linked import LinkedEngine
from tests.processes import Control, free_port

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

ROWS = ((4, 16), (12, 16), (24, 16), (4, 64), (12, 64))
STEP_S, BEGIN_S, MEASURE_S, PER_PROCESS = 0.02, 5.0, 20.0, 4


def engines(target: str, numbers: range, sequences: int, over: Event, trips: multiprocessing.Queue[float]) -> None:
    """Step some engines in turn until `over` is set; put the newest round trip of each into `trips` once a second."""
    linked = [LinkedEngine([target], f"e{number}", max_num_seqs=sequences) for number in numbers]
    for engine in linked:
        engine.__enter__()
        for number in range(sequences):
            engine.open(f"{engine.engine_id}-{number}")
    due = noted = time.monotonic()
    while not over.is_set():
        for engine in linked:
            engine.step()
        if due - noted >= 1:
            noted = due
            for engine in linked:
                trips.put(engine.link.outbox.round_trip_ms)
        due += STEP_S
        time.sleep(max(0.0, due - time.monotonic()))
    for engine in linked:
        engine.__exit__()


def reports(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("meridian_reports_total")).split()[1])


def measure(count: int, sequences: int) -> dict[str, float]:
    address = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    over, trips = context.Event(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        control = Control(Path(folder), options=["--metrics-listen", address])
        shares = [range(first, min(first + PER_PROCESS, count)) for first in range(0, count, PER_PROCESS)]
        made = [
            context.Process(target=engines, args=(control.target, share, sequences, over, trips)) for share in shares
        ]
        for process in made:
            process.start()
        while sum(e.acked_revision > 0 for e in control.engines()) < count:
            time.sleep(0.1)
        time.sleep(BEGIN_S)
        pid = control.process.popen.pid
        begun, ticks, seen = time.monotonic(), ticks_of(pid), reports(address)
        time.sleep(MEASURE_S)
        took_s = time.monotonic() - begun
        cores, seen = (ticks_of(pid) - ticks) / TICKS_PER_S / took_s, (reports(address) - seen) / took_s
        memory = rss_mb(pid)
        over.set()
        found = []
        while any(process.is_alive() for process in made) or not trips.empty():
            if not trips.empty():
                found.append(trips.get())
        control.process.stop()
    return {
        "engines": count,
        "sequences": sequences,
        "reports_per_s": round(seen),
        "cores": round(cores, 2),
        "ms_per_report": round(cores / seen * 1e3, 3),
        "round_trip_ms": round(statistics.median(found), 1),
        "rss_mb": round(memory),
    }


def main() -> int:
    print(machine())
    rows = []
    for count, sequences in ROWS:
        row = measure(count, sequences)
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
