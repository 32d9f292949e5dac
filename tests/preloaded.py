"""Fork test programs from processes that have imported the programs' modules and have done nothing else.

The tests start some thirty processes with vLLM and a hundred with the control plane. An import of vLLM costs 6 to 10
seconds of processor time, an import of the control plane costs one. `Servers` are started with pytest; each of them
imports its modules when a test first needs a program of its kind. vLLM itself also forks after its import, on platforms
that allow it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Modules that each server imports before it forks.
IMPORTS = {
    "control": ("meridian_control.app.main",),
    "vllm": ("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"),
}
# The server that forks each program; a program is a module, as after `python -m`, or a script.
EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"
PROGRAMS = {
    str(EXAMPLES / "async_llm.py"): "vllm",
    str(EXAMPLES / "llm.py"): "vllm",
    "meridian_control": "control",
    "tests.engine.lacking": "vllm",
    "tests.engine.matrix.child": "vllm",
    "tests.engine.misfit": "vllm",
    "tests.engine.stock": "vllm",
    "tests.soak.stock": "vllm",
    "vllm.entrypoints.openai.api_server": "vllm",
}
# Environment variable with the folder of the servers' sockets. Without it, programs are started as usual.
FOLDER = "MERIDIAN_TESTS_PRELOADED"
# Seconds in which a server begins to listen.
PATIENCE_S = 60.0


class Servers:
    """One server process of each kind, for all processes of one run of pytest."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="meridian-preloaded-")
        self._processes = []
        for name in IMPORTS:
            command = [sys.executable, "-m", "tests.preloaded", str(Path(self._folder.name, name)), name]
            # The server ends when its standard input is closed, which happens however this process ends.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **env})
            self._processes.append(process)
        os.environ[FOLDER] = self._folder.name

    def stop(self) -> None:
        del os.environ[FOLDER]
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()


def fork(command: Sequence[str], cwd: Path, log: Path, env: Mapping[str, str], stdin: str) -> Forked | None:
    """Start a program in a session of its own, with its output appended to `log` and its input from the file `stdin`.

    Returns None if no server can fork that command.
    """
    python, *program = command
    if program[:1] == ["-m"]:
        program = program[1:]
    if FOLDER not in os.environ or python != sys.executable or not program or program[0] not in PROGRAMS:
        return None
    # Python reads these variables at its start, and the servers started with those of the tests.
    if any(env.get(name) != os.environ.get(name) for name in ("PYTHONPATH", "PYTHONHASHSEED")):
        return None
    connection = socket.socket(socket.AF_UNIX)
    path = Path(os.environ[FOLDER], PROGRAMS[program[0]])
    deadline_s = time.monotonic() + PATIENCE_S
    # On a busy machine the server may take a while until it listens.
    while connection.connect_ex(str(path)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return Forked(Connection(connection.detach()), (program, str(cwd), str(log), dict(env), stdin))


class Forked:
    """The part of subprocess.Popen that the tests use."""

    def __init__(self, connection: Connection[Any, Any], program: tuple[Any, ...]) -> None:
        self._connection, self._lock = connection, threading.Lock()
        connection.send(program)
        self.pid: int = connection.recv()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._connection.poll():
                self.returncode = self._connection.recv()
                self._connection.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        while (code := self.poll()) is None:
            with contextlib.suppress(OSError):
                if not self._connection.poll(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _let_vllm_fork() -> None:
    """Make the programs fork their engine cores, as vLLM does on a GPU.

    On a CPU vLLM would start each engine core as a new process, which imports vLLM again.
    """
    from vllm.platforms.cpu import CpuPlatform

    spawns = CpuPlatform.check_and_update_config

    def forks(_: Any, config: Any) -> None:
        spawns(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    setattr(CpuPlatform, "check_and_update_config", classmethod(forks))  # noqa: B010


def _serve(path: str, modules: Sequence[str]) -> None:
    """Fork a process for each request; return in each process that is to run a program, with its arguments in place."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        # The kernel reaps the processes that attend to programs, because no process waits for them.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _wait_for_a_caller(listener)
        for module in modules:
            importlib.import_module(module)
        if "vllm" in sys.modules:
            _let_vllm_fork()
        gc.freeze()
        while True:
            _wait_for_a_caller(listener)
            accepted, _ = listener.accept()
            if not os.fork():
                break
            accepted.close()
    _attend(Connection(accepted.detach()))


def _wait_for_a_caller(listener: socket.socket) -> None:
    """Wait for a connection; exit the server if pytest has ended."""
    readable, _, _ = select.select([listener, sys.stdin], [], [])
    if sys.stdin in readable:
        os._exit(0)


def _attend(connection: Connection[Any, Any]) -> None:
    """Fork a program, wait for its end, and send its exit status. Returns in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program, cwd, log, env, stdin = connection.recv()
    if pid := os.fork():
        with contextlib.suppress(OSError):
            # The caller may have gone already.
            connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.setsid()
    files = (stdin, os.O_RDONLY), (log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number, (path, flags) in enumerate(files):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = program
    # From here on, a signal to the program's group reaches it.
    connection.send(os.getpid())
    connection.close()


if __name__ == "__main__":
    _serve(sys.argv[1], IMPORTS[sys.argv[2]])
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
