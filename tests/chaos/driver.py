"""Start an engine of `tests.chaos.engine` beside the emulated network, and send it commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from tests.chaos.reports import Report
from tests.engine import ENGINE_ARGS, cases
from tests.processes import ENGINE_ENV, Process

# Seconds until a started engine must be ready, and until it must have answered a command or stopped.
READY_S, ANSWER_S = 240, 60
# The shared cases, repeated: greedy decoding gives a request the same tokens whatever other requests run beside it.
LOAD: dict[str, Any] = {"cases": cases(), "in_flight": 6}


class Engine:
    """One engine process.

    target: its MERIDIAN_CONTROL. within: prefix of its command. load: the load's settings. environment: additional
    variables.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        target: str,
        within: Sequence[str],
        *,
        load: dict[str, Any],
        environment: dict[str, str],
    ) -> None:
        # A Unix socket needs a short path; the engine only connects to it at its start.
        path = folder / f"{name}.sock"
        self._listener = Listener(str(path), "AF_UNIX")
        settings = {**load, "engine": ENGINE_ARGS}
        env = {
            **ENGINE_ENV,
            "MERIDIAN_CONTROL": target,
            "MERIDIAN_ENGINE_ID": name,
            "MERIDIAN_STATE_DIR": str(folder / f"{name}-state"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            **environment,
        }
        command = [*within, sys.executable, "-m", "tests.chaos.engine", str(path), json.dumps(settings)]
        self.process = Process(command, folder / f"{name}.log", env)
        self._connection: Any = None

    def ready(self) -> None:
        """Wait until the engine has started."""
        listening = self._listener._listener._socket  # type: ignore[attr-defined]
        listening.settimeout(1)
        for _ in range(READY_S):
            assert self.process.popen.poll() is None, self.process.output()[-3000:]
            try:
                self._connection = self._listener.accept()
                break
            except TimeoutError:
                continue
        assert self._connection is not None, "the engine has not started"
        self._listener.close()
        assert self._connection.recv() == "ready"

    def _ask(self, command: str) -> Report:
        self._connection.send(command)
        assert self._connection.poll(ANSWER_S), f"the engine does not answer\n{self.process.output()[-3000:]}"
        report: Report = self._connection.recv()
        return report

    def run(self) -> Report:
        """Let the engine run; return the report since the last command, as the other commands do."""
        return self._ask("run")

    def fork(self) -> Report:
        """Fork the engine core between two steps; the child ends at once."""
        return self._ask("fork")

    def log(self) -> str:
        return self.process.output()

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.send("stop")
            self._connection.close()
            self._connection = None
        self.process.stop()
