"""Measure what processes keep: memory, threads and files by role over time, and whether any of them grows.

The module reads /proc. Growth is a robust slope (Theil and Sen's, the median over pairs) within the lives of the
processes, each life after a time to warm up, multiplied by the length of the run.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

PROC = Path("/proc")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20
# Titles that vLLM gives its processes, and their roles here.
TITLES = {"VLLM::EngineCor": "engine core", "VLLM::Worker": "worker"}
FRONT, CONTROL = "front end", "control plane"
# Most samples of a process from which pairs are made; more samples are thinned out.
MOST_SAMPLES = 400
# Allowed growth over a whole run: a process sometimes touches memory for the first time, and a short-lived connection
# has a file and perhaps a thread.
LIMITS = {"rss_mb": 12.0, "threads": 2.0, "files": 3.0}
# Bytes that stock vLLM's engine core and worker each keep of every step: 74,515 steps of the same clients left 2,960
# and 2,936 kB. These bytes are ZeroMQ's commands of 40 bytes: a process that spins for a message leaves the
# notification of it unread.
STOCK_KEEPS = 41


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    at_s: float
    role: str
    pid: int
    rss_mb: float
    threads: int
    files: int


def sample(at_s: float, role: str, pid: int) -> Sample | None:
    """Return a sample of the process, or None if it has ended."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
        threads = len(os.listdir(PROC / str(pid) / "task"))
        files = len(os.listdir(PROC / str(pid) / "fd"))
    except OSError:
        return None
    return Sample(at_s, role, pid, pages * PAGE_MB, threads, files)


def children(pid: int) -> list[int]:
    """Return all descendants of the process."""
    own: list[int] = []
    for thread in (PROC / str(pid) / "task").glob("*"):
        # A thread may have just ended.
        with contextlib.suppress(OSError):
            own += map(int, (thread / "children").read_text().split())
    return [*own, *(grandchild for child in own for grandchild in children(child))]


def roles(server_pid: int) -> dict[str, int]:
    """Return vLLM's processes by role."""
    found = {FRONT: server_pid}
    for pid in children(server_pid):
        try:
            name = (PROC / str(pid) / "comm").read_text().strip()
        except OSError:
            continue
        for title, role in TITLES.items():
            if name.startswith(title):
                found[role] = pid
    return found


def growth(samples: Iterable[Sample], name: str, warm_s: float, length_s: float) -> dict[str, float]:
    """Return how much of `name` a process gains over `length_s`, by role, without roles that never lived past
    `warm_s`."""
    lives: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for one in samples:
        lives.setdefault(one.role, {}).setdefault(one.pid, []).append((one.at_s, getattr(one, name)))
    gained = {}
    for role, by_pid in lives.items():
        slopes = [_slopes(np.array([p for p in life if p[0] >= life[0][0] + warm_s])) for life in by_pid.values()]
        all_slopes = np.concatenate(slopes)
        if len(all_slopes):
            gained[role] = float(np.median(all_slopes)) * length_s
    return gained


def _slopes(points: np.ndarray) -> np.ndarray:
    """Return the slopes of all pairs of points at least half the life apart; points: [samples, 2] with times first."""
    if len(points) < 8:
        return np.zeros(0)
    points = points[:: max(1, len(points) // MOST_SAMPLES)]
    i, j = np.triu_indices(len(points), 1)
    apart = points[j, 0] - points[i, 0]
    far = apart >= (points[-1, 0] - points[0, 0]) / 2
    slopes: np.ndarray = (points[j, 1] - points[i, 1])[far] / apart[far]
    return slopes


def stock_keeps_mb(steps: int) -> float:
    """Return the MB that an engine core or a worker of stock vLLM gains in this many steps."""
    return STOCK_KEEPS * steps / 2**20


def grown(samples: list[Sample], warm_s: float, length_s: float, steps: int) -> tuple[float, list[str]]:
    """Return the largest growth in MB of any role, and the growths that exceed their limit for this many vLLM steps."""
    own_mb = dict.fromkeys(TITLES.values(), stock_keeps_mb(steps))
    worst, found = 0.0, []
    for name, limit in LIMITS.items():
        for role, gained in growth(samples, name, warm_s, length_s).items():
            if name == "rss_mb":
                worst = max(worst, gained)
            if gained > limit + (own_mb.get(role, 0.0) if name == "rss_mb" else 0.0):
                found.append(f"{role}: {name} grows by {gained:.1f} in {length_s:.0f} s")
    return worst, found


def save(samples: list[Sample], path: Path) -> None:
    names = [field.name for field in fields(Sample)]
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows([getattr(one, name) for name in names] for one in samples)
