"""Run seeds of the simulator on all cores: `python -m tests.sim --seeds 0:5000`.

A failing seed is reduced to a smaller run, which is shown with its trace. The last line counts seeds, failures and
seeds per minute. The exit status is 1 if a seed failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

# More threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.sim import lines, worker
from tests.sim.faults import FAULTS
from tests.sim.inject import ENGINE, LINK, WORKER, all_lines
from tests.sim.world import Failure, Options, run

BATCH = 50
SHOWN_FAILURES, SHOWN_LINES = 3, 40


def failing(seeds: range, at_most_s: float) -> tuple[int, list[int]]:
    """Return how many seeds were run, and the seeds that failed. Runs in a process of its own."""
    done, failed = 0, []
    for seed in seeds:
        if time.monotonic() > at_most_s:
            break
        done += 1
        try:
            run(seed)
        except Failure:
            failed.append(seed)
    return done, failed


def _fails(seed: int, options: Options) -> Failure | None:
    try:
        run(seed, options)
    except Failure as failure:
        return failure
    return None


def smaller(seed: int) -> tuple[Options, Failure]:
    """Return the options of the smallest failing run found, and its failure with its trace. The seed must fail."""
    options = Options(trace=True)
    failure = _fails(seed, options)
    assert failure is not None, f"seed {seed} does not fail"
    for name in sorted(FAULTS):
        fewer = replace(options, without=options.without | {name})
        if found := _fails(seed, fewer):
            options, failure = fewer, found
    ticks = failure.tick
    while ticks > 1:
        shorter = replace(options, ticks=ticks // 2)
        if not (found := _fails(seed, shorter)):
            break
        options, failure, ticks = shorter, found, ticks // 2
    return options, failure


def show(seed: int) -> None:
    options, failure = smaller(seed)
    without = ", ".join(sorted(options.without))
    print(f"{failure}\n  smallest: {options.ticks} ticks{f', without {without}' if without else ''}")
    for line in failure.trace[-SHOWN_LINES:]:
        print(f"  {line[:400]}")


def broken_batch(batch: list[lines.Case | worker.Case], at_most_s: float) -> tuple[int, list[str]]:
    """Return how many cases were run, and what they violated. Runs in a process of its own."""
    done, found = 0, []
    for case in batch:
        if time.monotonic() > at_most_s:
            break
        done += 1
        said = lines.broken(case) if isinstance(case, lines.Case) else worker.broken(case)
        found += [said] if said else []
    return done, found


def fail_lines(seeds: range, jobs: int, at_most_s: float) -> int:
    """Raise a fault at every line of the agent that the seeds or a worker reach, at its first execution and at a later
    one."""
    began = time.monotonic()
    found: list[lines.Case | worker.Case] = [*lines.cases(seeds, nth=(1, 2, 10)), *worker.cases()]
    batches = [found[at : at + BATCH] for at in range(0, len(found), BATCH)]
    done, said = 0, list[str]()
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        for count, bad in pool.map(partial(broken_batch, at_most_s=at_most_s), batches):
            done, said = done + count, said + bad
    print(*said, sep="\n", end="\n" if said else "")
    reached = {case.fault.line for case in found if case.fault.line is not None}
    by_side = ", ".join(f"{sum(r[0] == side for r in reached)} of the {side}" for side in (ENGINE, LINK, WORKER))
    known, hit = all_lines(), {(file, line) for _, file, line in reached}
    print(f"{len(hit & known)} of {len(known)} lines reached; none in {', '.join(sorted(without(known, hit)))}")
    took_s = time.monotonic() - began
    print(f"{done} of {len(found)} faults at lines: {by_side}; {len(said)} broke something; {took_s:.0f} s")
    return 1 if said or done < len(found) else 0


def without(known: set[tuple[str, int]], hit: set[tuple[str, int]]) -> set[str]:
    """Return the files of which no line is reached."""
    return {file for file, _ in known} - {file for file, _ in hit}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:5000", help="a seed, or FIRST:END")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this many seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--lines", action="store_true", help="raise a fault at every line of the agent that the seeds reach"
    )
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    began = time.monotonic()
    if arguments.lines:
        return fail_lines(seeds, arguments.jobs, began + arguments.seconds)
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    work = partial(failing, at_most_s=began + arguments.seconds)
    done, failed = 0, list[int]()
    if len(batches) == 1:
        done, failed = work(seeds)
    else:
        with ProcessPoolExecutor(arguments.jobs, get_context("fork")) as pool:
            for count, bad in pool.map(work, batches):
                done, failed = done + count, failed + bad
    took_s = time.monotonic() - began
    for seed in failed[:SHOWN_FAILURES]:
        show(seed)
    listed = f": {' '.join(map(str, failed[:20]))}" if failed else ""
    print(f"{done} seeds, {len(failed)} failed{listed}, {done / took_s * 60:.0f} seeds per minute")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
