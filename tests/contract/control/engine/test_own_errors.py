"""Errors of the control plane itself, raised on purpose in a session's own code: they are no agent's fault, and end one
stream only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.order.stream import Order
from meridian_control.engine.freeze_state import Freeze, FreezeState, Match
from meridian_control.engine.report_intake import Intake
from meridian_control.engine.settings_delivery import Delivery
from tests.contract.raw_engine import RawEngine
from tests.contract.streams import Control, failure
from tests.fakes.linked import until
from tests.fakes.tables import policy

SICK = "sick"
STEP = agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=1, steps=1))
SNAPSHOT = agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=1))
REPORT = (Intake, "take_report", STEP)
# Errors that could be taken for those of a caller.
OURS = (ValueError, KeyError)


def breaking(original: Callable[..., Any], error: type[Exception], is_sick: Callable[[Any], bool]) -> Any:
    """Return a method of our own code that has a bug for one engine."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_sick(self):
            raise error("a bug of ours")
        return original(self, *args, **kwargs)

    return method


def only_first() -> Callable[[Any], bool]:
    """Return whether an object is the first one that was asked about."""
    seen: list[Any] = []

    def is_first(owner: Any) -> bool:
        seen.append(owner)
        return owner is seen[0]

    return is_first


@pytest.mark.parametrize(
    ("bug", "error"),
    [
        *((REPORT, error) for error in (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError)),
        *((bug, error) for bug in ((Intake, "begin_anew", SNAPSHOT), (Order, "reported", STEP)) for error in OURS),
    ],
)
async def test_a_bug_of_ours_is_no_fault_of_the_agent(
    control: Control,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bug: tuple[type, str, agent_pb2.ConnectRequest],
    error: type[Exception],
) -> None:
    owner, name, message = bug
    async with grpc.aio.insecure_channel(control.target) as channel:
        well, sick = [await RawEngine(channel, engine_id).welcomed() for engine_id in ("well", SICK)]
        monkeypatch.setattr(owner, name, breaking(getattr(owner, name), error, only_first()))
        await sick.call.write(message)
        code, text = await failure(sick.call)
        assert code is grpc.StatusCode.INTERNAL
        assert error.__name__ in text
        assert "log" in text
        await well.report(opened=[agent_pb2.RequestOpened(slot=0, request_id="a")])
        await until(lambda: control.names() == ["a"])
        assert control.fleet.stream_ends == {"internal": 1}
        assert control.parts.gate.faults.counts == {}
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert f"engine {SICK}" in str(getattr(record.exc_info[1], "__notes__", ""))


@pytest.mark.parametrize("what", ["policy", "freeze"])
async def test_a_bug_while_all_engines_are_served_ends_one_stream(
    control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A changed policy and a freeze still reach the other engines."""
    owner, name = (Delivery, "offer") if what == "policy" else (FreezeState, "set_freezes")
    async with grpc.aio.insecure_channel(control.target) as channel:
        engines = {name: await RawEngine(channel, name).welcomed() for name in ("first", "second")}
        monkeypatch.setattr(owner, name, breaking(getattr(owner, name), ValueError, only_first()))
        if what == "policy":
            await control.set_policy(policy(scheduler={"max_think_tokens": 601}))
        else:
            now = control.fleet.clock()
            control.fleet.freezes.renew((Freeze(1, Match(), "test", "maintenance", now, now + timedelta(hours=1)),))
        await until(lambda: len(control.fleet.connections) == 1)
        (left,) = control.fleet.connections
        served = engines.pop(left.session.hello.engine_id).call
        (failed,) = engines.values()
        code, _ = await failure(failed.call)
        assert code is grpc.StatusCode.INTERNAL
        wanted = "settings" if what == "policy" else "freeze"
        async with asyncio.timeout(60):
            while not (response := await served.read()).HasField(wanted) or (
                what == "policy" and response.settings.revision != control.fleet.revision
            ):
                pass
    assert any("a bug of ours" in str(record.exc_info[1]) for record in caplog.records if record.exc_info)
