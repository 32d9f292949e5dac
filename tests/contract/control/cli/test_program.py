"""`meridianctl` as a program: version, help, completion, arguments that are no text, output that cannot be written, and
signals."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from meridian.v1 import fleet_pb2

from meridian_control import __version__
from tests.contract.ctl import Control, engine, scripted
from tests.fakes.linked import until
from tests.processes import BUSY, MERIDIANCTL, begin, run, start


def test_version() -> None:
    said = run([*MERIDIANCTL, "--version"])
    assert said.stdout == f"meridianctl {__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", ("[env var: MERIDIAN_SERVER] [default: (that of the context, else 127.0.0.1:50051)]",)),
        ("policy apply", ("[env var: MERIDIAN_AUTHOR, USER]", "[default: (its current etag)]", "--dry-run")),
        ("policy diff", ("[BEFORE] [AFTER]", "[default: (the one before AFTER)]")),
        ("wait", ("[default: (the one in force)]", "[default: 60.0]")),
    ],
)
def test_help_shows_variables_and_defaults_and_flags_without_a_type(command: str, words: tuple[str, ...]) -> None:
    said = run([*MERIDIANCTL, *command.split(), "--help"]).stdout
    said = " ".join(said.replace("│", " ").split())
    assert [word for word in words if word not in said] == []
    assert "<bool>" not in said
    assert str(2**63 - 1) not in said, "a bound that only the API has"


async def test_a_shell_completes_names(control: Control, tmp_path: Path) -> None:
    """Commands, flags, and names of fields, contexts, engines and revisions; nothing if the control plane does not
    answer."""
    control.fleet.engines = [engine("vllm-0", 1), engine("vllm-1", 1), engine("other", 1)]
    (tmp_path / "c.toml").write_text("[contexts.staging]\nserver = 'a:1'\n[contexts.stage2]\nserver = 'b:1'\n")
    assert (await control("policy", "set", "fallback.lease_ms=1")).exit_code == 1
    (tmp_path / "p.toml").write_text("fallback.lease_ms = 500")
    await control("policy", "apply", "-f", tmp_path / "p.toml")

    async def completed(words: str, server: str = control.address) -> list[str]:
        asked = {"_MERIDIANCTL_COMPLETE": "complete_bash", "COMP_WORDS": f"meridianctl {words}"}
        asked |= {"COMP_CWORD": str(len(words.split())), "MERIDIAN_SERVER": server}
        env = {**os.environ, **asked, "MERIDIAN_CONTEXTS": str(tmp_path / "c.toml")}
        return (await asyncio.to_thread(run, MERIDIANCTL, env)).stdout.split()

    assert await completed("repl") == ["replay"]
    assert await completed("policy ro") == ["rollback"]
    assert await completed("explain --eng") == ["--engine"]
    assert await completed("policy set scheduler.max_t") == ["scheduler.max_think_tokens="]
    assert await completed("context use sta") == ["stage2", "staging"]
    assert await completed("--context sta") == ["stage2", "staging"]
    assert await completed("requests --engine vl") == ["vllm-0"], "the page that the server gives first"
    assert await completed("policy rollback 1") == ["1"]
    assert await completed("requests --engine vl", "127.0.0.1:1") == []
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = await asyncio.to_thread(run, [*MERIDIANCTL, "--show-completion", "bash"], environment)
    assert "_MERIDIANCTL_COMPLETE=complete_bash" in shown.stdout


def test_an_argument_that_is_no_text() -> None:
    ended = subprocess.run([*MERIDIANCTL, "explain", b"\xff"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "the arguments must be UTF-8\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*MERIDIANCTL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "cannot write the output: No space left on device\n")


def test_output_whose_encoding_lacks_a_sign(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[contexts.'é']\nserver = 'a:1'\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "MERIDIAN_CONTEXTS": str(tmp_path / "c.toml")}
    listed = subprocess.run([*MERIDIANCTL, "context", "list"], env=environment, capture_output=True, check=False)
    assert (listed.returncode, b" \\xe9 " in listed.stdout) == (0, True)


def test_output_that_is_closed() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *MERIDIANCTL, "engines"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "cannot write the output: standard output is closed\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_top_leaves_the_terminal_as_it_was(control: Control, number: signal.Signals) -> None:
    control.fleet.engines = [engine("vllm-0", 1)]
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    environment = {**os.environ, "MERIDIAN_SERVER": control.address, "TERM": "xterm", "COLUMNS": "200"}
    program = begin([*MERIDIANCTL, "top"], [terminal] * 3, environment)

    def shown(what: bytes) -> None:
        written = b""
        while what not in written:
            written += os.read(keyboard, 65536)

    try:
        async with asyncio.timeout(60 * BUSY):
            await asyncio.to_thread(shown, b"vllm-0")
            program.send_signal(number)
            # The end of the screen that `top` had for itself.
            await asyncio.to_thread(shown, b"\x1b[?1049l")
            assert await asyncio.to_thread(program.wait) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        program.kill()
        os.close(terminal)


# Without the time after which a call ends by itself.
PATIENT = """
import signal
from meridian_control.cli import console, main, policy
console.CALL_TIMEOUT_S = policy.CALL_TIMEOUT_S = 1e6
signal.signal(signal.SIGINT, signal.default_int_handler)
main.main()
"""


@pytest.mark.parametrize(("words", "code"), [("engines --watch", 0), ("status", 130)])
async def test_ctrl_c_ends_a_command_during_a_call(tmp_path: Path, words: str, code: int) -> None:
    asked = asyncio.Event()
    async with scripted(ListEngines=[fleet_pb2.ListEnginesResponse(), asked], GetPolicy=[asked]) as target:
        command = [sys.executable, "-c", PATIENT, *words.split()]
        program = start(command, tmp_path / "log", {**os.environ, "MERIDIAN_SERVER": target})
        try:
            await until(asked.is_set)
            program.send_signal(signal.SIGINT)
            async with asyncio.timeout(20 * BUSY):
                assert await asyncio.to_thread(program.wait) == code
        finally:
            program.kill()


# A program whose import of a module lasts until a signal. Shells start programs in the background with SIGINT ignored.
IMPORTING = """
import signal, sys, time
from importlib import import_module
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[3]:
            print("importing", flush=True)
            time.sleep(3600)
sys.meta_path.insert(0, Slow())
sys.exit(getattr(import_module(sys.argv[1]), sys.argv[2])())
"""


@pytest.mark.parametrize(
    ("module", "function", "imported", "code"),
    [
        ("meridian_control.programs", "ctl", "typer", -signal.SIGINT),
        ("meridian_control.programs", "control", "grpc", 0),
        ("meridian_relay.__main__", "run", "aiohttp", 0),
    ],
)
def test_ctrl_c_during_the_imports(module: str, function: str, imported: str, code: int) -> None:
    command = [sys.executable, "-c", IMPORTING, module, function, imported]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "importing\n"
            program.send_signal(signal.SIGINT)
            _, said = program.communicate(timeout=60 * BUSY)
        finally:
            program.kill()
    assert (program.returncode, said) == (code, "")
