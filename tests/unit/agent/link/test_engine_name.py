"""Two engines of one host have names and settings files of their own, and keep them over restarts."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link import identity
from meridian_agent.link.engine_name import EngineName
from meridian_agent.link.settings_file import StateFile
from tests.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names are claimed on Linux only")

# Prints the name and the name of the settings file that an engine has, and lasts until it is killed.
ENGINE = """
import json, os, sys, time
from pathlib import Path
from meridian.v1 import agent_pb2
from meridian_agent.link.engine_name import EngineName
from meridian_agent.link.settings_file import StateFile
sys.argv = ["vllm", "serve", "--port", sys.argv[2]]
folder = Path(os.environ["FOLDER"])
held = EngineName(folder)
file = StateFile(folder, held.file_name, "m")
file.keep(agent_pb2.Settings(revision=int(sys.argv[3])))
while not file.load():
    time.sleep(0.01)
if os.environ.get("CHILD"):
    child = os.fork()
    if not child:
        os.write(1, f"{json.dumps([os.getpid()])}\\n".encode())
        time.sleep(600)
os.write(1, f"{json.dumps([held.name, held.file_name])}\\n".encode())
time.sleep(600)
"""


class Host:
    """A host of its own: its name is one that no other test uses."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.env = {**os.environ, "FOLDER": str(folder), **env}
        self.running: list[subprocess.Popen[str]] = []

    def start(self, port: int) -> list[str]:
        command = [sys.executable, "-c", ENGINE, "x", str(port), str(port)]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)
        self.running.append(process)
        return self.said(process)

    @staticmethod
    def said(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        found: list[str] = json.loads(process.stdout.readline())
        return found

    def kill(self, index: int) -> None:
        process = self.running.pop(index)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def host(folder: Path, **env: str) -> Iterator[Host]:
    found = Host(folder, **env)
    try:
        yield found
    finally:
        while found.running:
            found.kill(0)


@pytest.fixture
def host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give this host a name that no other test uses."""
    monkeypatch.delenv("MERIDIAN_ENGINE_ID", raising=False)
    monkeypatch.setattr(identity, "NAMESPACE", tmp_path / "none")
    name = f"host-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setattr("platform.node", lambda: name)
    return name


def test_servers_of_one_host_that_are_given_one_name(tmp_path: Path) -> None:
    """The control plane gets the name that the operator chose, but no engine takes the other's settings file."""
    name = f"chosen-{os.getpid()}"
    with host(tmp_path, MERIDIAN_ENGINE_ID=name) as one:
        assert one.start(8000) == [name, name]
        assert one.start(8001) == [name, f"{name}_2"]
        first, second = (StateFile(tmp_path, file, "m").load() for file in (name, f"{name}_2"))
        assert first is not None
        assert second is not None
        assert (first.revision, second.revision) == (8000, 8001)


def test_the_name_of_a_killed_engine_is_free_although_its_child_lives_on(tmp_path: Path) -> None:
    name = f"forked-{os.getpid()}"
    with host(tmp_path, MERIDIAN_ENGINE_ID=name, CHILD="1") as one:
        lines = [one.start(8000), one.said(one.running[0])]
        (child,) = (line[0] for line in lines if len(line) == 1)
        one.kill(0)
        try:
            os.kill(int(child), 0)
            one.env.pop("CHILD")
            assert one.start(8000) == [name, name]
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_servers_of_one_host_have_names_of_their_own(tmp_path: Path, host_name: str) -> None:
    first, second, third = EngineName(tmp_path), EngineName(tmp_path), EngineName(tmp_path, 1)
    names = [host_name, f"{host_name}_2", f"{host_name}-dp1"]
    assert [held.name for held in (first, second, third)] == names
    assert [held.file_name for held in (first, second, third)] == names
    first.release()
    again = EngineName(tmp_path)
    assert again.name == host_name
    for held in (again, second, third):
        held.release()


def test_an_engine_that_is_dropped_without_an_end_leaves_no_claim(tmp_path: Path, host_name: str) -> None:
    """The engine and its name are in a cycle, as a scheduler and its agent are, so the collector finds them."""
    engine = SimpleNamespace(name=EngineName(tmp_path))
    engine.itself = engine
    del engine
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(warning.message) for warning in said if "meridian-engine" in str(warning.message)] == []
    again = EngineName(tmp_path)
    assert again.name == host_name
    again.release()


def test_a_server_keeps_its_name_over_a_restart(
    tmp_path: Path, host_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both servers are restarted, and the second one is the first to come back."""
    revisions = itertools.count(1)

    def start(port: int) -> EngineName:
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", "--port", str(port)])
        held = EngineName(tmp_path)
        file = StateFile(tmp_path, held.file_name, "m")
        file.keep(agent_pb2.Settings(revision=(revision := next(revisions))))
        # The file of the server before the restart has the same command.
        wait_for(lambda: (kept := file.load()) is not None and kept.revision == revision, 5, "the file")
        return held

    one, two = start(8000), start(8001)
    assert (one.name, two.name) == (host_name, f"{host_name}_2")
    one.release()
    two.release()
    two, one = start(8001), start(8000)
    assert (one.name, two.name) == (host_name, f"{host_name}_2")
    one.release()
    two.release()
    (other := start(8002)).release()
    assert other.name == host_name, "a server with other arguments has the host's name if it is free"


def test_the_collision_of_chosen_names_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"both-{os.getpid()}"
    monkeypatch.setenv("MERIDIAN_ENGINE_ID", name)
    one, two = EngineName(tmp_path), EngineName(None)
    assert (one.name, two.name, two.file_name) == (name, name, f"{name}_2")
    (record,) = caplog.records
    assert f"another engine on this host has the name '{name}' too" in record.getMessage()
    assert "MERIDIAN_ENGINE_ID" in record.getMessage()
    one.release()
    two.release()


def test_pods_of_two_namespaces_have_names_of_their_own(
    tmp_path: Path, host_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for namespace in ("prod", "staging"):
        file = tmp_path / namespace
        file.write_text(f"{namespace}\n")
        monkeypatch.setattr(identity, "NAMESPACE", file)
        names.append(identity.wanted_name(1)[0])
    assert names == [f"{host_name}.prod-dp1", f"{host_name}.staging-dp1"]
