"""Break each guarantee on purpose: `python -m tests.guarantees [NAME]... [--engine | --no-engine] [--write]`.

Each mutation is a patch in a copy of the tree, in which its test must fail; before that, all chosen tests must pass in
the tree as it is. `--write` puts the results into results.csv beside this file. The exit status is 1 if a test does not
fail under its mutation, or fails without it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.guarantees import readme
from tests.guarantees.broken import BROKEN
from tests.sim.mutations import ROOT, tree

if TYPE_CHECKING:
    from pathlib import Path

    from tests.guarantees.broken import Broken

FAILED, PASSED = 1, 0


def pytest(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Return pytest's exit status in this tree, and the names of the failed tests with their errors."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder / part) for part in (".", "proto", "kernels"))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "--show-capture=no", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *tests], cwd=folder, env=env, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, "; ".join(said) or done.stdout[-300:].strip()


def result_of(broken: Broken) -> str:
    """Return `fails`, or the result that came instead."""
    with tree(broken.mutant) as folder:
        status, said = pytest(folder, [broken.test])
    # An ERROR means that only a fixture could not be made, which proves nothing.
    return "fails" if status == FAILED and said.startswith("FAILED") else f"exit status {status}: {said}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutations")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--engine", action="store_true", help="only mutations whose test starts a vLLM engine")
    which.add_argument("--no-engine", action="store_true", help="only mutations whose test starts no vLLM engine")
    parser.add_argument("--write", action="store_true", help="put the results into results.csv")
    arguments = parser.parse_args()
    chosen = [
        broken
        for broken in BROKEN
        if (not arguments.names or broken.mutant.name in arguments.names)
        and not (broken.has_engine and arguments.no_engine)
        and not (arguments.engine and not broken.has_engine)
    ]
    status, said = pytest(ROOT, list(dict.fromkeys(broken.test for broken in chosen)))
    if status != PASSED:
        print(f"fails unbroken: {said}", file=sys.stderr)
        return 1
    results = {}
    for broken in chosen:
        results[broken.mutant.name] = result_of(broken)
        print(f"{broken.mutant.name:60} {results[broken.mutant.name]}", flush=True)
        if arguments.write:
            readme.write(results)
    fail = sum(result == "fails" for result in results.values())
    print(f"{fail} of {len(chosen)} are noticed")
    return int(fail < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
