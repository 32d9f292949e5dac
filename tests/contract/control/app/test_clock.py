"""A whole control plane whose machine's clock is set back or forward while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from meridian.v1 import audit_pb2, freeze_pb2, policy_pb2

from meridian_control.app import assembly
from meridian_control.app.flags import parser
from meridian_control.journal.log import DecisionLog
from meridian_control.storage import database
from tests.contract.clients import calling
from tests.contract.control.fleet.test_freeze import order
from tests.fakes.linked import LinkedEngine, until
from tests.postgres import Postgres

REAL = datetime


class Wall(datetime):
    """The machine's time of day, which a test may set."""

    jump = timedelta()

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return REAL.now(tz) + cls.jump


@pytest.fixture(autouse=True)
def _wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wall, "jump", timedelta())
    for module in (assembly, database):
        monkeypatch.setattr(module, "datetime", Wall)


@asynccontextmanager
async def served(store: str) -> AsyncIterator[tuple[assembly.Parts, str]]:
    """Yield a control plane as `meridian-control` assembles it, and its address."""
    args = parser().parse_args(["--store", store, "--advertise", "127.0.0.1:1"])
    async with AsyncExitStack() as ending:
        parts = await assembly.assemble(args, DecisionLog(), ending, [])
        port = await parts.server.start("127.0.0.1:0")
        yield parts, f"127.0.0.1:{port}"
        await parts.server.stop(0)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "m.db") if request.param == "sqlite" else request.getfixturevalue("postgres").database()


def left_s(engine: LinkedEngine) -> float:
    return engine.link.lease._frozen_until - engine.link.lease.clock()


@pytest.mark.parametrize("jump", [timedelta(hours=-1), timedelta(hours=1), timedelta(days=-400)], ids=str)
async def test_a_freeze_lasts_as_long_as_it_was_asked_for(store: str, jump: timedelta) -> None:
    """Engines that were connected, that reconnect and that are new are all frozen for what is left of the freeze."""
    async with served(store) as (parts, target), calling(target) as clients:
        with LinkedEngine([target], "old") as old:
            await until(lambda: parts.whole.fleet.connections)
            made = (await clients.freeze.Freeze(order())).freeze
            await until(old.link.lease.frozen)
            Wall.jump = jump
            before = set(parts.whole.fleet.connections)
            old.link.restart()
            await until(lambda: set(parts.whole.fleet.connections) - before)
            with LinkedEngine([target], "new") as new:
                await until(new.link.lease.frozen)
                for engine in (old, new):
                    assert 0 < left_s(engine) <= 600
                (shown,) = (await clients.freeze.ListFreezes(freeze_pb2.ListFreezesRequest())).freezes
                assert shown == made
                ended = (await clients.freeze.Thaw(freeze_pb2.ThawRequest())).freezes
                assert [freeze.freeze_id for freeze in ended] == [1]
                await until(lambda: not (old.link.lease.frozen() or new.link.lease.frozen()))


async def test_changes_are_listed_in_the_order_in_which_they_were_made(store: str) -> None:
    jumps = [timedelta(), timedelta(hours=-1), timedelta(hours=2), timedelta(days=-3), timedelta()]
    async with served(store) as (_, target), calling(target) as clients:
        for number, jump in enumerate(jumps):
            Wall.jump = jump
            update = policy_pb2.UpdatePolicyRequest(policy=policy_pb2.Policy(), reason=str(number))
            await clients.policy.UpdatePolicy(update)
        records = (await clients.audit.ListAudit(audit_pb2.ListAuditRequest())).records
        assert [record.reason for record in records] == ["4", "3", "2", "1", "0"]
        listed = (await clients.policy.ListRevisions(policy_pb2.ListRevisionsRequest())).revisions
        assert [revision.revision for revision in listed] == [6, 5, 4, 3, 2, 1]
        assert records[2].time.ToDatetime(UTC) > REAL.now(UTC) + timedelta(hours=1), "a record shows the time of day"


async def test_times_of_the_fleet_follow_no_jump(store: str) -> None:
    async with served(store) as (parts, _):
        before = parts.whole.fleet.clock()
        for jump in (timedelta(hours=-1), timedelta(hours=1)):
            Wall.jump = jump
            assert before <= parts.whole.fleet.clock() < before + timedelta(minutes=10)


@pytest.mark.parametrize("apart", [timedelta(hours=-1), timedelta(hours=1)], ids=str)
async def test_replicas_take_the_time_from_their_database(postgres: Postgres, apart: timedelta) -> None:
    """The clocks of two replicas' machines are an hour apart, which no freeze shows: through either replica it is in
    force on both, and for no longer than it was asked for."""
    # No database can be created within the event loop of the test.
    address = await asyncio.to_thread(postgres.database)
    async with served(address) as (one, _):
        Wall.jump = apart
        async with served(address) as (other, target), calling(target) as clients:
            assert abs(one.whole.fleet.clock() - other.whole.fleet.clock()) < timedelta(minutes=5)
            await clients.freeze.Freeze(order())
            for replica in (one, other):
                await replica.freezes.look()
                (freeze,) = replica.whole.fleet.freezes.in_force
                left = freeze.remaining(replica.whole.fleet.clock())
                assert timedelta() < left <= timedelta(seconds=600)


@pytest.mark.parametrize("apart", [timedelta(minutes=-15), timedelta(minutes=15)], ids=str)
async def test_replicas_agree_on_freezes_though_the_clock_of_one_has_drifted(
    postgres: Postgres, apart: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of a replica stood still for a quarter of an hour, or the database's clock was set back by that
    after the replica had started. A freeze through either replica is in force on both, and for no longer than it was
    asked for, also once the database's clock is set forward."""
    address = await asyncio.to_thread(postgres.database)
    async with served(address) as (drifted, target), served(address) as (other, other_target):
        assert isinstance(drifted.whole.fleet.clock, assembly.SteadyClock)
        drifted.whole.fleet.clock._began += apart
        replicas = drifted, other

        async def in_force() -> list[list[int]]:
            """Return the ids of the freezes that are in force on each replica."""
            for replica in replicas:
                await replica.freezes.look()
            fleets = [replica.whole.fleet for replica in replicas]
            left = [freeze.remaining(fleet.clock()) for fleet in fleets for freeze in fleet.freezes.in_force]
            assert all(timedelta() < each <= timedelta(seconds=600) for each in left)
            return [[freeze.freeze_id for freeze in fleet.freezes.in_force] for fleet in fleets]

        for asked, ids in ((target, [1]), (other_target, [2, 1])):
            async with calling(asked) as clients:
                await clients.freeze.Freeze(order())
            assert await in_force() == [ids, ids]
        server_now = database.Database.now

        async def set_forward(shared: database.Database) -> datetime:
            return await server_now(shared) + timedelta(hours=1)

        monkeypatch.setattr(database.Database, "now", set_forward)
        assert await in_force() == [[2, 1], [2, 1]]
        async with calling(target) as clients:
            await clients.freeze.Freeze(order())
            assert await in_force() == [[3, 2, 1], [3, 2, 1]]
            await clients.freeze.Thaw(freeze_pb2.ThawRequest())
        assert await in_force() == [[], []]
