"""An upgrade of the control plane and its rollback, with real engines of both versions, a rollout under way, and
clients that ask all the time.

On SQLite the one replica restarts; on PostgreSQL the new replica starts before the old one stops.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import ParseDict
from meridian.v1 import agent_pb2, fleet_pb2, freeze_pb2, freeze_pb2_grpc, policy_pb2, policy_pb2_grpc
from meridian.v1 import rollout_pb2 as rollouts
from meridian.v1.rollout_pb2_grpc import RolloutServiceStub

from tests.data import maze
from tests.processes import RPC_S, free_port, wait_for
from tests.upgrade.versions import PREVIOUS, Engine, Plane, Version, current, previous

pytestmark = pytest.mark.long
# Of these prompts the model thinks longer than any cap of the test.
PROMPTS = maze.prompts(40, seed=11)
# Largest share of requests in the control group, which no cap below the default shortens; 0.02 is meant.
CONTROL = 0.1
# Labels of the engines; the first step of each rollout covers the engine with the older agent.
POOLS = {"older": "first", "newer": "second"}
STEPS = [{"engine_labels": {"pool": "first"}, "bake_s": 86_400.0}, {"percent": 100.0, "bake_s": 1.0}]


@pytest.fixture(scope="module")
def this(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return current(tmp_path_factory.mktemp("current"))


@pytest.fixture(scope="module", params=PREVIOUS)
def versions(
    this: Version, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Version, Version]:
    """Return each previous version in turn, and this one; fail if this clone cannot build the previous one."""
    older = previous(request.param, tmp_path_factory.mktemp("previous"))
    assert isinstance(older, Version), older
    assert older.number == request.param
    return older, this


class Load:
    """Clients that ask each engine one question after the other. tokens: the thinking tokens of each answer."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in engines}
        self.errors: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(engine,)) for engine in engines.values()]
        for thread in self._threads:
            thread.start()

    def _ask(self, engine: Engine) -> None:
        number = 0
        while not self._over.is_set():
            try:
                self.tokens[engine.name].append(engine.think(PROMPTS[number % len(PROMPTS)]))
            except httpx.HTTPError as error:
                self.errors.append(f"{engine.name}: {error!r}")
            number += 1

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


class Fleet:
    """The control plane that runs now, and the engines of both versions."""

    def __init__(self, folder: Path, versions: tuple[Version, Version], store: str, shared: bool) -> None:
        self._folder, self._store, self._shared = folder, store, shared
        self._ports = [free_port(), free_port()]
        self.older, self.newer = versions
        self.plane = Plane(self.older, folder, self._ports[0], store)
        targets = [f"127.0.0.1:{port}" for port in self._ports]
        pairs = zip(POOLS.items(), versions, strict=True)
        self.engines = {name: Engine(version, folder, name, pool, targets) for (name, pool), version in pairs}

    def replace(self, version: Version) -> None:
        """Put the control plane of another version in the place of the one that runs."""
        if self._shared:
            self._ports.reverse()
            before, self.plane = self.plane, Plane(version, self._folder, self._ports[0], self._store)
            before.process.stop()
        else:
            self.plane.process.stop()
            self.plane = Plane(version, self._folder, self._ports[0], self._store)

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.process.stop()
        self.plane.process.stop()

    def obeyed(self, older: int, newer: int) -> None:
        """Wait until the engines are governed under these revisions."""

        def governed() -> bool:
            found = {e.engine_id: e for e in self.plane.engines() if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED}
            ready = all(e.agent_state == agent_pb2.AGENT_STATE_READY and not e.fault for e in found.values())
            return ready and {name: e.acked_revision for name, e in found.items()} == {"older": older, "newer": newer}

        wait_for(governed, 120, f"the engines to obey revisions {older} and {newer}")

    def capped(self, older: int, newer: int) -> None:
        """Assert where the thinking of most requests ends on each engine: nothing shortens the control group."""
        ends = {name: [engine.think(prompt) for prompt in PROMPTS[:5]] for name, engine in self.engines.items()}
        found = {name: statistics.mode(tokens) for name, tokens in ends.items()}
        assert found == {"older": older, "newer": newer}, ends

    def freeze_elsewhere(self) -> None:
        """Freeze an engine that does not exist."""
        request = freeze_pb2.FreezeRequest(match=freeze_pb2.FreezeMatch(engine_ids=["elsewhere"]), reason="kept")
        request.duration.FromSeconds(3600)
        with self.plane.channel() as channel:
            freeze_pb2_grpc.FreezeServiceStub(channel).Freeze(request, timeout=RPC_S)

    def start_rollout(self, cap: int) -> None:
        policy, plan = {"scheduler": {"max_think_tokens": cap, "min_think_tokens": 0}}, {"step": STEPS}
        request = ParseDict({"policy": policy, "plan": plan}, rollouts.StartRolloutRequest())
        with self.plane.channel() as channel:
            RolloutServiceStub(channel).StartRollout(request, timeout=RPC_S)

    def abort_rollout(self) -> None:
        with self.plane.channel() as channel:
            RolloutServiceStub(channel).AbortRollout(rollouts.AbortRolloutRequest(), timeout=RPC_S)

    def kept(self) -> dict[str, Any]:
        """Return what an upgrade must keep: the policy's history, the rollouts with their progress, and freezes."""
        with self.plane.channel() as channel:
            policies = policy_pb2_grpc.PolicyServiceStub(channel)
            history = policies.ListRevisions(policy_pb2.ListRevisionsRequest(page_size=100), timeout=RPC_S).revisions
            rolled = RolloutServiceStub(channel).ListRollouts(rollouts.ListRolloutsRequest(), timeout=RPC_S).rollouts
            stub = freeze_pb2_grpc.FreezeServiceStub(channel)
            frozen = stub.ListFreezes(freeze_pb2.ListFreezesRequest(), timeout=RPC_S).freezes
        return {
            "revisions": [(r.revision, r.etag, r.author, r.reason, r.create_time.ToNanoseconds()) for r in history],
            "rollouts": [(r.rollout_id, r.state, r.step, r.stable_revision, r.candidate_revision) for r in rolled],
            "freezes": [(f.freeze_id, f.reason, f.end_time.ToNanoseconds()) for f in frozen],
        }

    def commands_of(self, version: Version) -> None:
        """Assert that this version's meridianctl reads the state of the control plane that runs."""
        for command in ("engines", "policy history", "rollout status", "rollout list", "freezes", "audit"):
            done = version.meridianctl(self.plane.target, *command.split())
            assert done.returncode == 0, (version.number, command, done.stderr[-2000:])


