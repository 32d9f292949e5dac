"""Break the product on purpose, and count the seeds until the simulator notices: `python -m tests.sim.mutations`.

Each mutation is a patch of one source file in a copy of the tree. `--write` puts the results into mutations.csv. `--in
NAME COMMAND…` instead runs a command in such a copy, for example a soak. The exit status is 1 if a mutation survives or
no longer fits the source.
"""

from __future__ import annotations

import argparse
import csv
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
COPIED = ("meridian_agent", "meridian_control", "kernels")
RESULTS = ROOT / "tests" / "sim" / "mutations.csv"
HEAD = ("mutation", "seeds", "message of the check")
SAID = 110


@contextmanager
def tree(mutant: Mutant) -> Iterator[Path]:
    """Yield a copy of the tree with the mutation; files and folders that no mutation changes are links.

    Raises ValueError if the mutation does not fit the source.
    """
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
    """Return how many seeds were run and what the last one found, or an empty text for a mutation that survives.

    Runs in a process that has not imported any of the project's modules yet.
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


def hunts(mutants: list[Mutant], seeds: range, seconds: float, jobs: int) -> dict[str, tuple[int, str]]:
    """Hunt all mutations and print each result; return the results of `hunt` by name."""
    # Importing vLLM takes long and does not depend on the mutation, so the hunting processes inherit the import from
    # this process.
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.structured_output  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401

    found = {}
    with get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        results = pool.imap(partial(hunt, seeds=seeds, seconds=seconds), mutants)
        for mutant, (done, reason) in zip(mutants, results, strict=True):
            found[mutant.name] = done, " ".join(reason.split())[:SAID]
            print(f"{mutant.name:40} {verdict(*found[mutant.name]):18} {found[mutant.name][1]}", flush=True)
    return found


def verdict(done: int, reason: str) -> str:
    return "does not fit" if done < 0 else f"{done}" if reason else f"survives {done}"


def write(found: dict[str, tuple[int, str]]) -> None:
    """Write new rows for these mutations into the file of results; the other rows stay."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = {row[0]: row for row in list(csv.reader(file))[1:]}
    rows |= {name: [name, verdict(done, reason), reason] for name, (done, reason) in found.items()}
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        kept = [rows[mutant.name] for mutant in MUTANTS if mutant.name in rows]
        csv.writer(file, lineterminator="\n").writerows([HEAD, *kept])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutations")
    parser.add_argument("--seeds", default="0:3000", help="FIRST:END")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time for each mutation, in seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the results into mutations.csv")
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
    found = hunts(chosen, range(int(first), int(end)), arguments.seconds, arguments.jobs)
    if arguments.write:
        write(found)
    noticed = sum(done > 0 and reason != "" for done, reason in found.values())
    print(f"{noticed} of {len(chosen)} are noticed")
    return 1 if noticed < len(chosen) else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
