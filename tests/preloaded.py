"""Fork test programs and pytest's test processes from processes that have imported the modules and have done nothing
else, except what each start of an engine would do anew.

The tests start some thirty processes with vLLM and a hundred with the control plane. An import of vLLM costs 6 to 10
seconds of processor time, an import of the control plane costs one. `Servers` are started with pytest; each of them
imports its modules when a program of its kind is first needed. vLLM itself also forks after its import, on platforms
that allow it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
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
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Modules that each server imports before it forks.
IMPORTS = {
    "control": ("meridian_control.app.main", "meridian_control.cli.main"),
    "vllm": (
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.llm",
        "vllm.v1.spec_decode.ngram_proposer",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
        # The compiled code with which the worker measures logits.
        "meridian_kernels.one_pass",
        # Modules that test processes import besides.
        "hypothesis",
        "meridian_control.app.main",
        "meridian_control.cli.main",
        "openai",
    ),
}
# The server that forks each program; a program is a module, as after `python -m`, or a script.
EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"
PROGRAMS = {
    str(EXAMPLES / "async_llm.py"): "vllm",
    str(EXAMPLES / "llm.py"): "vllm",
    "meridian_control": "control",
    "tests.answering": "control",
    "tests.chaos.engine": "vllm",
    "tests.chaos.foreign": "control",
    "tests.engine.lacking": "vllm",
    "tests.engine.less_known": "vllm",
    "tests.engine.late": "vllm",
    "tests.engine.matrix.child": "vllm",
    "tests.engine.misfit": "vllm",
    "tests.engine.stock": "vllm",
    "tests.meridianctl": "control",
    "tests.patient": "control",
    "tests.primes": "control",
    "tests.soak.stock": "vllm",
    "vllm.entrypoints.openai.api_server": "vllm",
}
# Begins the command of a test process; `-c` and the code that pytest-xdist gives to the process follow.
TEST_PROCESS = (sys.executable, "-m", "tests.preloaded")
# A program with its arguments, its folder, its environment, and the files of the namespaces that it enters.
Start = tuple[list[str], str, dict[str, str], list[str]]
# Arguments of `nsenter` with the namespaces of a program.
NAMESPACES = ("--user=", "--net=")
# Environment variable with the folder of the servers' sockets. Without it, programs are started as usual.
FOLDER = "MERIDIAN_TESTS_PRELOADED"
# Seconds between two looks of a process that waits for another one through shared memory.
POLL_S = 0.0002
# Seconds in which a server begins to listen.
PATIENCE_S = 60.0


class Servers:
    """One server process of each kind, for all processes of one run of pytest."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="meridian-preloaded-")
        self._processes = []
        for name in IMPORTS:
            command = [sys.executable, "-m", "tests.preloaded", name, str(Path(self._folder.name, name))]
            # The server ends when its standard input is closed, which happens however this process ends.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **env})
            self._processes.append(process)
        os.environ[FOLDER] = self._folder.name

    def stop(self) -> None:
        del os.environ[FOLDER]
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()


def fork(command: Sequence[str], cwd: Path, env: Mapping[str, str], files: Sequence[int]) -> Forked | None:
    """Start a program in a session of its own. files: its standard input, output and error.

    Returns None if no server can fork that command.
    """
    prefix, program = _divided(command)
    namespaces = [argument.partition("=")[2] for argument in prefix if argument.startswith(NAMESPACES)]
    if FOLDER not in os.environ or not program or program[0] not in PROGRAMS or len(namespaces) + 2 < len(prefix):
        return None
    # Python reads the first variable at its start, and Triton the second when it is imported.
    if any(env.get(name) != os.environ.get(name) for name in ("PYTHONHASHSEED", "TRITON_INTERPRET")):
        return None
    return Forked(PROGRAMS[program[0]], (list(program), str(cwd), dict(env), namespaces), files)


