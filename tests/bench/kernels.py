"""Measure how fast the signals of logits rows are read on a GPU: `make bench-kernels`.

Protocol: one process and one GPU; every arm reads the same logits (normal, spread 4, one end token), shape after shape.
Before each run 2 GiB of other memory are read, so that the L2 cache is cold and clean and the host is ahead of the GPU.
CUDA events on torch's current stream enclose the run; the figures are medians of 50 runs after 5 to warm up. Arms take
turns within a repetition. The measure is bytes of logits over time, relative to a copy of 1 GiB (bytes read plus bytes
written over its time), which is measured first. Before an arm is timed, its entropy is compared with the float64
definition on up to four rows.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian_kernels import EntropyProbe, reference
from meridian_kernels.cuda import KERNELS

from tests.bench import harness
from tests.bench.harness import BenchError, Column, Interval
from tests.bench.kernels_arms import EAGER, OURS, Arm, arms

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

    from tests.bench.harness import Figures, Session

VOCABULARIES, ROWS = (32000, 128256, 151936, 262144), (1, 8, 32, 64, 128, 256, 512)
REPETITIONS, WARM_UP = 50, 5
# The end token is the same for all shapes, because torch.compile makes a new kernel for another one.
END_TOKEN = 777
FLUSH_BYTES, COPY_BYTES = 2 << 30, 1 << 30
# Greatest allowed difference from the definition; an arm that exceeds it is not timed.
WRONG_NATS = 1e-3
# The aims: share of the copy bandwidth, speed-up over eager torch, share of the best other arm's speed, and the number
# of rows from which they apply.
AIM_SHARE, AIM_EAGER, AIM_LEVEL, AIM_ROWS = 0.9, 4.0, 0.95, 128
COLUMNS = (
    Column("median_us", "time, us", 1, "ratio"),
    Column("gb_per_s", "GB/s", 0),
    Column("of_copy", "of a copy, %", 0, factor=100),
    Column("host_us", "host, us", 0),
)


class Clock:
    """Times work on torch's current stream, with the L2 cache cold."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._other = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def us(self, begin: Callable[[], Any]) -> float:
        cuda = self._torch.cuda
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self._other.sum()
        start.record()
        kept = begin()
        stop.record()
        cuda.synchronize()
        del kept
        return float(start.elapsed_time(stop)) * 1e3


def copy_bytes_per_s(clock: Clock, device: torch.device) -> float:
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (statistics.median(clock.us(lambda: target.copy_(source)) for _ in range(20)) * 1e-6)


def compare(clock: Clock, probe: EntropyProbe, logits: torch.Tensor, repetitions: int) -> dict[str, Any]:
    """Measure every arm on these logits; return a case of the last line."""
    rows, vocab = logits.shape
    found, missing = arms(probe, rows, vocab, logits.device)
    want = reference(logits[:4].double().cpu().numpy(), [END_TOKEN]).entropy_nats
    errors = {
        name: float(np.abs(_array(arm, arm.begin(logits, END_TOKEN))[: len(want)] - want).max())
        for name, arm in found.items()
    }
    for name, error in errors.items():
        if not error <= WRONG_NATS:
            raise BenchError(f"{name} is wrong by {error:.2g} nats on {logits.dtype} {rows} x {vocab}")
    samples: dict[str, list[float]] = {name: [] for name in found}
    for repetition in range(WARM_UP + repetitions):
        for name in harness.in_turn(list(found), repetition):
            us = clock.us(lambda arm=found[name]: arm.begin(logits, END_TOKEN))  # type: ignore[misc]
            if repetition >= WARM_UP:
                samples[name].append(us)
    read_bytes = rows * vocab * logits.element_size()
    times = {
        name: dict(zip(("low_us", "median_us", "high_us"), np.percentile(us, (10, 50, 90)).tolist(), strict=True))
        for name, us in samples.items()
    }
    return {
        "dtype": str(logits.dtype).removeprefix("torch."),
        **{"vocab": vocab, "rows": rows, "read_bytes": read_bytes, "times": times},
        "host_us": _host_us(probe, logits, END_TOKEN),
        "errors_nats": errors,
        "missing": missing,
    }


