"""The other end of `engine`: starts such an engine, governed beside the emulated network or stock, and asks it."""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any

from tests.engine import ENGINE_ARGS, MAX_TOKENS, cases
from tests.processes import ENGINE_ENV, Process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.chaos.reports import Report

# Until a started engine says that it is ready, and until it has answered or stopped.
READY_S, ANSWER_S = 240, 60
# The shared cases, over and over: whatever is under way beside a request, greedy decoding makes it the same tokens.
LOAD: dict[str, Any] = {"cases": cases(), "in_flight": 6, "sampling": {"max_tokens": MAX_TOKENS}}


class Engine:
    """One engine process; `target` is its MERIDIAN_CONTROL, empty for stock vLLM. `within`: what its command begins
    with. load, cores, engine: the load, the cores it may use, and what of ENGINE_ARGS is other; environment: more."""

    def __init__(
        self,
        folder: Path,
        name: str,
        target: str = "",
        within: Sequence[str] = (),
        *,
        load: dict[str, Any] = LOAD,
        cores: Sequence[int] = (),
        engine: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        # Unix sockets have short paths; this one is for the start only.
        path = folder / f"{name}.sock"
        self._listener = Listener(str(path), "AF_UNIX")
        settings = {**load, "cores": list(cores), "engine": {**ENGINE_ARGS, **(engine or {})}}
        env = {
            **ENGINE_ENV,
            "MERIDIAN_CONTROL": target,
            "MERIDIAN_ENGINE_ID": name,
            "MERIDIAN_STATE_DIR": str(folder / f"{name}-state"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            **(environment or {}),
        }
        command = [*within, sys.executable, "-m", "tests.chaos.engine", str(path), json.dumps(settings)]
        self.process = Process(command, folder / f"{name}.log", env)
        self._connection: Any = None

    def ready(self) -> None:
        """Wait until it has started."""
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

    def _ask(self, command: str | int) -> Report:
        self._connection.send(command)
        assert self._connection.poll(ANSWER_S), f"the engine does not answer\n{self.process.output()[-3000:]}"
        report: Report = self._connection.recv()
        return report

    def run(self) -> Report:
        """Go on, or begin to. Returns what happened since the last answer, as the others do."""
        return self._ask("run")

    def pause(self) -> Report:
        """Stand still after the step under way, with the requests in flight."""
        return self._ask("pause")

    def steps(self, count: int) -> Report:
        """Go on for so many steps, then stand still."""
        return self._ask(count)

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
