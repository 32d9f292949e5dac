"""Ports, child processes and their logs."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from tests.processes import Process

HOST = "127.0.0.1"
TAIL_LINES = 25
# Lines that Triton's bindings print by the hundred when a vLLM process ends.
NOISE = re.compile(r"nanobind|^ - (leaked|\.\.\.)")


class DemoError(Exception):
    """The demo cannot go on; the user sees only the message, and `exit_code` is the demo's exit status."""

    exit_code = 1


class PortBusyError(DemoError):
    """A port is taken, so nothing was started."""

    exit_code = 2


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


def tail(process: Process) -> str:
    """Return the end of a process's log."""
    kept = [line for line in process.output().splitlines() if line.strip() and not NOISE.search(line)]
    return "\n".join(f"  {line}" for line in kept[-TAIL_LINES:])


class Children(dict[str, "Process"]):
    """All processes of the demo by name, oldest first. `stop` ends all of them and may be called again."""

    def check(self) -> None:
        """Raise DemoError with the end of the log if a process has ended by itself."""
        for name, child in self.items():
            if (status := child.popen.poll()) is not None:
                raise DemoError(f"{name} ended with status {status}; the end of {child.log}:\n{tail(child)}")

    def stop(self) -> None:
        while self:
            newest = list(self)[-1]
            self[newest].stop()
            del self[newest]