def aims(cases: list[dict[str, Any]], copy: float) -> dict[str, list[bool]]:
    """Return for each aim whether the cases to which it applies meet it. copy: bytes per second of a copy."""
    met: dict[str, list[bool]] = {}
    for case in cases:
        us = {arm: found["median_us"] for arm, found in case["times"].items()}
        if case["rows"] >= AIM_ROWS:
            best = min(time_us for arm, time_us in us.items() if arm != OURS)
            share = case["read_bytes"] / us[OURS] * 1e6 / copy
            met.setdefault(f"{AIM_SHARE:.0%} of copy bandwidth", []).append(share >= AIM_SHARE)
            met.setdefault(f"{AIM_EAGER:g} times torch eager", []).append(us[EAGER] / us[OURS] >= AIM_EAGER)
            met.setdefault("level with the best other (5 %)", []).append(best / us[OURS] >= AIM_LEVEL)
    return met


def _array(arm: Arm, begun: Any) -> Any:
    entropy = arm.entropy(begun)
    return entropy if isinstance(entropy, np.ndarray) else entropy.float().cpu().numpy()


def _host_us(probe: EntropyProbe, logits: torch.Tensor, end: int) -> float:
    spent = []
    for _ in range(20):
        began = time.perf_counter()
        pending = probe.begin(logits, end)
        spent.append((time.perf_counter() - began) * 1e6)
        pending.result()
    return statistics.median(spent)


def why_not() -> str:
    """Return the reason why nothing can be measured here, or an empty string."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (extras cuda12, cuda13)"
    return ""


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "vllm", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(session: Session) -> dict[str, Any]:
    import torch

    given, device = session.options, torch.device("cuda", 0)
    probe = EntropyProbe(backend="cuda", strict=True, max_rows=max(given.rows))
    clock, cases, missing = Clock(device), list[dict[str, Any]](), dict[str, str]()
    copy = copy_bytes_per_s(clock, device)
    for dtype in given.dtypes:
        for vocab in given.vocabularies:
            whole = torch.empty(max(given.rows), vocab, device=device).normal_(0.0, 4.0).to(getattr(torch, dtype))
            for rows in given.rows:
                case = compare(clock, probe, whole[:rows], given.repetitions)
                missing = case.pop("missing")
                cases.append(case)
                for arm, times in case["times"].items():
                    rate = case["read_bytes"] / times["median_us"] * 1e6
                    figures: Figures = {"median_us": times["median_us"]}
                    figures |= {"gb_per_s": rate / 1e9, "of_copy": rate / copy}
                    figures |= {"host_us": case["host_us"]} if arm == OURS else {}
                    session.add(arm, figures, case=f"{dtype} {rows} x {vocab}")
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = {"gpu": torch.cuda.get_device_name(device), "driver": driver, "versions": _versions()}
    found |= {"commit": given.commit, "copy_bytes_per_s": copy}
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    text = f"{found['gpu']}, driver {driver}, {versions}, commit {given.commit}; a copy moves {copy / 1e9:,.0f} GB/s."
    if missing:
        text += f" Not run: {', '.join(f'{name} ({reason})' for name, reason in missing.items())}."
    session.table("Signals of logits rows", text, COLUMNS, OURS)
    met = aims(cases, copy)
    for aim, reached in met.items():
        share = sum(reached) / len(reached)
        session.goal(f"cases of {AIM_ROWS} rows and more with {aim}", ">= 1", Interval(share, share, share), 2)
    told = {aim: f"{sum(reached)} of {len(reached)}" for aim, reached in met.items()}
    return {**found, "cases": cases, "missing": missing, "aims": told}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=ROWS)
    add("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    add("--dtypes", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    add("--repetitions", type=int, default=REPETITIONS)
    add("--commit", default=_output_of("git", "describe", "--always", "--dirty"), help="into a folder that git ignores")


if __name__ == "__main__":
    if reason := why_not():
        print(f"nothing measured: {reason}")
        sys.exit(2)
    harness.main("kernels", "Signals of logits rows on a GPU", __doc__, options, measure)
