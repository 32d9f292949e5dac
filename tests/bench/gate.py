"""A gate before a worker's steps: it opens for a number of steps, and while it is closed the engine's other processes
are stopped.

The module owns both ends of the connection, the clock of a window, and the signals. It knows nothing of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

# Names the socket of the benchmark's end, in the worker's environment.
GATE = "MERIDIAN_BENCH_GATE"


@dataclass(frozen=True)
class Opening:
    """The next opening: the number of steps, None for all steps to come, and the processes to stop afterwards."""

    steps: int | None
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Passed:
    """The steps that passed the gate while it was open. prompt_tokens: tokens of the prompts that began. between_s: the
    part of took_s in which the worker waited for its next step. starved_s: the part in which the worker's thread had a
    step but no core, because other threads ran on it."""

    took_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    between_s: float = 0.0
    starved_s: float = 0.0

    @property
    def computing_s(self) -> float:
        """The part of took_s in which the worker's thread worked on a step."""
        return self.took_s - self.between_s - self.starved_s


class Gate:
    """The worker's end. The gate is closed at first.

    An opening lasts from one arrival of a step at the closed gate to another one, so each opening has the whole time of
    as many steps. The processes go on after the clock was started, and are stopped after it was read, before anything
    else: what they have left to do, they do in the next opening.
    """

    def __init__(self) -> None:
        self._connection: Connection = Client(os.environ[GATE], "AF_UNIX")
        self._opening = Opening(0, ())
        self._steps = 0
        self._began_s = time.monotonic()
        self.tokens = self.prompt_tokens = 0
        # End of the newest step; and how long the worker's thread had been without a core when the step began.
        self._done_s: float | None = None
        self._starved_before_s = self._between_s = self._starved_s = 0.0

    def step(self) -> None:
        """Wait until a step may pass."""
        if self._done_s is not None:
            self._between_s += time.monotonic() - self._done_s
        if self._steps == self._opening.steps:
            self._closed()
        self._steps += 1
        self._starved_before_s = _starved_s()

    def done(self) -> None:
        """Note the end of a step."""
        self._starved_s += _starved_s() - self._starved_before_s
        self._done_s = time.monotonic()

    def _closed(self) -> None:
        took_s = time.monotonic() - self._began_s
        self._signal(signal.SIGSTOP)
        self._connection.send(Passed(took_s, self.tokens, self.prompt_tokens, self._between_s, self._starved_s))
        self._opening = self._connection.recv()
        self._steps = self.tokens = self.prompt_tokens = 0
        self._between_s = self._starved_s = 0.0
        self._began_s = time.monotonic()
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._opening.pids:
            os.kill(pid, number)


def _starved_s() -> float:
    """Return the seconds in which the calling thread has been ready to run without a core so far. Linux only."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Keeper:
    """The benchmark's end. It must exist when the worker starts."""

    def __init__(self, path: Path) -> None:
        self._listener = Listener(str(path), "AF_UNIX")
        self._connection: Connection | None = None

    async def reached(self) -> None:
        """Wait until the first step has reached the gate."""
        self._connection = await asyncio.to_thread(self._listener.accept)
        await asyncio.to_thread(self._connection.recv)

    async def opened(self, steps: int, pids: Sequence[int]) -> Passed:
        """Open the gate for `steps` steps, and wait until the next one has reached it. pids: processes to stop then."""
        assert self._connection is not None
        self._connection.send(Opening(steps, tuple(pids)))
        passed: Passed = await asyncio.to_thread(self._connection.recv)
        return passed

    def leave_open(self, pids: Sequence[int]) -> None:
        """Let all steps pass, and the processes go on."""
        if self._connection is not None:
            self._connection.send(Opening(None, tuple(pids)))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
