"""The emulated network as tests and benchmarks use it: start it, run programs on either side, change its conditions.

`tc netem` would do the same with less code, but not every kernel has it, and it needs root. Namespaces, TUN devices and
a process that carries the packets need neither, and the TCP connections still use the kernel's own TCP.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.emulator import CONTROL_ADDRESS, ENGINE_ADDRESS
from tests.chaos.wire import FINE, Conditions
from tests.processes import Process, wait_for

__all__ = ["CONTROL_ADDRESS", "CUT", "ENGINE_ADDRESS", "FINE", "Conditions", "Network", "NoNamespacesError"]

CUT = Conditions(cut=True)
START_S = 20.0


class NoNamespacesError(Exception):
    """The network cannot be emulated on this machine; the text says why."""


class Network:
    """Two network namespaces and the emulated network between them. The same seed treats the same packets alike.

    Raises NoNamespacesError if user namespaces, network namespaces or TUN devices are not available.
    """

    def __init__(self, seed: int = 0) -> None:
        if shutil.which("nsenter") is None:
            raise NoNamespacesError("nsenter is not installed")
        # The folder is short, because the path of a Unix socket has room for about a hundred characters.
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._process = Process(
            [sys.executable, "-m", "tests.chaos.emulator", str(self.folder), str(seed)], self.folder / "emulator.log"
        )
        try:
            wait_for(self._started, START_S, "the emulator to start")
        except BaseException:
            self.stop()
            raise
        self._namespaces: dict[str, int] = json.loads((self.folder / "namespaces.json").read_text())
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(self.folder / "control.sock"))
        self._answers = self._socket.makefile("rb")

    def _started(self) -> bool:
        if self._process.popen.poll() is not None:
            raise NoNamespacesError(self._process.output().strip().splitlines()[-1])
        return (self.folder / "namespaces.json").exists()

    @property
    def pid(self) -> int:
        """The process id of the emulator, whose resources a test may measure."""
        return self._process.popen.pid

    def within(self, side: str) -> list[str]:
        """Return the prefix of a command that runs it on one side, `engine` or `control`."""
        at = f"/proc/{self.pid}"
        enter = ["nsenter", "--preserve-credentials", f"--user={at}/ns/user"]
        return [*enter, f"--net={at}/fd/{self._namespaces[side]}"]

    def set(self, up: Conditions | None = None, down: Conditions | None = None) -> None:
        """Change one direction or both; `up` is from the engine to the control plane."""
        chosen = {name: asdict(c) for name, c in (("up", up), ("down", down)) if c is not None}
        self._ask(do="conditions", of=chosen)

    def mend(self) -> None:
        """Return to a network without faults."""
        self.set(FINE, FINE)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of packets by direction and fate."""
        counts: dict[str, dict[str, int]] = self._ask(do="counts")
        return counts

    def relay(self, port: int) -> str:
        """Return a gRPC target that reaches a port of the control plane's namespace past the emulated network."""
        path = self.folder / f"{port}.sock"
        self._ask(do="relay", path=str(path), port=port)
        return f"unix:{path}"

    def _ask(self, **command: Any) -> Any:
        self._socket.sendall(json.dumps(command).encode() + b"\n")
        return json.loads(self._answers.readline())

    def stop(self) -> None:
        """End the emulator. Programs that still run on either side lose the network to the other side."""
        self._process.kill()
        if "_socket" in self.__dict__:
            self._answers.close()
            self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, side: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Process:
        """Start a program on one side."""
        return Process([*self.within(side), *command], log, env)
