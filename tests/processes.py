"""Starts and stops the real programs that tests and benchmarks talk to. Every process runs in a group of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from google.protobuf.json_format import ParseDict
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, freeze_pb2, freeze_pb2_grpc, policy_pb2, policy_pb2_grpc

from tests.preloaded import fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from tests.preloaded import Forked

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "tests" / "data" / "maze-qwen3"
MARKED = ROOT / "tests" / "data" / "marked"
# What engines keep for a restart; gone with this process. No TemporaryDirectory: its finalizer, made so early, would
# run after the wait for vLLM's processes, and with it theirs, which ends them.
STATE = tempfile.mkdtemp(prefix="meridian-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "MERIDIAN_STATE_DIR": STATE,
}


# A shell makes what it starts in the background ignore interrupts, and children inherit that. A `preexec_fn` would do,
# but forks, and gRPC's threads that a fork makes anew write errors while their files are closed for the program.
MERIDIANCTL = [
    sys.executable,
    "-c",
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from meridian_control.cli.main import main\n"
    "main()",
]


# Below those that outgoing connections take for themselves, and never the same twice: a server that is yet to start
# must find its port free.
# Of those, each of several test processes has its own.
_OF, _WORKER = (
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
)
PORTS = range(15_000 + _WORKER, 32_000, _OF)
_given: set[int] = set()


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as s, contextlib.suppress(OSError):
            if port not in _given:
                s.bind(("127.0.0.1", port))
                _given.add(port)
                return port


# Times to wait are given for a quiet machine, and guard against waiting for ever only: where other processes keep the
# cores busy, all of them are so many times as long.
BUSY = 6
# Deadline of a call.
RPC_S = 60.0


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The condition's first true value. Raises TimeoutError naming what was awaited."""
    deadline = time.monotonic() + timeout_s * BUSY
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"not within {timeout_s * BUSY} s: {what}")


def start(
    command: list[str], log: Path, env: Mapping[str, str], stdin: str = os.devnull
) -> subprocess.Popen[bytes] | Forked:
    """Start a program in a session of its own, its output at the end of `log`, its input the file `stdin`."""
    if forked := fork(command, ROOT, log, env, stdin):
        return forked
    with log.open("ab") as out, open(stdin, "rb") as given:
        return subprocess.Popen(
            command, cwd=ROOT, stdin=given, stdout=out, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True
        )


class Process:
    """A program with its output in a file; `kill` ends its whole group."""

    def __init__(
        self, command: list[str], log: Path, env: dict[str, str] | None = None, stdin: str = os.devnull
    ) -> None:
        self.log = log
        self.popen = start(command, log, {**os.environ, **(env or {})}, stdin)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def stop(self, timeout_s: float = 20) -> int:
        """SIGTERM, then SIGKILL after the timeout; returns the exit status."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout_s)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL, which does nothing to a program that has ended; returns the exit status."""
        self.signal(signal.SIGKILL)
        return self.popen.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Control:
    """A `meridian-control` process on a port of its own, and a client of it, with TLS where `credentials` are given."""

    options: Sequence[str] = ()
    cores: set[int] | None = None
    credentials: grpc.ChannelCredentials | None = None
    # What its command begins with, what it runs, and where it listens if that is not where its clients find it.
    within: Sequence[str] = ()
    module = "meridian_control"
    listen = ""

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        options: Sequence[str] = (),
        cores: set[int] | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.folder, self.port = folder, port or free_port()
        self.options, self.cores, self.credentials = options, cores, credentials
        self.target = f"127.0.0.1:{self.port}"
        self.start()

    @classmethod
    def existing(cls, target: str) -> Control:
        """A client of one that runs already."""
        control = cls.__new__(cls)
        control.target = target
        return control

    def start(self) -> None:
        """Start, or start again on the same port and store."""
        command = [
            *self.within,
            sys.executable,
            "-m",
            self.module,
            "--listen",
            self.listen or self.target,
            "--metrics-listen",
            "",
            "--page-listen",
            "",
        ]
        store = ["--store", str(self.folder / "meridian.db")]
        self.process = Process([*command, *store, *self.options], self.folder / "control.log")
        if self.cores is not None:
            os.sched_setaffinity(self.process.popen.pid, self.cores)
        wait_for(self._serving, 30, "meridian-control to serve")

    def _serving(self) -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(self.engines() is not None)
        return False

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        tls = self.credentials
        with grpc.secure_channel(self.target, tls) if tls else grpc.insecure_channel(self.target) as channel:
            yield channel

    def engines(self) -> list[fleet_pb2.Engine]:
        with self.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return list(stub.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=RPC_S).engines)

    def engine(self) -> fleet_pb2.Engine:
        """The one connected engine."""

        def connected() -> fleet_pb2.Engine | None:
            found = [e for e in self.engines() if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
            return found[0] if found else None

        engine: fleet_pb2.Engine = wait_for(connected, 30, "an engine to connect")
        return engine

    def requests(self) -> list[fleet_pb2.LiveRequest]:
        with self.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return list(stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=1000), timeout=RPC_S).requests)

    def explain(self, request_id: str) -> fleet_pb2.RequestLife:
        """The newest request of that id, from the decision log."""
        with self.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return stub.ExplainRequest(fleet_pb2.ExplainRequestRequest(request_id=request_id), timeout=RPC_S).life

    def set_policy(self, policy: dict[str, Any]) -> int:
        """Put a policy in force and return its revision, without waiting for engines."""
        message = ParseDict(policy, policy_pb2.Policy())
        with self.channel() as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            return int(
                stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=message), timeout=RPC_S).revision.revision
            )

    def freeze(self, seconds: int = 600) -> None:
        """Freeze every engine, without waiting for them."""
        request = freeze_pb2.FreezeRequest(reason="test")
        request.duration.FromSeconds(seconds)
        with self.channel() as channel:
            freeze_pb2_grpc.FreezeServiceStub(channel).Freeze(request, timeout=RPC_S)

    def thaw(self) -> None:
        """End all freezes."""
        with self.channel() as channel:
            freeze_pb2_grpc.FreezeServiceStub(channel).Thaw(freeze_pb2.ThawRequest(), timeout=RPC_S)

    def apply(self, policy: dict[str, Any]) -> int:
        """Put a policy in force and wait until the engine has acknowledged it."""
        revision = self.set_policy(policy)
        wait_for(lambda: self.engine().acked_revision == revision, 10, f"revision {revision} to be applied")
        return revision

    def settled(self) -> fleet_pb2.Engine:
        """The engine once all its decisions have had their outcome."""

        def quiet() -> fleet_pb2.Engine | None:
            engine = self.engine()
            done = engine.running == 0 and sum(engine.decisions.values()) == sum(engine.outcomes.values())
            return engine if done else None

        engine: fleet_pb2.Engine = wait_for(quiet, 10, "every decision to have its outcome")
        return engine
