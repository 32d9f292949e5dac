"""What `meridian-control` writes to its log: who changed what, engines that are lost, strangers, and its JSON form."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meridian_control import __version__
from tests.fakes.linked import LinkedEngine
from tests.processes import MERIDIANCTL, Control, free_port, run, wait_for

# An agent's stream in a process of its own, which ends in the way that its argument names.
ENGINE = """
import sys, time
from tests.fakes.linked import LinkedEngine
engine = LinkedEngine([sys.argv[1]], sys.argv[2])
engine.link.start()
print("up", flush=True)
sys.stdin.read()
engine.link.stop()
"""
PAYLOADS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(100),
    "long": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "events": b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n",
    "url": b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
}


class Logged(Control):
    """A control plane whose page and log a test reads."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.page, self.health, self.metrics = free_port(), free_port(), free_port()
        listens = {"page": self.page, "health": self.health, "metrics": self.metrics}
        flags = [part for name, port in listens.items() for part in (f"--{name}-listen", f"127.0.0.1:{port}")]
        super().__init__(folder, options=(*flags, *options))

    def lines(self, text: str) -> list[str]:
        return [line for line in self.process.output().splitlines() if text in line]

    def line(self, text: str) -> str:
        found: list[str] = wait_for(lambda: self.lines(text), 30, text)
        return found[0]

    def ctl(self, *arguments: str, author: str = "ann") -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MERIDIAN_AUTHOR": author}
        run([*MERIDIANCTL, "--server", self.target, *arguments], env).check_returncode()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Logged]:
    found = Logged(tmp_path)
    yield found
    found.process.stop()


def test_the_start_names_version_and_addresses(control: Logged, tmp_path: Path) -> None:
    line = control.line("listening on")
    assert f"meridian-control {__version__} listening on {control.target} for gRPC (no TLS, no access file)" in line
    others = ("/metrics", control.metrics), ("status page", control.page), ("health", control.health)
    assert "".join(f", {name} on 127.0.0.1:{port}" for name, port in others) in line
    assert line.endswith(f"; store SQLite {tmp_path / 'meridian.db'}")


def test_changes_and_their_authors(control: Logged, tmp_path: Path) -> None:
    policy, steps = tmp_path / "policy.toml", tmp_path / "steps.toml"
    policy.write_text("fallback.lease_ms = 500\n")
    steps.write_text("[[step]]\npercent = 100\n")
    control.ctl("policy", "apply", "-f", str(policy), "--reason", "faster", "--dry-run")
    control.ctl("policy", "apply", "-f", str(policy), "--reason", "faster")
    control.ctl("policy", "rollback", "1", author="bob\nCRITICAL forged")
    control.ctl("freeze", "--for", "1h", "--reason", "incident 7", "--allow-none")
    control.ctl("thaw")
    control.ctl("rollout", "start", "-f", str(policy), "--steps", str(steps), "--reason", "try")
    control.ctl("rollout", "abort", "--reason", "no")
    where = "at ipv4:127.0.0.1"
    assert control.line("policy revision 2").endswith(
        f"INFO meridian_control.server.policy_service policy revision 2 by ann {where}: faster"
    )
    assert control.line("policy revision 3").endswith(
        rf"policy revision 3 by bob\nCRITICAL forged {where}: rollback to revision 1"
    )
    assert " WARNING " in control.line("freeze 1 of every engine until")
    assert control.line("freeze 1 of").endswith(f"Z by ann {where}: incident 7")
    assert control.line("freeze 1 is thawed").endswith(f"freeze 1 is thawed by an unnamed caller {where}")
    assert control.line("rollout 1 is started").endswith(f"rollout 1 is started by ann {where}: try")
    assert control.line("rollout 1 is aborted").endswith(f"rollout 1 is aborted by ann {where}: no")
    assert len(control.lines("policy revision")) == 2, "a dry run changes nothing"
    assert all(re.match(r"\d{4}-", line) for line in control.process.output().splitlines()), "no line is forged"


