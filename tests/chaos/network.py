"""The emulated network as tests and benchmarks use it: start it, run programs on either side, change its conditions.

`tc netem` would do the same with less, but is not in every kernel, and needs root. Namespaces, TUN devices and a
process that carries the packets need neither, and the TCP that meets the loss is the kernel's own all the same.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.emulator import CONTROL_ADDRESS, ENGINE_ADDRESS
from tests.chaos.wire import FINE, Conditions
from tests.processes import Process, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONTROL_ADDRESS", "CUT", "ENGINE_ADDRESS", "FINE", "Conditions", "Network", "NoNamespacesError"]

CUT = Conditions(cut=True)
START_S = 20.0


class NoNamespacesError(Exception):
    """Why the network cannot be made here."""


class Network:
    """Two network namespaces and what is between them. The same seed treats the same packets alike.

    Raises NoNamespacesError where user or network namespaces or TUN devices are not to be had.
    """

    def __init__(self, seed: int = 0) -> None:
        if shutil.which("nsenter") is None:
            raise NoNamespacesError("nsenter is not installed")
        # Short: the path of a Unix socket has room for a hundred characters.
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
        """The emulator's own, for who wants to know what it uses."""
        return self._process.popen.pid

    def within(self, side: str) -> list[str]:
        """What a command begins with to run on one side, `engine` or `control`."""
        at = f"/proc/{self.pid}"
        enter = ["nsenter", "--preserve-credentials", f"--user={at}/ns/user"]
        return [*enter, f"--net={at}/fd/{self._namespaces[side]}"]

    def set(self, up: Conditions | None = None, down: Conditions | None = None) -> None:
        """Change one direction or both; `up` is from the engine to the control plane."""
        chosen = {name: asdict(c) for name, c in (("up", up), ("down", down)) if c is not None}
        self._ask(do="conditions", of=chosen)

    def mend(self) -> None:
        """Back to a network without faults."""
        self.set(FINE, FINE)

    def counts(self) -> dict[str, dict[str, int]]:
        """Packets by direction and what came of them."""
        counts: dict[str, dict[str, int]] = self._ask(do="counts")
        return counts

    def relay(self, port: int) -> str:
        """A gRPC target that reaches a port of the control plane's side from outside, past the emulated network."""
        path = self.folder / f"{port}.sock"
        self._ask(do="relay", path=str(path), port=port)
        return f"unix:{path}"

    def _ask(self, **command: Any) -> Any:
        self._socket.sendall(json.dumps(command).encode() + b"\n")
        return json.loads(self._answers.readline())

    def stop(self) -> None:
        """End the emulator. Programs that still run on either side find a network without the other."""
        self._process.kill()
        if "_socket" in self.__dict__:
            self._answers.close()
            self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, side: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Process:
        """Start a program on one side."""
        return Process([*self.within(side), *command], log, env)
