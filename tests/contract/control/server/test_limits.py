"""Limits on callers of a real server: the streams of engines are served, however many calls others make."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from meridian.v1 import fleet_pb2, freeze_pb2, policy_pb2

from meridian_control.common.errors import TooMany
from meridian_control.server.rate_limits import CallLimits, Kind, Limiter, Rate
from tests.contract.clients import Clients
from tests.contract.raw_engine import RawEngine
from tests.contract.secured import securing
from tests.contract.streams import refusal
from tests.fakes.linked import LinkedEngine, until

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------------------------------------------ without gRPC


def test_a_rate_fills_up_again() -> None:
    rate = Rate(2.0, 3, 0.0)
    assert [rate.wait_s(0.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert rate.wait_s(0.25) == pytest.approx(0.25)
    assert [rate.wait_s(100.0) for _ in range(4)] == [0, 0, 0, 0.5]


def test_places() -> None:
    limits = CallLimits(calls=2, all_calls=3, streams=1, all_streams=1, engines=3, engines_of_caller=2)
    limiter = Limiter(limits, Clock())
    held = [limiter.place(Kind.CALL, "a"), limiter.place(Kind.CALL, "a")]
    with pytest.raises(TooMany, match="2 calls by one caller are open"):
        limiter.place(Kind.CALL, "a")
    held.append(limiter.place(Kind.CALL, "b"))
    with pytest.raises(TooMany, match="3 calls are open"):
        limiter.place(Kind.CALL, "c")
    with limiter.place(Kind.STREAM, "a"), pytest.raises(TooMany, match="1 streams are open"):
        limiter.place(Kind.STREAM, "b")
    with limiter.place(Kind.ENGINE, "a"), limiter.place(Kind.ENGINE, "a"), limiter.place(Kind.ENGINE, "b"):
        with pytest.raises(TooMany, match="2 engines by one caller are open"):
            limiter.place(Kind.ENGINE, "a")
        with limiter.seat(), limiter.seat(), limiter.seat(), pytest.raises(TooMany, match="3 engines are open"):
            limiter.seat()
    held.pop(0).close()
    limiter.place(Kind.CALL, "a").close()
    for place in held:
        place.close()
    assert not limiter._taken


def test_rates_belong_to_one_caller_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meridian_control.server.rate_limits.REMEMBERED", 10)
    clock = Clock()
    limiter = Limiter(CallLimits(calls_per_s=1.0, burst=1), clock)
    limiter.place(Kind.CALL, "a").close()
    with pytest.raises(TooMany) as raised:
        limiter.place(Kind.CALL, "a")
    assert raised.value.retry_after_s == 1.0
    for number in range(100):
        clock.now += 0.05
        limiter.place(Kind.CALL, f"b{number}").close()
        assert len(limiter._rates) <= 10 + 20, "the limiter remembers the callers of the last second, and ten more"
    clock.now += 1
    limiter.place(Kind.CALL, "a").close()


# --------------------------------------------------------------------------------------------------------- with gRPC


async def test_an_engine_is_answered_in_a_flood_of_calls(tmp_path: Path) -> None:
    """Many callers never pause, and the server serves two calls at a time: it refuses the other calls and goes on
    answering the engine's reports."""
    limits = CallLimits(calls_per_s=1e9, burst=10**9, calls=2, all_calls=2)
    stop = asyncio.Event()
    served, refused = [0], [0]

    async with securing(tmp_path, limits=limits) as secured:

        async def flood(client: Clients) -> None:
            while not stop.is_set():
                try:
                    await client.policy.ExplainPolicy(policy_pb2.ExplainPolicyRequest())
                    served[0] += 1
                except grpc.aio.AioRpcError as error:
                    if error.code() is not EXHAUSTED:
                        raise
                    refused[0] += 1

        async with secured.calling("viewer") as viewer:
            flooding = [asyncio.create_task(flood(viewer)) for _ in range(32)]
            await until(lambda: served[0] and refused[0])
            with LinkedEngine([secured.target], "agent", credentials=secured.agent("agent")) as engine:
                engine.open("a")
                await engine.steps_until(engine.caps)
                answered, before = len(engine.taken), refused[0]
                await engine.steps_until(lambda: len(engine.taken) > answered and refused[0] > before)
                assert not any(task.done() for task in flooding)
            stop.set()
            await asyncio.gather(*flooding)


