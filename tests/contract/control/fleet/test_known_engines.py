"""A control plane that is started again names the engines that were lost before or meanwhile."""

from __future__ import annotations

import json
from datetime import timedelta

import grpc
import pytest
from sqlalchemy import select

from meridian_control.common.engine_words import condition
from meridian_control.fleet.departed import FORGET_AFTER_S
from meridian_control.storage.tables import known_engines
from tests.contract.ctl import FAILED, OK, ctl
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control
from tests.fakes.fleets import engines_of
from tests.fakes.linked import until


def lost(control: Control) -> list[str]:
    return [engine.engine_id for engine in engines_of(control.fleet) if engine.lost]


async def test_engines_that_are_lost_while_it_is_away_are_named(control: Control) -> None:
    async with grpc.aio.insecure_channel(control.target) as channel:
        engines = [await RawEngine(channel, name).connect() for name in ("stays", "dies", "ends")]
        await engines[-1].call.done_writing()
        await until(lambda: not control.connected("ends"))
        await control.parts.known.store()
        await control.kill()
    await control.start()
    assert lost(control) == ["dies", "stays"]
    async with grpc.aio.insecure_channel(control.target) as channel:
        _stays = await RawEngine(channel, "stays").connect()
        await until(lambda: control.engine("stays").acked_revision == control.fleet.revision)
        assert lost(control) == ["dies"]
        waited = await ctl(control, "wait", "--timeout", "0")
        assert waited.exit_code == FAILED
        assert "dies is lost" in waited.stderr
        assert (await ctl(control, "wait", "--timeout", "60", "--engines", "1")).exit_code == OK
        # Nothing is forgotten if the control plane ends again.
        await control.parts.known.store()
        await control.kill()
    await control.start()
    assert lost(control) == ["dies", "stays"]


async def test_an_earlier_build_reads_what_is_kept(control: Control) -> None:
    """People may go back to it on the same file. Its rows have four places, and come without revisions."""
    async with grpc.aio.insecure_channel(control.target) as channel:
        _engine = await RawEngine(channel, "e").connect()
        await until(lambda: control.engine("e").acked_revision == control.fleet.revision)
        await control.parts.known.store()
        async with control.parts.known._database.reading() as connection:
            saved = json.loads(str(await connection.scalar(select(known_engines.c.engines))))
        assert [(engine_id, ended) for engine_id, _, _, ended in saved["engines"]] == [("e", "")]
        revision = control.fleet.revision
        await control.kill()
    await control.start()
    assert [engine.acked_revision for engine in engines_of(control.fleet)] == [revision]
    earlier = {name: saved[name] for name in ("seen_at", "engines")}
    async with control.parts.known._database.writing(tell=False) as connection:
        await connection.execute(known_engines.update().values(engines=json.dumps(earlier)))
    await control.kill()
    await control.start()
    assert [engine.acked_revision for engine in engines_of(control.fleet)] == [0]


@pytest.mark.parametrize(
    ("away_s", "named", "heard"),
    [(FORGET_AFTER_S - 5, ["e"], ["last heard 9 min ago"]), (FORGET_AFTER_S + 5, [], [])],
)
async def test_engines_of_long_ago_are_forgotten(
    control: Control, away_s: float, named: list[str], heard: list[str]
) -> None:
    async with grpc.aio.insecure_channel(control.target) as channel:
        _engine = await RawEngine(channel, "e").connect()
        known, clock = control.parts.known, control.fleet.clock
        known._fleet.clock = lambda: clock() - timedelta(seconds=away_s)
        await known.store()
        await control.kill()
    await control.start()
    assert lost(control) == named
    shown = [condition(engine, control.fleet.clock()) for engine in engines_of(control.fleet)]
    assert [row.cause.partition(",")[0] for row in shown] == heard
