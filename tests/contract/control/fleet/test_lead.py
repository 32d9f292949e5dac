"""Replicas as rows of a real PostgreSQL: each sees the others, and never do two lead, however replicas stop and come
back.

The database's now() and the replicas' clocks show the test's own time, so that a busy machine ends no lease.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import text

from meridian_control.app.flags import advertised
from meridian_control.common.errors import NotLeading, StoreUnavailable
from meridian_control.fleet.membership import FORGET_S, LEASE_S, MARGIN_S, Replica, Replicas
from meridian_control.storage.database import Database
from tests.postgres import PASSES, Postgres, keep_time
from tests.reached import reached, reaches

T = TypeVar("T")


class World:
    """One database, the replicas on it, and the time of all of them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.now_s = 0.0
        self.numbers = count(1)
        self.databases: list[Database] = []

    async def replica(self, engines: int = 0) -> Replicas:
        if not self.databases:
            await keep_time(self.address)
            self.databases = [await Database.open(self.address)]
            async with self.databases[0].writing() as connection:
                await connection.execute(text("CREATE TABLE written (number SERIAL, token BIGINT NOT NULL)"))
        return Replicas(self.databases[0], self.named(), clock=lambda: self.now_s, engines=lambda: engines)

    def named(self) -> Replica:
        number = next(self.numbers)
        return Replica(f"r{number}", f"10.0.0.{number}:50051")

    async def passes(self, seconds: float) -> None:
        self.now_s += seconds
        async with self.databases[0].writing() as connection:
            await connection.exec_driver_sql(PASSES, (seconds,))

    async def write(self, replica: Replicas) -> bool:
        """Write as a leader does, and return whether the replica was the leader."""
        try:
            async with self.databases[0].writing() as connection:
                await replica.fence(connection)
                await connection.execute(text("INSERT INTO written (token) SELECT token FROM leader"))
        except NotLeading:
            return False
        return True

    async def rows(self, statement: str) -> list[Any]:
        async with self.databases[0].reading() as connection:
            return list((await connection.execute(text(statement))).scalars())

    async def close(self) -> None:
        for database in self.databases:
            await database.close()


@pytest.fixture
async def world(postgres_address: str) -> AsyncIterator[World]:
    made = World(postgres_address)
    yield made
    await made.close()


async def test_replicas_see_each_other_until_they_die_or_leave(world: World) -> None:
    one, two = await world.replica(engines=7), await world.replica(engines=8)
    await one.beat()
    assert not one.others
    await two.beat()
    await one.beat()
    assert [*one.others, *two.others] == [two.me, one.me]
    assert [*one.engines_of_others, *two.engines_of_others] == [8, 7]
    await world.passes(LEASE_S - 0.5)
    await one.beat()
    assert [*one.others] == [two.me], "replica two is not dead yet"
    await world.passes(1.0)
    await one.beat()
    assert not one.others
    await two.beat()
    await one.beat()
    assert [*one.others] == [two.me], "replica two was only slow"
    await two.leave()
    await one.beat()
    assert not one.others
    await two.beat()
    await world.passes(FORGET_S + 1)
    await one.beat()
    assert await world.rows("SELECT replica_id FROM replicas") == [one.me.replica_id]
    await two.beat()
    await one.beat()
    async with world.databases[0].writing() as connection:
        await connection.execute(text("DROP TABLE leader"))
    with pytest.raises(StoreUnavailable):
        await one.beat()
    assert (one.others, one.engines_of_others) == ((two.me,), ())


async def test_an_address_belongs_to_the_replica_that_was_started_there_last(world: World) -> None:
    """A replica that was killed and started again has another id and the same address, and would answer twice. Once it
    is dead for sure, nothing that the whole fleet is asked waits for it."""
    one, killed, again = await world.replica(), await world.replica(), await world.replica()
    again.me = replace(again.me, address=killed.me.address)
    for replica in (killed, one):
        await replica.beat()
    await world.passes(1.0)
    for replica in (again, one):
        await replica.beat()
    assert ([*one.others], one.silent) == ([again.me], (killed.me.replica_id,))
    assert ([*again.others], again.silent) == ([one.me], (killed.me.replica_id,))
    for seconds in (LEASE_S - 1.0, 1.0):
        await world.passes(seconds)
        for replica in (again, one):
            await replica.beat()
    assert ([*one.others], one.silent) == ([again.me], ())
    assert ([*again.others], again.silent) == ([one.me], ())
    await again.leave()
    await one.beat()
    assert one.silent == (killed.me.replica_id,), "nobody lives there"


async def test_the_lead_passes_on(world: World) -> None:
    one, two = await world.replica(), await world.replica()
    await one.beat()
    await two.beat()
    assert (one.leads(), two.leads()) == (True, False)
    assert await world.write(one)
    assert not await world.write(two)
    await world.passes(LEASE_S - MARGIN_S)
    assert not one.leads(), "a leader stops before another may begin"
    assert await world.write(one), "no other replica has led since"
    await world.passes(2 * MARGIN_S)
    await two.beat()
    assert two.leads()
    assert not await world.write(one), "the old leader was stopped between asking and writing"
    await one.beat()
    assert not one.leads()
    await two.leave()
    assert not two.leads()
    await one.beat()
    assert one.leads(), "a leader that leaves lets another one lead at once"
    assert await world.write(one)
    assert await world.rows("SELECT token FROM written ORDER BY number") == [1, 1, 3]


