"""Pressure over a real gRPC server: slow answers shorten thinking on their engine only, faster ones restore it, and a
recording replays to the same decisions. The control plane's clock moves with the engines' steps."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.capabilities.pressure.fleet import FleetPressure
from meridian_control.capabilities.pressure.rule import Controller
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.common.decision_words import short
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.model import Policy
from tests.contract.control.fleet.test_record import Recorder, check_replay
from tests.contract.ctl import ctl
from tests.contract.streams import Control
from tests.fakes.agent import hello
from tests.fakes.control import utc_now
from tests.fakes.engine import END, START
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy

CHAT = {"name": "chat", "tenant": "chat", "output_itl_p99_ms": 40, "window_s": 1, "max_think_tokens": 20}
QUEUE = {"name": "queue", "queueing_p99_ms": 300, "window_s": 1, "max_think_tokens": 20}
SLOW_MS, FAST_MS = 100.0, 25.0


def pressed(entry: dict[str, Any], shadow: bool = False) -> Policy:
    limits = {"min_think_tokens": 4, "max_think_tokens": 100_000}
    told = {"report_interval_steps": 1}
    return policy(scheduler=limits, entropy={"enabled": False}, telemetry=told, pressure=[{**entry, "shadow": shadow}])


class Stepped:
    """Engines whose steps take as long as the control plane's clock says."""

    def __init__(self, control: Control) -> None:
        self._control, self._now = control, utc_now()
        control.fleet.clock = self.clock

    def clock(self) -> datetime:
        return self._now

    def pass_time(self, time: timedelta) -> None:
        self._now += time

    async def step(self, step_ms: float, *engines: LinkedEngine) -> None:
        """Make a step on each engine, and wait until the control plane has the reports."""
        self.pass_time(timedelta(milliseconds=step_ms))
        for engine in engines:
            engine.step()
        await until(lambda: all(self._shown(engine).step == engine.engine.step for engine in engines))

    def _shown(self, engine: LinkedEngine) -> fleet_pb2.Engine:
        found: fleet_pb2.Engine = self._control.engine(engine.engine_id)
        return found

    async def level(self, wanted: int, step_ms: float, *engines: LinkedEngine) -> fleet_pb2.Pressure:
        """Make steps until the first engine's entry has a level."""
        while (shown := self._shown(engines[0]).pressures[0]).level != wanted:
            await self.step(step_ms, *engines)
        return shown


async def begin(control: Control, engine: LinkedEngine, tenant: str) -> None:
    """Open two requests that answer and one that thinks, once the control plane knows that the engine has its
    policy."""
    await until(lambda: engine.link.lease.revision == control.fleet.revision)
    await until(lambda: control.engine(engine.engine_id).acked_revision == control.fleet.revision)
    for name in ("answer", "another"):
        engine.open(f"{name}-{engine.engine_id}", tenant=tenant, prompt=(START, END), max_tokens=100_000)
    engine.open(f"think-{engine.engine_id}", tenant=tenant, max_tokens=100_000)


async def check_what_is_told(control: Control) -> None:
    """Check what `meridianctl` and the metrics say of the pressure of two engines, one of which has shortened its
    requests."""
    life = json.loads((await ctl(control, "explain", "think-pressed", "-o", "json")).stdout)
    (cap,) = [
        event["decision"]
        for event in life["life"]["events"]
        if event["kind"] == "decision" and event["decision"]["reason"] == "pressure"
    ]
    assert (cap["pressure"]["name"], cap["pressure"]["level"], cap["budget_stage"]) == (
        "chat",
        4,
        "BUDGET_STAGE_LOWER_CAP",
    )
    lowered, target = cap["comparisons"]
    assert (lowered["value"], lowered["limit_name"]) == (20, "pressure chat in stage lower_cap")
    assert (target["signal"], target["operator"], target["limit"]) == ("output_itl_p99_ms", ">", 40)
    assert target["value"] == cap["pressure"]["reading"]["measured"] >= SLOW_MS
    rows = (await ctl(control, "pressure")).stdout.splitlines()
    assert sorted(row.split()[:3] for row in rows[1:]) == [["other", "chat", "0/6"], ["pressed", "chat", "4/6"]]
    (only,) = json.loads((await ctl(control, "pressure", "--engine", "pressed", "-o", "json")).stdout)
    assert (only["engine_id"], only["name"], only["level"], len(only["changes"])) == ("pressed", "chat", 4, 2)
    told = dict(control.fleet.part(FleetPressure).metrics(await control.fleet.totals()))
    assert told["meridian_pressure_level"] == [(("chat",), 4)]
    assert told["meridian_pressure_engines"] == [(("chat",), 1)]
    assert dict(told["meridian_pressure_changes_total"])["chat", "shortened"] == 2
    assert dict(told["meridian_pressure_missed_windows_total"])["chat", "output_itl_p99_ms"] >= 3


