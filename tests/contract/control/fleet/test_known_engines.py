"""A control plane that is started again names the engines that were lost before or meanwhile."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.fleet.departed import FORGET_AFTER_S
from tests.contract.ctl import FAILED, OK, run
from tests.contract.streams import call_to
from tests.fakes.agent import hello

if TYPE_CHECKING:
    from tests.contract.streams import Control


async def joined(call: Any, engine_id: str) -> None:
    await call.write(agent_pb2.ConnectRequest(hello=hello(engine_id)))
    while not (response := await call.read()).HasField("settings"):
        pass
    status = agent_pb2.SettingsStatus(nonce=response.settings.nonce, revision=response.settings.revision)
    await call.write(agent_pb2.ConnectRequest(settings_status=status))


async def until_left(control: Control, engine_id: str) -> None:
    async with asyncio.timeout(60):
        while control.connected(engine_id):
            await asyncio.sleep(0.01)


def lost(control: Control) -> list[str]:
    return [engine.engine_id for engine in control.fleet.views.engines() if engine.lost]


async def test_engines_that_are_lost_while_it_is_away_are_named(control: Control) -> None:
    async with call_to(control.target) as stays, call_to(control.target) as dies, call_to(control.target) as ends:
        for call, engine_id in ((stays, "stays"), (dies, "dies"), (ends, "ends")):
            await joined(call, engine_id)
        await ends.done_writing()
        await until_left(control, "ends")
        await control.parts.known.store()
        await control.kill()
    await control.start()
    assert lost(control) == ["dies", "stays"]
    async with call_to(control.target) as stays:
        await joined(stays, "stays")
        assert lost(control) == ["dies"]
        waited = await run("wait", "--timeout", "0", server=control.target)
        assert waited.exit_code == FAILED
        assert "dies is lost" in waited.stderr
        assert (await run("wait", "--timeout", "60", "--engines", "1", server=control.target)).exit_code == OK
        # Nothing is forgotten if the control plane ends again.
        await control.parts.known.store()
        await control.kill()
    await control.start()
    assert lost(control) == ["dies", "stays"]


@pytest.mark.parametrize(("away_s", "named"), [(FORGET_AFTER_S - 5, ["e"]), (FORGET_AFTER_S + 5, [])])
async def test_engines_of_long_ago_are_forgotten(control: Control, away_s: float, named: list[str]) -> None:
    async with call_to(control.target) as call:
        await joined(call, "e")
        known, clock = control.parts.known, control.fleet.clock
        known._fleet.clock = lambda: clock() - timedelta(seconds=away_s)
        await known.store()
        await control.kill()
    await control.start()
    assert lost(control) == named