def cap(fleet: Fleet, tokens: int, **more: Any) -> None:
    fleet.plane.set_policy({"scheduler": {"max_think_tokens": tokens, "min_think_tokens": 0}, **more})


def moved(fleet: Fleet, version: Version, older: int, newer: int) -> None:
    """Replace the control plane during a rollout, and assert that nothing of it is lost."""
    before, began_s = fleet.kept(), time.monotonic()
    fleet.replace(version)
    fleet.obeyed(older, newer)
    print(f"control plane {version.number} governs both engines {time.monotonic() - began_s:.1f} s after the order")
    assert fleet.kept() == before
    fleet.commands_of(fleet.older)
    fleet.commands_of(fleet.newer)


def test_the_contract_adds_to_the_previous_one_and_reserves_what_it_removes(versions: tuple[Version, Version]) -> None:
    older, newer = versions
    assert older.number != newer.number
    command = [str(Path(sys.executable).with_name("buf")), "breaking", "proto", "--against", str(older.tree / "proto")]
    done = subprocess.run(command, cwd=newer.tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("shared", [False, True], ids=["sqlite", "postgresql"])
@pytest.mark.timeout(3000)
def test_upgrade_and_back(
    tmp_path: Path, versions: tuple[Version, Version], shared: bool, request: pytest.FixtureRequest
) -> None:
    """Both control planes govern both agents, and every answer obeys a cap that was in force."""
    store = request.getfixturevalue("postgres").database(empty=True) if shared else str(tmp_path / "policy.db")
    fleet = Fleet(tmp_path, versions, store, shared)
    try:
        for engine in fleet.engines.values():
            wait_for(engine.serving, 180, f"{engine.name} to serve")
        cap(fleet, 5)
        fleet.obeyed(2, 2)
        numbers = {e.engine_id: e.agent_version for e in fleet.plane.engines()}
        assert numbers == {"older": fleet.older.number, "newer": fleet.newer.number}
        fleet.freeze_elsewhere()
        with asking(fleet.engines) as load:
            fleet.start_rollout(6)
            fleet.obeyed(3, 2)
            moved(fleet, fleet.newer, 3, 2)
            fleet.capped(6, 5)
            fleet.abort_rollout()
            fleet.obeyed(4, 4)
            # The older version cannot read this policy, but can read the next one.
            cap(fleet, 5, loop={"shadow": False})
            cap(fleet, 7)
            fleet.obeyed(6, 6)
            fleet.start_rollout(8)
            fleet.obeyed(7, 6)
            moved(fleet, fleet.older, 7, 6)
            fleet.capped(8, 7)
            fleet.abort_rollout()
            fleet.obeyed(8, 8)
            fleet.capped(7, 7)
        assert not load.errors
        for name, caps in (("older", {5, 6, 7, 8}), ("newer", {5, 7})):
            others = [tokens for tokens in load.tokens[name] if tokens not in caps]
            assert len(others) <= CONTROL * len(load.tokens[name]), (name, others)
        print({name: len(tokens) for name, tokens in load.tokens.items()}, "answers, none lost")
        wait_for(lambda: all(settled(e) for e in fleet.plane.engines()), 30, "every decision to have its outcome")
    finally:
        fleet.stop()


def settled(engine: fleet_pb2.Engine) -> bool:
    return engine.running == 0 and sum(engine.decisions.values()) == sum(engine.outcomes.values())


@contextmanager
def asking(engines: dict[str, Engine]) -> Iterator[Load]:
    load = Load(engines)
    try:
        yield load
    finally:
        load.end()
