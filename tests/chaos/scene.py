"""The emulated network with a control plane on its far side, and the faults of both, which have a begin and an end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.chaos.network import CONTROL_ADDRESS, CUT, FINE, Conditions, Network
from tests.processes import Control, Process, wait_for

# The control plane has a network namespace of its own, so no other program uses these ports.
PORT, METRICS_PORT = 7000, 9464
TARGET = f"{CONTROL_ADDRESS}:{PORT}"


class FarControl(Control):
    """A `meridian-control` in the control plane's namespace, which this process reaches whatever the network does."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.folder, self.port = folder, PORT
        self.within, self.listen = network.within("control"), f"0.0.0.0:{PORT}"
        self.options = ["--insecure", "--metrics-listen", f"127.0.0.1:{METRICS_PORT}"]
        self.target = network.relay(PORT)
        self._metrics = network.relay(METRICS_PORT).removeprefix("unix:")

    def metrics(self) -> dict[str, float]:
        """Return every sample by its name with labels, as Prometheus writes it."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=self._metrics, verify=False)) as client:
            text = client.get("http://127.0.0.1/metrics").raise_for_status().text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}


class Scene:
    """The objects that faults act on. `control` is not started yet."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.network = Network(seed)
        self.control = FarControl(self.network, folder)
        self._foreign: Process | None = None

    def kill(self) -> None:
        self.control.process.kill()

    def answer_as(self, kind: str) -> None:
        """Let another program of this kind take the control plane's address."""
        self.kill()
        command = [sys.executable, "-m", "tests.chaos.foreign", kind, f"0.0.0.0:{PORT}"]
        log = self.folder / f"foreign-{kind}-{time.monotonic_ns()}.log"
        self._foreign = foreign = self.network.run("control", command, log)
        wait_for(lambda: "ready" in foreign.output(), 20, f"{kind} to answer")

    def give_back(self) -> None:
        """Give its address back to the control plane."""
        if self._foreign is not None:
            self._foreign.kill()
            self._foreign = None
        self.control.start()

    def stop(self) -> None:
        if self._foreign is not None:
            self._foreign.kill()
        if "process" in self.control.__dict__:
            # The process may be stopped by SIGSTOP.
            self.control.process.signal(signal.SIGCONT)
            self.control.process.stop()
        self.network.stop()


@dataclass(frozen=True)
class Fault:
    """One fault.

    says: texts that the engine logs during the fault. loses: whether the agent hears nothing of a control plane during
    the fault, so that the leases end. conditions: those of the network by direction.
    """

    name: str
    begin: Callable[[Scene], None]
    end: Callable[[Scene], None]
    says: Sequence[str] = ()
    loses: bool = False
    conditions: Mapping[str, Conditions] = field(default_factory=dict)


LONG_MS = 10_000
GONE, UNHEARD = ("meridian: DEGRADED",), ("meridian: DEGRADED", "ended: nothing heard for")


def _other(kind: str) -> Fault:
    return Fault(kind, lambda s: s.answer_as(kind), Scene.give_back, GONE, loses=True)


def _network(name: str, up: Conditions, down: Conditions) -> Fault:
    """Return a fault of the network. A delay longer than the leases is as good as a cut."""
    ways, loses = {"up": up, "down": down}, any(c.cut or c.delay_ms >= LONG_MS for c in (up, down))
    says = UNHEARD if loses else ()
    return Fault(name, lambda s: s.network.set(**ways), lambda s: s.network.mend(), says, loses, ways)


def _both(name: str, conditions: Conditions) -> Fault:
    return _network(name, conditions, conditions)


def _stop(scene: Scene) -> None:
    scene.control.process.signal(signal.SIGSTOP)


def _go_on(scene: Scene) -> None:
    scene.control.process.signal(signal.SIGCONT)


# `mute` accepts and never says anything, `noise` sends random bytes, `unknown` is gRPC without the service.
FAULTS = (
    _both("partition", CUT),
    _network("half-open-up", CUT, FINE),
    _network("half-open-down", FINE, CUT),
    _network("slow-10ms", FINE, Conditions(delay_ms=10)),
    _network("slow-1s", FINE, Conditions(delay_ms=1000)),
    _network("slow-10s", FINE, Conditions(delay_ms=LONG_MS)),
    _both("delay", Conditions(delay_ms=200, jitter_ms=100)),
    _both("loss", Conditions(delay_ms=5, loss=0.1)),
    _both("heavy-loss", Conditions(delay_ms=5, loss=0.33)),
    _both("reordering", Conditions(delay_ms=5, jitter_ms=5, reorder=0.2, duplicate=0.05)),
    Fault("killed", Scene.kill, Scene.give_back, GONE, loses=True),
    Fault("hung", _stop, _go_on, UNHEARD, loses=True),
    _other("mute"),
    _other("noise"),
    _other("unknown"),
)
