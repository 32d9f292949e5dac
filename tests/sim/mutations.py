"""`python -m tests.sim.mutations`: breaks the product on purpose and says after how many seeds the simulator notices.

Each mutation is a patch of one source file in a copy of the tree. `--in NAME COMMAND…` runs a command in such a copy
instead, for example a soak. Exit code 1 when a mutation survives, or no longer fits the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tests.sim.mutants import MUTANTS, Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
COPIED = ("meridian_agent", "meridian_control")


@contextmanager
def tree(mutant: Mutant) -> Iterator[Path]:
    """A copy of the tree with the mutation in it; what cannot be mutated is linked. Raises ValueError if it does not
    fit."""
    with tempfile.TemporaryDirectory(prefix="meridian-mutant-") as folder:
        for entry in ROOT.iterdir():
            if entry.name in COPIED:
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(entry, Path(folder, entry.name), ignore=ignored)
            elif not entry.name.startswith("."):
                Path(folder, entry.name).symlink_to(entry)
        path = Path(folder, mutant.path)
        source = path.read_text()
        if source.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: its text is {source.count(mutant.old)} times in {mutant.path}")
        path.write_text(source.replace(mutant.old, mutant.new))
        yield Path(folder)


def hunt(mutant: Mutant, seeds: range, seconds: float) -> tuple[int, str]:
    """How many seeds were run, and what the last of them found; empty for a mutation that survives.

    Runs in a process that has imported nothing of ours yet.
    """
    try:
        with tree(mutant) as folder:
            sys.path[:0] = [str(folder)]
            from tests.sim.world import Failure, run

            until = time.monotonic() + seconds
            for done, seed in enumerate(seeds, 1):
                try:
                    run(seed)
                except Failure as failure:
                    return done, failure.reason
                if time.monotonic() > until:
                    return done, ""
            return len(seeds), ""
    except ValueError as error:
        return -1, str(error)


def survivors(mutants: list[Mutant], seeds: range, seconds: float, jobs: int) -> int:
    """Hunt them all, printing a table; returns how many survive or do not fit."""
    # What takes long to import is not ours: each process has it from this one.
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.structured_output  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401

    left = 0
    with get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        found = pool.imap(partial(hunt, seeds=seeds, seconds=seconds), mutants)
        for mutant, (done, reason) in zip(mutants, found, strict=True):
            left += not reason or done < 0
            verdict = "does not fit" if done < 0 else f"{done:5} seeds" if reason else f"SURVIVES {done} seeds"
            print(f"{mutant.name:34} {verdict:20} {' '.join(reason.split())[:110]}", flush=True)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutations")
    parser.add_argument("--seeds", default="0:3000", help="FIRST:END")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each mutation, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--in", dest="inside", nargs=argparse.REMAINDER, help="run COMMAND… in the tree of NAME")
    arguments = parser.parse_args()
    if arguments.inside:
        name, *command = arguments.inside
        (mutant,) = (one for one in MUTANTS if one.name == name)
        with tree(mutant) as folder:
            paths = [str(folder / part) for part in (".", "proto", "kernels")]
            return subprocess.call(command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    chosen = [one for one in MUTANTS if not arguments.names or one.name in arguments.names]
    first, _, end = arguments.seeds.partition(":")
    left = survivors(chosen, range(int(first), int(end)), arguments.seconds, arguments.jobs)
    print(f"{len(chosen) - left} of {len(chosen)} are noticed")
    return 1 if left else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
