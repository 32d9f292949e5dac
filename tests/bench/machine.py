"""Describe the machine of a benchmark, and measure what its processes and others use of it. Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

Measured = TypeVar("Measured")

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Large pages for tensors. With small ones, equal processes differ more by where their memory happens to lie.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
# Fields of the first line of /proc/stat that are not time spent on a process.
IDLE, IOWAIT, GUEST = 3, 4, 8
LOOK_S, TRIES = 2.0, 3


def machine() -> str:
    """Return the number of usable cores and the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{len(os.sched_getaffinity(0))} cores, {next(names, platform.machine())}"


def ticks_of(pid: int) -> int:
    """Return the processor time of a process so far, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Others:
    """The processor time since creation that neither this process nor its descendants used."""

    def __init__(self) -> None:
        self._all, self._own = _all_ticks(), tree_ticks(os.getpid())

    def cores(self, wall_s: float) -> float:
        """Return the used cores, averaged over `wall_s`. Time stolen from a virtual machine counts as used."""
        used = _all_ticks() - self._all - (tree_ticks(os.getpid()) - self._own)
        return max(0.0, used / TICKS_PER_S / wall_s)


class Calm:
    """Measures while nothing else runs, within a limited patience.

    quiet_cores: cores that other programs may use. patience_s: total time for waiting and for disturbed runs.
    """

    def __init__(self, quiet_cores: float, patience_s: float) -> None:
        self._quiet_cores, self._patience_s = quiet_cores, patience_s

    async def measure(self, run: Callable[[], Awaitable[Measured]]) -> tuple[Measured, float]:
        """Return the result of `run` and the cores that other programs used meanwhile.

        A disturbed run is repeated; of TRIES disturbed runs the least disturbed one counts.
        """
        found: list[tuple[Measured, float]] = []
        while not found or (len(found) < TRIES and self._patience_s > 0):
            await self._quiet()
            others, began_s = Others(), time.perf_counter()
            measured = await run()
            wall_s = time.perf_counter() - began_s
            found.append((measured, others.cores(wall_s)))
            if found[-1][1] <= self._quiet_cores:
                break
            self._patience_s -= wall_s
        return min(found, key=lambda pair: pair[1])

    async def _quiet(self) -> None:
        while self._patience_s > 0:
            others = Others()
            await asyncio.sleep(LOOK_S)
            if others.cores(LOOK_S) <= self._quiet_cores:
                return
            self._patience_s -= LOOK_S


def _all_ticks() -> int:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:GUEST]) - fields[IDLE] - fields[IOWAIT]


def tree_ticks(root: int) -> int:
    """Return the ticks of a process and its descendants, including those that have ended and were waited for."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    own = {root}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks[pid] for pid in own)


@contextlib.contextmanager
def output_into(log: Path) -> Iterator[None]:
    """Write the output of this process and its children to a file, because vLLM prints a lot."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
