"""Ports, child processes and their logs.

The module owns every process that the demo starts. Each leads a process group of its own, so that its descendants can
be stopped with it and a Ctrl-C reaches only the demo. The module does not know what the processes do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HOST = "127.0.0.1"
TAIL_LINES = 25
TERM_GRACE_S = 6.0
KILL_GRACE_S = 3.0
POLL_S = 0.05
# Lines that Triton's bindings print by the hundred when a vLLM process ends.
NOISE = re.compile(r"nanobind|^ - (leaked|\.\.\.)")


class DemoError(Exception):
    """The demo cannot go on; the user sees only the message, and `exit_code` is the demo's exit status."""

    exit_code = 1


class PortBusyError(DemoError):
    """A port is taken, so nothing was started."""

    exit_code = 2


class ChildDiedError(DemoError):
    """A process ended by itself."""


def check_ports(ports: Mapping[str, int]) -> None:
    """Check that no program listens on any port of `{flag: port}`. Raises PortBusyError for the first port that is
    taken."""
    for flag, port in ports.items():
        with socket.socket() as probe:
            # Servers set this option too, so that lingering connections of an earlier run do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise PortBusyError(
                    f"port {port} cannot be used ({error.strerror}): choose another with {flag}"
                ) from error


@dataclass(eq=False)
class Child:
    """A running process, which leads its group. `log` holds its output."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raise ChildDiedError with the end of the log if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise ChildDiedError(f"{self.name} ended with status {code}; the end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        kept = [line for line in lines if line.strip() and not NOISE.search(line)]
        return "\n".join(f"  {line}" for line in kept[-TAIL_LINES:])

    def signal_group(self, number: int) -> bool:
        """Send a signal to the whole group; return False if the group is empty."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def await_group(self, grace_s: float) -> bool:
        """Wait for the group to become empty; return False if it has not after `grace_s`."""
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            self.process.poll()
            if not self.signal_group(0):
                return True
            time.sleep(POLL_S)
        return False


class Children:
    """All processes of the demo. `stop` ends all of them and may be called again."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Child] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start `command` with `environment` added to this process's own."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        child = Child(name, log, process)
        self._running.append(child)
        return child

    def check(self) -> None:
        """Raise ChildDiedError if a process has ended by itself."""
        for child in self._running:
            child.check()

    def stop(self) -> None:
        """Terminate the processes, newest first.

        Leaders end their own children in order; whatever remains of a group is killed.
        """
        while self._running:
            child = self._running[-1]
            child.process.terminate()
            if not child.await_group(TERM_GRACE_S):
                child.signal_group(signal.SIGKILL)
                child.await_group(KILL_GRACE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(KILL_GRACE_S)
            self._running.pop()