async def test_a_database_clock_that_is_set_back_keeps_no_dead_replica(world: World) -> None:
    """The rows of a replica that died before the database's clock was set back hold neither its place nor its lead."""
    dead, one, two = [await world.replica() for _ in range(3)]
    for replica in (dead, one, two):
        await replica.beat()
    assert dead.leads()
    async with world.databases[0].writing() as connection:
        await connection.exec_driver_sql(PASSES, (-3600.0,))
    world.now_s += LEASE_S
    await one.beat()
    assert one.leads(), "the lease of the dead replica is over"
    await two.beat()
    await one.beat()
    assert ([*one.others], [*two.others]) == ([two.me], [one.me])
    assert (one.leads(), two.leads()) == (True, False)


# Few examples would otherwise seldom have a leader that writes before its lease ends.
BEATS = st.lists(st.integers(0, 2), max_size=2, unique=True)


class LeaderMachine(RuleBasedStateMachine):
    """Three replicas that beat, write, pause, die and are replaced, at once or one after the other."""

    postgres: Postgres

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.postgres.database())
        self.runner = asyncio.Runner()
        self.replicas = [self.run(self.world.replica()) for _ in range(3)]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def beat_in_turn(self, which: list[int]) -> None:
        for number in which:
            self.run(self.replicas[number].beat())

    @rule(which=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    def beat(self, which: list[int]) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*(self.replicas[number].beat() for number in which))

        self.run(all_at_once())

    @rule(beats=st.integers(0, 2), writes=st.integers(0, 2))
    def beat_while_another_writes(self, beats: int, writes: int) -> None:
        async def at_once() -> tuple[Any, bool]:
            return await asyncio.gather(self.replicas[beats].beat(), self.world.write(self.replicas[writes]))

        self.run(at_once())

    @rule(beats=BEATS)
    def write(self, beats: list[int]) -> None:
        self.beat_in_turn(beats)
        for replica in self.replicas:
            leads = replica.leads()
            assert self.run(self.world.write(replica)) or not leads, "the leader may write"
            if leads:
                reached("a write of the leader")

    @rule(seconds=st.sampled_from([1.0, 3.0, LEASE_S + 0.5]), beats=BEATS)
    def time_passes(self, seconds: float, beats: list[int]) -> None:
        self.run(self.world.passes(seconds))
        self.beat_in_turn(beats)

    @rule(which=st.integers(0, 2))
    def dies_and_is_replaced(self, which: int) -> None:
        self.replicas[which] = self.run(self.world.replica())

    @rule(which=st.integers(0, 2))
    def leaves(self, which: int) -> None:
        self.run(self.replicas[which].leave())

    @invariant()
    def never_two(self) -> None:
        assert sum(replica.leads() for replica in self.replicas) <= 1

    @invariant()
    def writes_keep_the_order_of_leaders(self) -> None:
        tokens = self.run(self.world.rows("SELECT token FROM written ORDER BY number"))
        assert tokens == sorted(tokens)
        if len({*tokens}) > 1:
            reached("writes of two leaders")

    def teardown(self) -> None:
        self.run(self.world.passes(FORGET_S))
        for replica in self.replicas:
            self.run(replica.beat())
        assert sum(replica.leads() for replica in self.replicas) == 1, "in the end exactly one replica leads"
        self.run(self.world.close())
        self.runner.close()


@reaches("a write of the leader", "writes of two leaders")
def test_never_two_lead(postgres: Postgres) -> None:
    LeaderMachine.postgres = postgres
    run_state_machine_as_test(
        LeaderMachine, settings=settings(max_examples=5, stateful_step_count=25, derandomize=True)
    )


@pytest.mark.parametrize(
    ("said", "listen", "address"),
    [
        (None, "127.0.0.1:7", "127.0.0.1:7"),
        (None, "[::1]:7", "[::1]:7"),
        ("pod-3.meridian:9", ":7", "pod-3.meridian:9"),
        ("[fd00::3]:9", ":7", "[fd00::3]:9"),
    ],
)
def test_the_address_others_are_told(said: str | None, listen: str, address: str) -> None:
    assert advertised(said, listen) == address


def test_all_hosts_are_not_told_as_an_address() -> None:
    host, _, port = advertised(None, ":50051").rpartition(":")
    assert (host not in ("", "0.0.0.0", "[::]"), port) == (True, "50051")


@pytest.mark.parametrize("said", ["pod", ":9", "pod:0"])
def test_an_address_that_cannot_be_told(said: str) -> None:
    with pytest.raises(ValueError, match=r"--advertise.* must be host:port"):
        advertised(said, ":7")


def test_a_socket_is_no_address_for_other_hosts() -> None:
    with pytest.raises(ValueError, match="cannot reach --listen unix:/s: give --advertise"):
        advertised(None, "unix:/s")
