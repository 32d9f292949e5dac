"""Policy store and delivery as one state machine, with real servers and the agents' real links.

Writers write at once, ACKs get lost, and engines and replicas reconnect, die or hear of no changes for a while. Still
revisions never go backwards on an engine, no acknowledged revision is lost, and in the end every engine has the newest
policy.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from meridian.v1 import agent_pb2, policy_pb2

from meridian_control.policy.model import Policy
from meridian_control.policy.store import EMPTY_ETAG, PolicyStore
from meridian_control.storage.database import Database
from tests.contract.clients import OWN_CONNECTION, calling
from tests.contract.control.fleet.test_replicas import leased
from tests.fakes.control import control_plane, kill, utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.postgres import Postgres
from tests.processes import free_port

T = TypeVar("T")
ENGINES = 3
# Time that servers and links get between two rules.
PAUSE_S = 0.02
CONVERGED_S = 20.0


class Engine(LinkedEngine):
    """An engine that lists in `applied` the revisions that it put in force, in order. The engine can refuse settings,
    and can lose its stream instead of sending its next ACK."""

    def __init__(self, targets: list[str], name: str, rng: random.Random) -> None:
        super().__init__(targets, name, shuffle=rng.shuffle)
        self.applied: list[int] = []
        self.loses_ack = False
        self.asked_again: list[int] = []

    def _prepare(self, settings: agent_pb2.Settings) -> None:
        if settings.revision in self.link.refused:
            self.asked_again.append(settings.revision)
        if self.loses_ack:
            self.loses_ack = False
            self.link.restart()
        super()._prepare(settings)
        self.applied.append(settings.revision)


class Replica:
    """A control plane in this process, with a port of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = free_port()
        self.alive = False

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.database = await Database.open(self.address)
        self.store = PolicyStore(self.database)
        if (current := await self.store.current()) is None:
            current = await self.store.append(Policy(), etag=EMPTY_ETAG, author="", reason="", now=utc_now())
        self.parts = control_plane(self.store, replica_id=self.target)
        self.fleet = self.parts.whole.fleet
        self.fleet.set_policy(current)
        await self.parts.look()
        await self.parts.server.start(self.target)
        self.alive = True
        self.hear()

    def hear(self) -> None:
        self.following: asyncio.Task[None] = asyncio.create_task(self.parts.rollouts.follow())

    async def die(self) -> None:
        """Stop the replica without telling any engine or replica."""
        self.alive = False
        self.following.cancel()
        await kill(self.parts)
        await self.database.close()


