"""Shared by the benchmarks that run an engine: how the program ends, and where other code's output goes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class BenchError(Exception):
    """The benchmark cannot go on; the text says why."""


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _status(run: Callable[[], None]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run()
    except BenchError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def main(run: Callable[[], None]) -> NoReturn:
    """Run the benchmark and exit: 0, 1 after a BenchError, 130 after an interrupt or SIGTERM."""
    status = _status(run)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: vLLM's libraries print while a process that used them exits, but the JSON must
    # stay the last line.
    os._exit(status)


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
