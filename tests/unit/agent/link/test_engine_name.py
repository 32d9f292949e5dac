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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link import identity
from meridian_agent.link.engine_name import EngineName
from meridian_agent.link.settings_file import StateFile
from tests.processes import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names are claimed on Linux only")

# Prints the name and the name of the settings file that an engine has, and lasts until it is killed.
ENGINE = """
import json, os, time
from meridian_agent.link.engine_name import EngineName
held = EngineName(None)
child = 0
if os.environ.get("CHILD"):
    child = os.fork()
    if not child:
        time.sleep(600)
os.write(1, f"{json.dumps([held.name, held.file_name, child])}\\n".encode())
time.sleep(600)
"""


@contextmanager
def engine(**env: str) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """Start an engine in a process of its own, and kill it at the end. Yield the process, and what it has printed."""
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give this host a name that no other test uses."""
    monkeypatch.delenv("MERIDIAN_ENGINE_ID", raising=False)
    monkeypatch.setattr(identity, "NAMESPACE", tmp_path / "none")
    name = f"host-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setattr("platform.node", lambda: name)
    return name


def test_the_name_of_a_killed_engine_is_free_although_its_child_lives_on() -> None:
    name = f"forked-{os.getpid()}"
    with engine(MERIDIAN_ENGINE_ID=name, CHILD="1") as (first, (*names, child)):
        try:
            with engine(MERIDIAN_ENGINE_ID=name) as (_, (*others, _)):
                assert (names, others) == ([name, name], [name, f"{name}_2"])
            first.kill()
            first.wait()
            os.kill(int(child), 0)
            with engine(MERIDIAN_ENGINE_ID=name) as (_, (*again, _)):
                assert again == [name, name]
        finally:
            os.kill(int(child), signal.SIGKILL)


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


def test_a_server_keeps_a_name_whose_lower_numbers_have_no_file_here(tmp_path: Path, host_name: str) -> None:
    """The engines that had them, in containers that share their host's network, keep their files in other folders."""
    names = [EngineName(tmp_path) for _ in range(3)]
    assert names[2].name == f"{host_name}_3"
    state = StateFile(tmp_path, names[2].file_name, "m")
    state.keep(agent_pb2.Settings(revision=1))
    wait_for(lambda: state.load() is not None, 20, "the settings to be kept")
    for name in names:
        name.release()
    assert EngineName(tmp_path).name == f"{host_name}_3"


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
