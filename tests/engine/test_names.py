"""Two servers of one host without a name of their own: each is an engine, and the control plane knows how each ends.

The first is told to end, and has shut down, also if vLLM kills its engine core while the core waits for its worker to
exit. The core of the second ends with an error, because its worker is killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from meridian.v1 import fleet_pb2

from tests.engine.served import APART, Served
from tests.processes import MERIDIANCTL, Control, run, wait_for

WORKER, CORE = "VLLM::Worker", "VLLM::EngineCore"
# vLLM's program kills the core after the first number of seconds, and the core would kill its worker after the second.
CORE_S, WORKER_S = 6, 600


def connected(control: Control) -> dict[str, str]:
    """Return the names of the connected engines, and of each its label `server`."""
    live = [e for e in control.engines() if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
    return {engine.engine_id: engine.labels["server"] for engine in live}


def below(server: Served, title: str) -> psutil.Process:
    """Return the one process of this title among all that a server has started, directly or not."""
    started = psutil.Process(server.process.popen.pid).children(recursive=True)
    (found,) = [process for process in started if process.name().startswith(title)]
    return found


def test_two_servers_of_one_host(tmp_path: Path) -> None:
    control = Control(tmp_path)
    # Both servers have one state folder, as by default. An empty name counts as none.
    own = {**APART, "MERIDIAN_ENGINE_ID": "", "MERIDIAN_STATE_DIR": str(tmp_path / "state")}
    own["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = str(WORKER_S)
    # By default vLLM kills its engine as soon as it is to shut down, so that the engine cannot end its stream.
    patient = ("--shutdown-timeout", str(CORE_S))
    servers = [
        Served(tmp_path, control.target, None, patient, {**own, "MERIDIAN_LABELS": f"server={n}"}) for n in (1, 2)
    ]
    try:
        found: dict[str, str] = wait_for(lambda: len(names := connected(control)) == 2 and names, 120, "both engines")
        assert sorted(found.values()) == ["1", "2"]
        assert len(list((tmp_path / "state").glob("*.json"))) <= 2
        for server in servers:
            wait_for(server.ready, 120, "the server")
        names = {label: name for name, label in found.items()}
        core = below(servers[0], CORE)
        below(servers[0], WORKER).suspend()
        # As Kubernetes does, only to the server itself: a second signal would kill its engine while it shuts down.
        os.kill(servers[0].process.popen.pid, signal.SIGTERM)
        wait_for(lambda: list(connected(control).values()) == ["2"], 60, "the first server to leave")
        servers[0].process.popen.wait()
        assert not core.is_running()
        below(servers[1], WORKER).kill()
        lost = f"engine {names['2']} ("
        wait_for(lambda: any(lost in line for line in warnings(control)), 60, "the warning")
        assert not [line for line in warnings(control) if f"engine {names['1']} (" in line]
        waited = run([*MERIDIANCTL, "--server", control.target, "wait", "--timeout", "0"])
        assert waited.returncode == 1
        assert f"{names['2']} is lost: its stream broke off, and it has not come back\n" in waited.stderr
        assert f"{names['1']} has left\n" in waited.stderr
    finally:
        for server in servers:
            server.process.stop()
        control.process.stop()


def warnings(control: Control) -> list[str]:
    return [line for line in control.process.output().splitlines() if " WARNING " in line and " is lost" in line]