async def test_slow_answers_shorten_thinking_until_they_are_fast(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    stepped = Stepped(control)
    await control.set_policy(pressed(CHAT))
    async with Recorder(control, "pressed") as recorder:
        with LinkedEngine([control.target], "pressed") as engine, LinkedEngine([control.target], "other") as other:
            await begin(control, engine, "chat")
            await begin(control, other, "batch")
            with caplog.at_level(logging.INFO):
                shown = await stepped.level(4, SLOW_MS, engine, other)
                for _ in range(2):
                    await control.fleet.part(FleetPressure).tick()
            thinks = engine.engine.live["think-pressed"]
            while not thinks.state.output_tokens:
                await stepped.step(SLOW_MS, engine, other)
            assert thinks.state.think_tokens >= 20, "its cap fell below its thinking, so its thinking ended"
            assert other.engine.live["think-other"].state.think_tokens > thinks.state.think_tokens
            assert not control.engine("other").pressures[0].level

            (first, second) = reversed(shown.changes)
            assert (first.level_before, first.level, second.level) == (0, 2, 4)
            assert first.reading.measured >= SLOW_MS > 2 * first.reading.limit
            logged = [record.getMessage() for record in caplog.records if "pressure chat" in record.getMessage()]
            assert len(logged) == 2, "each change is logged once"
            numbers = f"output_itl_p99_ms is {first.reading.measured:.4g}, limit 40, {first.reading.samples} samples"
            assert logged[0] == f"pressure chat on engine pressed: level 0 to 2, {numbers}"

            await check_what_is_told(control)

            await stepped.level(2, FAST_MS, engine)
            engine.open("late", tenant="chat")
            late = engine.engine.live["late"]
            await stepped.step(FAST_MS, engine)
            await engine.steps_until(lambda: (late.slot, 100_000) in engine.caps())
        records = await recorder.finished()
    assert not [r for r in records if r.HasField("pressure_levels")], "levels follow from the reports"
    check_replay(records)


async def test_requests_that_wait_in_the_queue_shorten_thinking(control: Control) -> None:
    stepped = Stepped(control)
    await control.set_policy(pressed(QUEUE))
    with LinkedEngine([control.target], "queued") as engine:
        await begin(control, engine, "chat")
        for number in range(12):
            engine.open(f"r{number}", queued_s=1.0)
        (reading,) = (await stepped.level(2, FAST_MS, engine)).readings
        assert (reading.target, reading.samples) == ("queueing_p99_ms", 12)
        assert 900 <= reading.measured <= 1.1 * 1100, "they wait for the whole window"
        row = (await ctl(control, "pressure")).stdout.splitlines()[1].split()
        assert row[:7] == ["queued", "queue", "2/6", "queueing_p99_ms", short(reading.measured, 4), "300", "12"]
        assert not (await control.fleet.totals()).queueing.counts.any()
        for live in engine.engine.live.values():
            engine.engine.join(live, now_s=2.5)
        await stepped.step(FAST_MS, engine)
        totals = await control.fleet.totals()
        assert (totals.queueing.counts.sum(), totals.queueing.sum) == (12, 12 * 1.5)
        missed = dict(control.fleet.part(FleetPressure).metrics(totals))["meridian_pressure_missed_windows_total"]
        assert missed == [(("queue", "queueing_p99_ms"), 1)]


async def test_an_engine_whose_agent_does_not_report_queueing_time_keeps_its_policy(control: Control) -> None:
    older = agent_pb2.Capabilities(force_end=True, dispatch=True)
    with LinkedEngine([control.target], "older", capabilities=older) as engine:
        await until(lambda: engine.link.lease.revision == control.fleet.revision)
        await control.set_policy(pressed(QUEUE))
        lacks = "the engine lacks queueing_time, needed for pressure[0].queueing_p99_ms"
        await until(lambda: control.engine("older").nack_error == lacks)
        await control.set_policy(pressed(QUEUE, shadow=True))
        stepped = Stepped(control)
        await begin(control, engine, "chat")
        while not (shown := control.engine("older").pressures[0]).readings:
            await stepped.step(SLOW_MS, engine)
        assert [(one.target, one.samples) for one in shown.readings] == [("queueing_p99_ms", 0)]
        assert (await ctl(control, "pressure")).stdout.split()[-3:] == ["queue", "0/6", "(shadow)"]


async def test_a_recording_that_begins_late_has_the_levels(control: Control) -> None:
    stepped = Stepped(control)
    await control.set_policy(pressed(CHAT))
    with LinkedEngine([control.target], "pressed") as engine:
        await begin(control, engine, "chat")
        await stepped.level(2, SLOW_MS, engine)
        async with Recorder(control) as recorder:
            records = await recorder.finished()
    assert [dict(r.pressure_levels.levels) for r in records if r.HasField("pressure_levels")] == [{"chat": 2}]


@pytest.mark.parametrize(
    ("left_s", "incarnation", "levels"),
    [(None, "a", {"chat": 4}), (59, "a", {"chat": 4}), (61, "a", {}), (1, "b", {})],
)
async def test_a_stream_begins_at_the_levels_of_its_process_before(
    left_s: int | None, incarnation: str, levels: dict[str, int]
) -> None:
    """Networks and proxies end streams. left_s: for how long the older stream has ended, None if it is
    still open."""
    now = utc_now()
    fleet = Fleet(lambda: now, capabilities=CAPABILITIES)
    older = fleet.join(hello("engine", incarnation="a"))
    older.session.part(EnginePressure).set_levels({"chat": 4})
    recording = fleet.record("engine")
    recorded = len(recording._waiting)
    if left_s is not None:
        fleet.leave(older, "disconnected")
        now += timedelta(seconds=left_s)
    newer = fleet.join(hello("engine", incarnation=incarnation))
    assert newer.session.part(EnginePressure).levels == levels
    records = [fleet_pb2.TraceRecord.FromString(each) for each in list(recording._waiting)[recorded:]]
    assert [dict(r.pressure_levels.levels) for r in records if r.HasField("pressure_levels")] == [levels] * bool(levels)


def test_the_late_end_of_a_process_takes_no_level_from_the_next_one() -> None:
    """The stream of a process that was killed may stay open for a while."""
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    killed, next_one = (fleet.join(hello("engine", incarnation=incarnation)) for incarnation in "ab")
    next_one.session.part(EnginePressure).set_levels({"chat": 4})
    fleet.leave(next_one, "disconnected")
    fleet.leave(killed, "disconnected")
    assert fleet.join(hello("engine", incarnation="b")).session.part(EnginePressure).levels == {"chat": 4}


def test_a_stream_that_was_replaced_leaves_nothing_once_it_ends() -> None:
    """The stream that replaced it has had its levels, and has fallen to others."""
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    older = fleet.join(hello("engine", incarnation="a"))
    older.session.part(EnginePressure).set_levels({"chat": 4})
    newer = fleet.join(hello("engine", incarnation="a"))
    newer.session.part(EnginePressure).set_levels({"chat": 0})
    fleet.leave(older, "replaced")
    fleet.leave(newer, "disconnected")
    assert fleet.join(hello("engine", incarnation="a")).session.part(EnginePressure).levels == {}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_level_that_rose_without_effect_ends_with_the_stream(replaced: bool) -> None:
    """The next stream cannot know that the level had no effect, and its first policy may give it one."""
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    older = fleet.join(hello("engine", incarnation="a"))
    pressure = older.session.part(EnginePressure)
    pressure.policy_begins(1, pressed(CHAT, shadow=True), utc_now())
    pressure.set_levels({"chat": 6})
    if not replaced:
        fleet.leave(older, "disconnected")
    newer = fleet.join(hello("engine", incarnation="a")).session.part(EnginePressure)
    newer.policy_begins(2, pressed(CHAT), utc_now())
    assert newer.levels == {}


def test_a_stream_begins_with_what_recordings_hold_of_the_stream_before() -> None:
    """A recording over both streams would otherwise not replay to the same levels."""
    fleet = Fleet(utc_now, capabilities=CAPABILITIES)
    older = fleet.join(hello("engine", incarnation="a"))
    older.session.part(EnginePressure).controllers = {"chat": Controller(4, hold=12, room=2, settling=True, fell=True)}
    fleet.leave(older, "disconnected")
    newer = fleet.join(hello("engine", incarnation="a")).session.part(EnginePressure)
    replayed = fleet.join(hello("replayed")).session.part(EnginePressure)
    replayed.recorded(newer.record())
    assert newer.controllers == replayed.controllers == {"chat": Controller(4)}


async def test_an_engine_that_is_left_alone_is_shown_restored(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    stepped = Stepped(control)
    await control.set_policy(pressed(CHAT))
    with LinkedEngine([control.target], "left") as engine:
        await begin(control, engine, "chat")
        await stepped.level(4, SLOW_MS, engine)
        for name in list(engine.engine.live):
            engine.engine.abort(name)
        await stepped.step(FAST_MS, engine)
        stepped.pass_time(timedelta(hours=5))
        with caplog.at_level(logging.INFO):
            await control.fleet.rest()
            await control.fleet.part(FleetPressure).tick()
        assert not control.engine("left").pressures[0].level
        logged = [record.getMessage() for record in caplog.records if "pressure chat" in record.getMessage()]
        assert logged[-1] == "pressure chat on engine left: level 1 to 0, nothing was measured"
        assert "left" in (await ctl(control, "pressure")).stdout
    await until(lambda: not control.fleet.connections)
    assert control.engine("left").pressures
    assert "left" not in (await ctl(control, "pressure")).stdout