@contextmanager
def engine_process(control: Logged, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an engine's stream in a process, which is killed at the end unless it has ended."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENGINE, control.target, name]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            wait_for(lambda: name in {e.engine_id for e in control.engines()}, 30, "the engine")
            yield process
        finally:
            process.kill()


def test_engines_that_are_killed_come_back_or_shut_down(control: Logged) -> None:
    """An engine that stays away is a warning, and `wait` expects it back; the others are neither."""
    with engine_process(control, "closed") as closed:
        assert closed.stdin is not None
        closed.stdin.close()
        assert closed.wait(60) == 0
    with engine_process(control, "killed") as killed:
        with engine_process(control, "again"):
            # However slow this process is, the control plane does not wait for the engine for too long.
            control.process.signal(signal.SIGSTOP)
        with LinkedEngine([control.target], "again") as again:
            control.process.signal(signal.SIGCONT)
            wait_for(lambda: again.link.lease.connected, 30, "the engine to come back")
            # This engine is killed last, so it is lost last.
            killed.kill()
            line = control.line("engine killed (1) is lost")
            assert " WARNING " in line
            for name in ("again", "closed"):
                assert not control.lines(f"engine {name} (1) is lost")
            assert " INFO " in control.line("engine closed left: agent_closed")
            lost = {e.engine_id: e.lost for e in control.engines()}
            assert lost == {"killed": True, "again": False, "closed": False}


def test_two_engines_of_one_name(control: Logged, caplog: pytest.LogCaptureFixture) -> None:
    """Both sides say so, and `meridianctl engines` does."""
    with LinkedEngine([control.target], "same"):
        wait_for(lambda: len(control.engines()) == 1, 30, "the engine")
        with caplog.at_level("WARNING"), LinkedEngine([control.target], "same", incarnation="2"):
            wait_for(lambda: len(control.engines()) == 2, 30, "the other engine")
            line = control.line("has the name of an engine that is still connected")
            assert " WARNING " in line
            assert "engine same (2) has the name of an engine that is still connected (1)" in line
            told = "another process (1) is connected to the control plane under this engine's name"
            wait_for(lambda: any(told in r.getMessage() for r in caplog.records), 30, "the agent's line")
            command = [*MERIDIANCTL, "--server", control.target, "engines"]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            said = run(command, env).stdout
            with urllib.request.urlopen(f"http://127.0.0.1:{control.metrics}/metrics") as answer:
                metrics = answer.read().decode()
            assert "\nmeridian_engines_sharing_name 2.0\n" in metrics
            assert sum(map(float, re.findall("^meridian_agents{.*} (.*)$", metrics, re.MULTILINE))) == 1
            assert "same: several engines have this name; give each a MERIDIAN_ENGINE_ID of its own" in said


def test_strangers_cause_no_traceback(control: Logged) -> None:
    for port in (control.port, control.page, control.health):
        for resets, payload in product((False, True), PAYLOADS.values()):
            with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                stranger.sendall(payload)
                if resets:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.settimeout(5)
                    while stranger.recv(65536) and payload is not PAYLOADS["events"]:
                        pass
    assert control.engines() == []
    control.process.stop()
    output = control.process.output()
    assert "Traceback" not in output
    assert 0 < len(control.lines("which is no HTTP")) <= 20
    assert all(re.match(r"\d{4}-", line) for line in output.splitlines())


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERIDIAN_LOG_FORMAT", "json")
    control = Logged(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text("fallback.lease_ms = 500\n")
    control.ctl("policy", "apply", "-f", str(policy), "--reason", 'a "b"\n\u202ec')
    control.process.stop()
    records: list[dict[str, Any]] = [json.loads(line) for line in control.process.output().splitlines()]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    (applied,) = (record for record in records if record["message"].startswith("policy revision 2 by ann"))
    assert (applied["level"], applied["logger"]) == ("info", "meridian_control.server.policy_service")
    assert applied["message"].endswith('a "b"\n\u202ec')
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", applied["time"])
