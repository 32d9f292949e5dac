"""Start and stop the real programs that tests and benchmarks use. Every process runs in a group of its own."""

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
from types import MappingProxyType
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
# Folder for the state that engines keep for a restart; it is removed with this process. A TemporaryDirectory is not
# used, because its finalizer, made this early, would delay vLLM's finalizers, which end vLLM's processes, until after
# the wait for those processes.
STATE = tempfile.mkdtemp(prefix="meridian-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    # The threads that numba starts beside vLLM's drafts poll for work, although vLLM gives them none.
    "NUMBA_NUM_THREADS": "1",
    "MERIDIAN_STATE_DIR": STATE,
}


MERIDIANCTL = [sys.executable, "-m", "tests.meridianctl"]


# Ports below those of outgoing connections, none of which is given twice, so that a server that starts later finds its
# port free. Each of several test processes has ports of its own.
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


# Factor for all timeouts. The timeouts are chosen for a quiet machine and only guard against waiting for ever; the
# factor covers a machine whose cores are busy with other processes.
BUSY = 6
# Deadline of a call in seconds.
RPC_S = 60.0
# Options of a channel that soon connects again.
SOON = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the condition's first true value. Raises TimeoutError with `what` in its text."""
    deadline = time.monotonic() + timeout_s * BUSY
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"not within {timeout_s * BUSY} s: {what}")


def begin(
    command: Sequence[str], files: Sequence[int], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes] | Forked:
    """Start a program in a session of its own. files: its standard input, output and error. env: None for this
    process's own."""
    env, cwd = os.environ if env is None else env, cwd or ROOT
    stdin, out, errors = files
    return fork(command, cwd, env, files) or subprocess.Popen(
        command, cwd=cwd, stdin=stdin, stdout=out, stderr=errors, env=dict(env), start_new_session=True
    )


def start(
    command: list[str], log: Path, env: Mapping[str, str], stdin: str = os.devnull
) -> subprocess.Popen[bytes] | Forked:
    """Start a program with its output appended to `log` and its input from the file `stdin`."""
    with log.open("ab") as out, open(stdin, "rb") as given:
        return begin(command, [given.fileno(), out.fileno(), out.fileno()], env)


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of the product to its end, and return its exit status and its output. env: None for this process's
    own."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, open(os.devnull, "rb") as given:
        code = begin(command, [given.fileno(), out.fileno(), errors.fileno()], env, cwd).wait()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read().decode(), errors.read().decode())


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

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL if the program does not end; return the exit status."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(20 * BUSY)
        return self.kill()

    def kill(self) -> int:
        """Send SIGKILL, which does nothing to a program that has ended; return the exit status."""
        self.signal(signal.SIGKILL)
        return self.popen.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Control:
    """A `meridian-control` process on a port of its own, and a client of it, with TLS if `credentials` are given."""

    options: Sequence[str] = ()
    cores: set[int] | None = None
    credentials: grpc.ChannelCredentials | None = None
    # Prefix of the command, the module that it runs, and its listen address if that differs from its clients' target.
    within: Sequence[str] = ()
    module = "meridian_control"
    # Values by section that `set_policy` adds: engines choose the ids of requests at random, and with them the control
    # group, which nothing shortens, and the requests that are measured in shadow.
    defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType(
        {"entropy": {"holdout_share": 0.0}, "telemetry": {"shadow_sample_ratio": 1.0}}
    )
    listen = ""
    # The channel that is open; a control plane that is started again gets another one.
    _channel: grpc.Channel | None = None
    # Waits until the control plane has all reports that the engine has sent; only an engine in this process knows.
    caught_up: Callable[[], object] = staticmethod(lambda: None)

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
        """Return a client of a control plane that runs already."""
        control = cls.__new__(cls)
        control.target = target
        return control

    def start(self) -> None:
        """Start the control plane, or start it again on the same port and store."""
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
        self._channel = None
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
        """Yield a channel, which stays open for the next calls: to open one takes longer than a call."""
        if self._channel is None:
            target, tls = self.target, self.credentials
            made = grpc.secure_channel(target, tls, SOON) if tls else grpc.insecure_channel(target, SOON)
            self._channel = made
        yield self._channel

    def engines(self) -> list[fleet_pb2.Engine]:
        with self.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return list(stub.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=RPC_S).engines)

    def engine(self) -> fleet_pb2.Engine:
        """Return the one connected engine."""

        def connected() -> fleet_pb2.Engine | None:
            found = [e for e in self.engines() if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED]
            return found[0] if found else None

        engine: fleet_pb2.Engine = wait_for(connected, 30, "an engine to connect")
        return engine

    def faulty(self, engine_id: str) -> fleet_pb2.Engine:
        """Return an engine once its fault is shown. Engines of earlier tests may still be listed with theirs."""

        def shown() -> fleet_pb2.Engine | None:
            return next((e for e in self.engines() if e.engine_id == engine_id and e.fault), None)

        engine: fleet_pb2.Engine = wait_for(shown, 60, f"the fault of engine {engine_id} to be shown")
        return engine

    def requests(self) -> list[fleet_pb2.LiveRequest]:
        with self.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return list(stub.ListRequests(fleet_pb2.ListRequestsRequest(page_size=1000), timeout=RPC_S).requests)

    def explain(self, request_id: str) -> fleet_pb2.RequestLife:
        """Return the newest request of that id from the decision log."""
        with self.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return stub.ExplainRequest(fleet_pb2.ExplainRequestRequest(request_id=request_id), timeout=RPC_S).life

    def set_policy(self, policy: dict[str, Any]) -> int:
        """Put a policy in force, with `defaults` unless it says otherwise, and return its revision, without waiting for
        engines."""
        policy = policy | {name: {**fields, **policy.get(name, {})} for name, fields in self.defaults.items()}
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
        """Return the engine when the control plane has its reports and every decision has its outcome."""
        self.caught_up()

        def quiet() -> fleet_pb2.Engine | None:
            engine = self.engine()
            done = engine.running == 0 and sum(engine.decisions.values()) == sum(engine.outcomes.values())
            return engine if done else None

        engine: fleet_pb2.Engine = wait_for(quiet, 10, "every decision to have its outcome")
        return engine


class Answering(Control):
    """A control plane that answers every report, so that an agent can wait until every decision has arrived."""

    module = "tests.answering"