def _divided(command: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return what comes before Python in a command, and the program; no program if the command is not this Python."""
    if sys.executable not in command:
        return command, ()
    at = command.index(sys.executable)
    return command[:at], command[at + 2 :] if command[at + 1 : at + 2] == ["-m"] else command[at + 1 :]


class Forked:
    """The part of subprocess.Popen that the tests use."""

    def __init__(self, server: str, start: Start, files: Sequence[int]) -> None:
        """Start a program. server: a key of IMPORTS. files: the program's standard input, output and error."""
        caller = socket.socket(socket.AF_UNIX)
        path = Path(os.environ[FOLDER], server)
        deadline_s = time.monotonic() + PATIENCE_S
        # On a busy machine the server may take a while until it listens.
        while caller.connect_ex(str(path)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        socket.send_fds(caller, [b"f"], files)
        self._lock = threading.Lock()
        self._connection: Connection[Any, Any] = Connection(caller.detach())
        self._connection.send(start)
        self.pid: int = self._connection.recv()
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
    """Make the programs fork their engine cores, as vLLM does on a GPU, and sleep while an engine core and its worker
    wait for each other.

    On a CPU vLLM would start each engine core as a new process, which imports vLLM again. While vLLM waits, it polls
    without a pause, and so takes the processor from the tests that run at the same time.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform

    shm_broadcast.sched_yield = functools.partial(time.sleep, POLL_S)

    spawns = CpuPlatform.check_and_update_config

    def forks(_: Any, config: Any) -> None:
        spawns(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    setattr(CpuPlatform, "check_and_update_config", classmethod(forks))  # noqa: B010


def _prepare_engines() -> None:
    """Do what each start of an engine would do anew and with the same result: import a reasoning parser and the modules
    of quantization, and look in all modules for the kernels that a CPU needs replaced. Let functions that vLLM compiles
    when they are first called run as they are written: a compilation takes seconds of each engine. And let an engine
    itself look at its model's class, for which vLLM would start a process that imports vLLM."""
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.reasoning import ReasoningParserManager

    setattr(registry, "_run_in_subprocess", lambda look: look())  # noqa: B010
    torch.compiler.set_stance("force_eager")
    ReasoningParserManager.get_reasoning_parser("qwen3")
    # Older versions have neither this module nor the kernels.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("vllm.model_executor.layers.quantization.online.base")
    if replace := getattr(CpuPlatform, "register_triton_kernel_overrides", None):
        with warnings.catch_warnings():
            # The search meets names that torch says are going.
            warnings.simplefilter("ignore")
            replace()
        setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(lambda: None))  # noqa: B010


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
            _prepare_engines()
            import setproctitle

            # The library finds the place of the title only while the environment lies where it lay at the start.
            setproctitle.getproctitle()
        gc.freeze()
        while True:
            _wait_for_a_caller(listener)
            accepted, _ = listener.accept()
            if not os.fork():
                break
            accepted.close()
    _attend(accepted)


def _wait_for_a_caller(listener: socket.socket) -> None:
    """Wait for a connection; exit the server if pytest has ended."""
    readable, _, _ = select.select([listener, sys.stdin], [], [])
    if sys.stdin in readable:
        os._exit(0)


def _attend(caller: socket.socket) -> None:
    """Fork a program, wait for its end, and send its exit status. Returns in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = socket.recv_fds(caller, 1, 3)[1]
    connection: Connection[Any, Any] = Connection(caller.detach())
    program, cwd, env, namespaces = connection.recv()
    if pid := os.fork():
        with contextlib.suppress(OSError):
            # The caller may have gone already.
            connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.setsid()
    for number, opened in enumerate(files):
        os.dup2(opened, number)
        os.close(opened)
    for namespace in namespaces:
        _enter(namespace)
    os.chdir(cwd)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = program
    _customize([folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in known])
    # From here on, a signal to the program's group reaches it.
    connection.send(os.getpid())
    connection.close()


def _enter(namespace: str) -> None:
    """Enter a Linux namespace. Raises OSError."""
    opened = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(opened, 0):
        raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")
    os.close(opened)


def _customize(folders: Sequence[str]) -> None:
    """Do what Python does at its start for folders of PYTHONPATH."""
    sys.path[1:1] = folders
    if any(Path(folder, "sitecustomize.py").exists() for folder in folders):
        sys.modules.pop("sitecustomize", None)
        importlib.invalidate_caches()
        importlib.import_module("sitecustomize")


def _run(program: Sequence[str]) -> None:
    """Run a program in this process: code after `-c`, a script, or a module."""
    name, *arguments = program
    if name == "-c":
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        _leave()
    if "vllm" in sys.modules:
        _let_vllm_fork()
        # The end of each engine would unfreeze what was imported before the fork, and go through it twice.
        gc.unfreeze = lambda: None
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        if name.startswith("vllm."):
            _leave()


def _leave() -> None:
    """End the process with what is registered for its exit. Python would also go through all modules and objects of
    vLLM, which takes half a second, and seconds in a test process."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] in IMPORTS:
        _serve(sys.argv[2], IMPORTS[sys.argv[1]])
        _run(sys.argv)
    else:
        # This process stands for the test process that it has forked.
        code = sys.argv[sys.argv.index("-c") :]
        sys.exit(Forked("vllm", (code, str(Path.cwd()), dict(os.environ), []), (0, 1, 2)).wait())