class DeliveryMachine(RuleBasedStateMachine):
    """The state machine with one replica on SQLite."""

    address: str
    replica_count = 1

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.number = 0
        # The number in the policy of each acknowledged revision.
        self.acknowledged: dict[int, int] = {}
        self.replicas = [Replica(self.address) for _ in range(self.replica_count)]
        for replica in self.replicas:
            self.run(replica.start())
        rng = random.Random(0)
        targets = [replica.target for replica in self.replicas]
        self.engines = [Engine(targets, f"engine-{number}", rng) for number in range(ENGINES)]
        for engine in self.engines:
            engine.link.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        async def and_a_little_longer() -> T:
            found = await coroutine
            await asyncio.sleep(PAUSE_S)
            return found

        return self.runner.run(and_a_little_longer())

    async def _write(self, replica: Replica) -> None:
        self.number += 1
        lease_ms, name = 1000 + self.number, f"{self.number}"
        message = policy_pb2.UpdatePolicyRequest(policy=leased(lease_ms), request_id=name)
        with suppress(grpc.aio.AioRpcError):
            async with calling(replica.target, OWN_CONNECTION) as clients:
                answer = await clients.policy.UpdatePolicy(message, timeout=120)
                assert self.acknowledged.setdefault(answer.revision.revision, lease_ms) == lease_ms

    async def _writes(self, which: list[int]) -> None:
        await asyncio.gather(*(self._write(self.replicas[n % len(self.replicas)]) for n in which))

    @rule(which=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def writers_at_once(self, which: list[int]) -> None:
        self.run(self._writes(which))

    @rule(seconds=st.sampled_from([0.05, 0.15]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(which=st.integers(0, ENGINES - 1))
    def an_ack_gets_lost(self, which: int) -> None:
        self.engines[which].loses_ack = True

    @rule(which=st.integers(0, ENGINES - 1))
    def an_engine_connects_anew(self, which: int) -> None:
        self.engines[which].link.restart()
        self.run(asyncio.sleep(0))

    @rule(which=st.integers(0, ENGINES - 1), error=st.sampled_from(["", "cannot be"]))
    def an_engine_refuses_or_does_not(self, which: int, error: str) -> None:
        self.engines[which].refusal = error

    @rule(which=st.integers(0, 1))
    def a_replica_dies_or_comes_back(self, which: int) -> None:
        replica = self.replicas[which % len(self.replicas)]
        self.run(replica.die() if replica.alive else replica.start())

    @invariant()
    def never_backwards(self) -> None:
        for engine in self.engines:
            applied = list(engine.applied)
            assert applied == sorted(applied)

    @invariant()
    def never_again_what_was_refused(self) -> None:
        assert [engine.asked_again for engine in self.engines] == [[]] * ENGINES

    @invariant()
    def an_ack_means_applied(self) -> None:
        for replica in self.replicas:
            if replica.alive:
                for connection in replica.fleet.connections:
                    session = connection.session
                    (engine,) = [e for e in self.engines if e.engine_id == session.hello.engine_id]
                    assert session.acked_revision in (0, *engine.applied)

    def teardown(self) -> None:
        try:
            self.run(self._in_the_end())
        finally:
            for engine in self.engines:
                engine.link.stop()
            for replica in self.replicas:
                if replica.alive:
                    self.run(replica.die())
            self.runner.close()

    async def _in_the_end(self) -> None:
        for engine in self.engines:
            engine.refusal, engine.loses_ack = "", False
        for replica in self.replicas:
            if not replica.alive:
                await replica.start()
            elif replica.following.done():
                replica.hear()
        # Write a revision that no engine has refused.
        await self._write(self.replicas[0])
        while 1000 + self.number not in self.acknowledged.values():
            await self._write(self.replicas[0])
        newest = max(self.acknowledged)
        try:
            await until(lambda: all(engine.applied[-1:] == [newest] for engine in self.engines), CONVERGED_S)
            await until(lambda: self._acked() == [newest] * ENGINES, CONVERGED_S)
        except AssertionError:
            raise AssertionError(f"revision {newest} did not reach all:\n{self._described()}") from None
        self.never_backwards()
        for revision, lease_ms in self.acknowledged.items():
            assert (await self.replicas[0].store.get(revision)).policy.fallback.lease_ms == lease_ms
        history = await self.replicas[-1].store.history(10_000)
        assert [header.revision for header in history] == list(range(newest, 0, -1))

    def _acked(self) -> list[int]:
        return [c.session.acked_revision for r in self.replicas for c in r.fleet.connections]

    def _described(self) -> str:
        lines = [f"{e.engine_id} applied {e.applied}, connected: {e.link.lease.connected}" for e in self.engines]
        for replica in self.replicas:
            known = replica.fleet.revision or None
            lines.append(f"replica {replica.target} knows {known}, follows: {replica.following!r}")
            for session in (connection.session for connection in replica.fleet.connections):
                has = (session.hello.revision, session.revision, session.acked_revision, session.nack_error)
                lines.append(f"  {session.hello.engine_id}: said, given, acked, error: {has}")
        return "\n".join(lines)


class ReplicatedMachine(DeliveryMachine):
    """The state machine with two replicas on PostgreSQL."""

    postgres: Postgres
    replica_count = 2

    def __init__(self) -> None:
        type(self).address = self.postgres.database()
        self.kills = 0
        super().__init__()

    @rule(which=st.integers(0, 1))
    def a_replica_is_deaf_or_hears_again(self, which: int) -> None:
        replica = self.replicas[which]
        if not replica.alive:
            return

        async def change() -> None:
            if replica.following.done():
                replica.hear()
            else:
                replica.following.cancel()

        self.run(change())

    @precondition(lambda self: all(replica.alive for replica in self.replicas))
    @rule(which=st.integers(0, 1))
    def engines_move_while_a_replica_is_deaf(self, which: int) -> None:
        async def change() -> None:
            self.replicas[which].following.cancel()
            await self._writes([1 - which])
            await asyncio.sleep(0.15)
            for engine in self.engines:
                engine.link.restart()
            await asyncio.sleep(0.15)

        self.run(change())

    @precondition(lambda self: self.kills < 1)
    @rule(which=st.lists(st.integers(0, 1), min_size=1, max_size=3), delay_ms=st.integers(0, 20))
    def postgresql_is_killed(self, which: list[int], delay_ms: int) -> None:
        self.kills += 1

        async def killed_meanwhile() -> None:
            writing = asyncio.create_task(self._writes(which))
            await asyncio.sleep(delay_ms / 1000)
            self.postgres.kill()
            await writing

        self.run(killed_meanwhile())
        self.postgres.start()


@pytest.fixture
def quick() -> settings:
    return settings(
        max_examples=6,
        stateful_step_count=15,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        # Hypothesis does not shrink an example that fails, because each failure takes CONVERGED_S.
        phases=[Phase.generate],
    )


# A replica or PostgreSQL that is killed while a connection is being made leaves the connection's socket to the garbage
# collector, which closes it here and not in a later test.
@pytest.mark.filterwarnings("ignore:unclosed (transport|<socket):ResourceWarning")
def test_delivery_keeps_its_promises_on_postgresql(quick: settings, postgres: Postgres) -> None:
    ReplicatedMachine.postgres = postgres
    run_state_machine_as_test(ReplicatedMachine, settings=quick)
    gc.collect()
