"""Ports, child processes and their logs.

Owns every process the demo starts: each leads a process group of its own, so that whatever it starts can be stopped
with it and a Ctrl-C reaches the demo alone. Knows nothing of what the processes do.
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
# What Triton's bindings print when a vLLM process ends, hundreds of lines of it.
NOISE = re.compile(r"nanobind|^ - (leaked|\.\.\.)")


class DemoError(Exception):
    """The demo cannot go on; the message is all its user sees, and `exit_code` the status it leaves with."""

    exit_code = 1


class PortBusyError(DemoError):
    """A port is taken; nothing was started."""

    exit_code = 2


class ChildDiedError(DemoError):
    """A process ended by itself."""


def check_ports(ports: Mapping[str, int]) -> None:
    """Make sure nobody listens on any of `{flag: port}`. Raises PortBusyError for the first that is taken."""
    for flag, port in ports.items():
        with socket.socket() as probe:
            # As servers do: connections of an earlier run that still linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise PortBusyError(
                    f"port {port} cannot be used ({error.strerror}): choose another with {flag}"
                ) from error


@dataclass(eq=False)
class Child:
    """A running process, its group's leader. `log` holds its output."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raises ChildDiedError with the end of the log when the process is gone."""
        if (code := self.process.poll()) is not None:
            raise ChildDiedError(f"{self.name} ended with status {code}; the end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(f"  {line}" for line in self._lines()[-TAIL_LINES:])

    def last_message(self) -> str:
        """The newest line of the log, without what a logger puts before it."""
        lines = self._lines()
        return lines[-1].rpartition("] ")[2].strip() if lines else ""

    def _lines(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not NOISE.search(line)]

    def signal_group(self, number: int) -> bool:
        """Send a signal to the whole group; False when nobody is left in it."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def await_group(self, grace_s: float) -> bool:
        """Wait for the group to empty; False when it has not."""
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            self.process.poll()
            if not self.signal_group(0):
                return True
            time.sleep(POLL_S)
        return False


class Children:
    """All processes of the demo. `stop` leaves none; it may be called again."""

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
        """Raises ChildDiedError when one of them ended by itself."""
        for child in self._running:
            child.check()

    def stop(self) -> None:
        """Terminate, newest first: leaders end their own children in order, and what is left of a group is killed."""
        while self._running:
            child = self._running[-1]
            child.process.terminate()
            if not child.await_group(TERM_GRACE_S):
                child.signal_group(signal.SIGKILL)
                child.await_group(KILL_GRACE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(KILL_GRACE_S)
            self._running.pop()
