"""Measure how fast the signals of logits rows are read on a GPU: `make bench-kernels`.

Protocol: one process and one GPU; every arm reads the same logits (normal, spread 4, one end token), shape after shape.
Before each run 2 GiB of other memory are read, so that the L2 cache is cold and clean and the host is ahead of the GPU.
CUDA events on torch's current stream enclose the run; the figures are medians of 50 runs after 5 to warm up. For the
agent's own arm the figure is the time that the engine's stream waits: the kernel and the events between the streams,
without the copy of the results, which runs beside it. "Kernel alone" is the launch on torch's own stream. Arms take
turns within a repetition. The measure is bytes of logits over time, relative to a copy of 1 GiB (bytes read plus bytes
written over its time), which is measured first. Before an arm is timed, its entropy is compared with the float64
definition on up to four rows. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian_kernels import EntropyProbe, reference
from meridian_kernels.cuda import KERNELS

from tests.bench.kernels_arms import OURS, Arm, arms
from tests.bench.kernels_report import Case, Found, Times, markdown
from tests.bench.program import BenchError, main

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

RESULTS = Path(__file__).parent / "results"
VOCABULARIES, ROWS = (32000, 128256, 151936, 262144), (1, 8, 32, 64, 128, 256, 512)
REPETITIONS, WARM_UP = 50, 5
# The end token is the same for all shapes, because torch.compile makes a new kernel for another one.
END_TOKEN = 777
FLUSH_BYTES, COPY_BYTES = 2 << 30, 1 << 30
# Greatest allowed difference from the definition; an arm that exceeds it is not timed.
WRONG_NATS = 1e-3


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


def measure(clock: Clock, probe: EntropyProbe, logits: torch.Tensor, repetitions: int) -> tuple[Case, dict[str, str]]:
    """Measure every arm on these logits."""
    rows, vocab = logits.shape
    end = END_TOKEN
    found, missing = arms(probe, rows, vocab, logits.device)
    few = logits[:4].double().cpu().numpy()
    want = reference(few, [end]).entropy_nats
    errors = {
        name: float(np.abs(_array(arm, arm.begin(logits, end))[: len(want)] - want).max())
        for name, arm in found.items()
        if arm.entropy is not None
    }
    for name, error in errors.items():
        if not error <= WRONG_NATS:
            raise BenchError(f"{name} is wrong by {error:.2g} nats on {logits.dtype} {rows} x {vocab}")
    samples: dict[str, list[float]] = {name: [] for name in found}
    for repetition in range(WARM_UP + repetitions):
        for name, arm in found.items():
            us = clock.us(lambda arm=arm: arm.begin(logits, end))  # type: ignore[misc]
            if repetition >= WARM_UP:
                samples[name].append(us)
    dtype = str(logits.dtype).removeprefix("torch.")
    read_bytes = rows * vocab * logits.element_size()
    times = {name: Times.of(us) for name, us in samples.items()}
    return Case(dtype, vocab, rows, read_bytes, times, _host_us(probe, logits, end), errors), missing


def _array(arm: Arm, begun: Any) -> Any:
    assert arm.entropy is not None
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


def run() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=ROWS)
    add("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    add("--dtypes", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    add("--repetitions", type=int, default=REPETITIONS)
    add("--out", type=Path, default=Path("build/bench-kernels"))
    add("--save", action="store_true", help="copy the results to tests/bench/results")
    add("--commit", default=_output_of("git", "describe", "--always", "--dirty"), help="into a folder that git ignores")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    probe = EntropyProbe(backend="cuda", strict=True, max_rows=max(args.rows))
    clock = Clock(device)
    bandwidth = copy_bytes_per_s(clock, device)
    cases: list[Case] = []
    missing: dict[str, str] = {}
    for dtype in args.dtypes:
        for vocab in args.vocabularies:
            whole = torch.empty(max(args.rows), vocab, device=device).normal_(0.0, 4.0).to(getattr(torch, dtype))
            for rows in args.rows:
                case, missing = measure(clock, probe, whole[:rows], args.repetitions)
                cases.append(case)
                share = case.share(OURS, bandwidth)
                print(f"{dtype} {rows} x {vocab}: {case.times[OURS].median_us:.1f} us, {share:.0%} of copy", flush=True)
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    name = torch.cuda.get_device_name(device)
    found = Found(name, driver, _versions(), args.commit, bandwidth, cases, missing)
    for folder in (args.out, RESULTS) if args.save else (args.out,):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.md").write_text(markdown(found))
        (folder / "kernels.json").write_text(json.dumps(found.plain(), indent=1) + "\n")
    print(markdown(found))
    print(json.dumps(found.plain()))


if __name__ == "__main__":
    if reason := why_not():
        print(f"nothing measured: {reason}")
        sys.exit(2)
    main(run)
