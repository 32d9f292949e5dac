"""A server that is told to end has shut down for the control plane, also if vLLM kills the engine core while the core
waits for its workers to exit."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from tests.engine.served import APART, governed
from tests.processes import wait_for

if TYPE_CHECKING:
    from pathlib import Path


# vLLM's program kills the core after the first number of seconds, and the core would kill its workers after the second.
CORE_S, WORKERS_S = 6, 600


def processes_below(pid: int) -> dict[int, str]:
    """Return the commands of all processes that a process has started, and of those that these have started."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    found = {}
    for child in children:
        with open(f"/proc/{child}/cmdline") as file:
            found[child] = file.read().strip("\0")
        found |= processes_below(child)
    return found


def test_an_engine_whose_worker_does_not_exit_has_shut_down(folder: Path) -> None:
    options = ["--shutdown-timeout", str(CORE_S)]
    more = {**APART, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKERS_S)}
    with governed(folder / "slow-worker", options, more) as (served, control):
        server = served.process.popen.pid
        started = processes_below(server)
        (worker,) = [pid for pid, command in started.items() if command.startswith("VLLM::Worker")]
        (core,) = [pid for pid, command in started.items() if command.startswith("VLLM::EngineCore")]
        os.kill(worker, signal.SIGSTOP)
        # To the server alone: a signal to the whole group would reach the worker, too.
        os.kill(server, signal.SIGTERM)
        served.process.popen.wait()
        assert not os.path.exists(f"/proc/{core}")
        (engine,) = wait_for(
            lambda: [e for e in control.engines() if e.state != fleet_pb2.CONNECTION_STATE_CONNECTED],
            20,
            "the end of the stream",
        )
        assert not engine.lost