async def test_a_change_keeps_its_place_although_its_caller_hangs_up(tmp_path: Path) -> None:
    async with securing(tmp_path, limits=CallLimits(calls=1)) as secured, secured.calling("operator") as operator:
        with closing(sqlite3.connect(tmp_path / "meridian.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            change = operator.freeze.Thaw(freeze_pb2.ThawRequest())
            await until(lambda: secured.gate._tasks)
            change.cancel()
            # The server learns of the end before one of these calls at the latest.
            for _ in range(10):
                code, said = await refusal(operator.freeze.ListFreezes(freeze_pb2.ListFreezesRequest()))
                assert (code, said) == (EXHAUSTED, "1 calls by one caller are open")
        await until(lambda: not secured.gate._tasks)
        await operator.freeze.ListFreezes(freeze_pb2.ListFreezesRequest())


async def test_refusals_say_when_to_try_again(tmp_path: Path) -> None:
    limits = CallLimits(calls_per_s=0.5, burst=1)
    async with securing(tmp_path, limits=limits) as secured, secured.calling("viewer") as one:
        secured.gate.limiter._clock = Clock()
        await one.fleet.ListEngines(fleet_pb2.ListEnginesRequest())
        status = await rpc_status.aio.from_call(one.fleet.ListEngines(fleet_pb2.ListEnginesRequest()))
        assert status.message == "more than 0.5 calls per second by one caller"
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToMilliseconds() == 2000
        async with secured.calling("operator") as other:
            await other.fleet.ListEngines(fleet_pb2.ListEnginesRequest())


async def test_streams_and_engines_have_places_of_their_own(tmp_path: Path) -> None:
    limits = CallLimits(streams=1, all_streams=1, engines=1)
    async with securing(tmp_path, limits=limits) as secured, secured.calling("viewer") as viewer:
        first = viewer.fleet.WatchFleet(fleet_pb2.WatchFleetRequest())
        await first.read()
        code, _ = await refusal(viewer.fleet.WatchFleet(fleet_pb2.WatchFleetRequest()).read())
        assert code is EXHAUSTED
        async with secured.channel("agent") as engines:
            one = await RawEngine(engines, "agent").welcomed()
            assert await refusal(RawEngine(engines, "agent").welcomed()) == (EXHAUSTED, "1 engines are open")
            one.call.cancel()
            await until(lambda: not secured.fleet.connections)
            await RawEngine(engines, "agent").welcomed()
        first.cancel()


async def test_watches_of_the_health_service_have_places_of_their_own(tmp_path: Path) -> None:
    """Nobody needs credentials for them, so they take no place of a call that needs some."""
    limits = CallLimits(streams=1, all_streams=1)
    async with securing(tmp_path, limits=limits) as secured, secured.calling("viewer") as viewer:
        stub, asked = viewer.health, health_pb2.HealthCheckRequest()
        watching = stub.Watch(asked)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await refusal(stub.Watch(asked).read()) == (EXHAUSTED, "1 health watches by one caller are open")
        fleet = viewer.fleet.WatchFleet(fleet_pb2.WatchFleetRequest())
        await fleet.read()
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        await until(lambda: not secured.gate.limiter._taken[Kind.OPEN_STREAM, ""])
        assert (await stub.Watch(asked).read()).status == health_pb2.HealthCheckResponse.SERVING
        fleet.cancel()


async def test_who_says_nothing_loses_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meridian_control.server.agent_service.HELLO_S", 0.05)
    async with securing(tmp_path) as secured, secured.calling("agent") as agent:
        said = await refusal(agent.agent.Connect().read())
    assert said == (grpc.StatusCode.INVALID_ARGUMENT, "message must begin with hello")
