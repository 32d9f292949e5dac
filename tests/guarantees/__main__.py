"""Break each guarantee on purpose: `python -m tests.guarantees [FUNCTION]... [--engine | --no-engine] [--write]`.

Each row of functions.csv names a guarantee of the README, a function that it depends on, and the tests that notice a
change of that function. The program makes every change that `mutations` knows in a copy of the tree, one after the
other, and runs the tests. It prints the changes that no test noticed, for a reader to judge: some change nothing that
anyone could see. `--write` puts the counts into functions.csv. The exit status is 1 if the tests fail without a change,
or if no change of a function was noticed.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.guarantees.mutations import PACKAGES, ROOT, mutants, path_of

ROWS = Path(__file__).with_name("functions.csv")
FAILED, PASSED = 1, 0
# A change may make a loop endless.
TIMEOUT_S = 900.0


class Row(NamedTuple):
    """guarantee: the beginning of its text in the README. test: a pytest node in `tests`. mutations, noticed: of the
    newest run; empty before the first one."""

    guarantee: str
    function: str
    test: str
    mutations: str
    noticed: str

    @property
    def has_engine(self) -> bool:
        """Return whether the test starts a vLLM engine."""
        return self.test.startswith(("engine", "chaos"))


def rows() -> list[Row]:
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [Row(*row) for row in list(csv.reader(file))[1:]]


@contextmanager
def tree() -> Iterator[Path]:
    """Yield a copy of the tree; files and folders that are never changed are links."""
    with tempfile.TemporaryDirectory(prefix="meridian-mutant-") as folder:
        for entry in ROOT.iterdir():
            if entry.name in PACKAGES:
                shutil.copytree(entry, Path(folder, entry.name), ignore=shutil.ignore_patterns("__pycache__"))
            elif not entry.name.startswith("."):
                Path(folder, entry.name).symlink_to(entry)
        yield Path(folder)


def pytest(folder: Path, test: str) -> int:
    """Return pytest's exit status in this tree. A test that does not end has failed."""
    paths = os.pathsep.join(str(folder / part) for part in (".", "proto", "kernels", "deploy/relay"))
    command = [sys.executable, "-B", "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", f"tests/{test}"]
    environment = {**os.environ, "PYTHONPATH": paths}
    # A test that needs no engine may fail although the fixture of those that need one has failed before.
    for further in (["-x"], []):
        try:
            done = subprocess.run(  # noqa: PLW1510
                [*command, *further], cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return FAILED
        if done.returncode != FAILED or b" failed" in done.stdout:
            return done.returncode
    # If only a fixture failed, pytest counts errors and no failed test, which proves nothing.
    return -1


def tried(row: Row) -> Row:
    """Return the row with the counts of a new run. Raises ValueError if the tests fail without a change."""
    path = path_of(row.function)
    source = (ROOT / path).read_text()
    made, noticed = list(mutants(source, path.stem, row.function)), 0
    with tree() as folder:
        (folder / path).write_text(source)
        if (status := pytest(folder, row.test)) != PASSED:
            raise ValueError(f"{row.test} ends with status {status} although nothing is changed")
        for mutant in made:
            (folder / path).write_text(mutant.source)
            if pytest(folder, row.test) == FAILED:
                noticed += 1
            else:
                print(f"  not noticed: {path}, {mutant.what}", flush=True)
    return row._replace(mutations=str(len(made)), noticed=str(noticed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees", description=__doc__)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help="only these functions")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--engine", action="store_true", help="only rows whose test starts a vLLM engine")
    which.add_argument("--no-engine", action="store_true", help="only rows whose test starts no vLLM engine")
    parser.add_argument("--test", help="a pytest node in `tests`, in place of the rows of the given functions")
    parser.add_argument("--write", action="store_true", help="put the counts into functions.csv")
    given = parser.parse_args()
    chosen = [
        row
        for row in rows()
        if (not given.functions or row.function in given.functions)
        and not (row.has_engine and given.no_engine)
        and not (given.engine and not row.has_engine)
    ]
    if given.test is not None:
        chosen = [Row("", function, given.test, "", "") for function in given.functions]
    missed = 0
    for row in chosen:
        found = tried(row)
        missed += found.noticed == "0"
        print(f"{row.function:40} {row.test:50} {found.noticed} of {found.mutations} noticed", flush=True)
        if given.write and given.test is None:
            kept = [found if one[:3] == row[:3] else one for one in rows()]
            with ROWS.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([Row._fields, *kept])
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
