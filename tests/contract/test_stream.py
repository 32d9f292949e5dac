"""The stream end to end: a real server with a real store, and the agent's real link as its client."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc, fleet_pb2, fleet_pb2_grpc

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES, STEP_DECISIONS
from meridian_agent.core.step_record import StepRecord
from meridian_agent.link import control_stream as link
from meridian_agent.link import inbox, outbox
from meridian_agent.link.inbox import INBOX_DECISIONS, INBOX_MESSAGES
from meridian_agent.link.messages import decisions_in
from meridian_agent.link.outbox import RING_RECORDS
from meridian_control.cluster.cluster_fleet import WholeFleet
from meridian_control.common.errors import StoreUnavailable
from meridian_control.decisions.request_table import MAX_SLOTS
from meridian_control.fleet import fleet
from meridian_control.fleet.fleet import QUEUE_MESSAGES, Fleet
from meridian_control.policy.store import PolicyStore, StoredRevision
from meridian_control.server.server import ControlServer
from meridian_control.storage.database import Database
from tests.fakes.agent import hello
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from meridian_control.policy.model import Policy


def utc_now() -> datetime:
    return datetime.now(UTC)


class Control:
    """A control plane in this process; `kill` and `start` again keep port and store."""

    def __init__(self, store: PolicyStore) -> None:
        self.store = store
        self.port = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.fleet = Fleet(utc_now, refresh=self.refresh, revision=self.store.get)
        self.server = ControlServer(self.store, WholeFleet(self.fleet, "alone", None, lambda: True), utc_now)
        if (current := await self.store.current()) is None:
            await self.set_policy(policy(scheduler={"max_think_tokens": 600}))
        else:
            self.fleet.set_policy(current)
        self.port = await self.server.start(f"127.0.0.1:{self.port}")

    async def refresh(self) -> None:
        current = await self.store.current()
        assert current is not None
        self.fleet.set_policy(current)

    async def set_policy(self, new: Policy) -> StoredRevision:
        stored = await self.store.append(new, etag="", author="test", reason="", now=utc_now())
        self.fleet.set_policy(stored)
        return stored

    async def kill(self) -> None:
        await self.server._server.stop(None)
        # A database connection in use is not left behind.
        await self.server._gate.settle()
        await self.fleet.settle()

    def engine(self, engine_id: str = "engine") -> Any:
        (found,) = [e for e in self.fleet.engines() if e.engine_id == engine_id]
        return found

    def names(self) -> list[str]:
        return [r.request_id for r in self.fleet.requests("")]


@asynccontextmanager
async def controlling(path: Path) -> AsyncIterator[Control]:
    store = PolicyStore(await Database.open(f"sqlite+aiosqlite:///{path}"))
    control = Control(store)
    await control.start()
    try:
        yield control
    finally:
        await control.kill()
        await store.database.close()


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[Control]:
    async with controlling(tmp_path / "meridian.db") as running:
        yield running


class Scripted(agent_pb2_grpc.AgentServiceServicer):
    """A server that says what a test tells it to, and reads only while `reading` is set."""

    def __init__(self) -> None:
        self.received: list[agent_pb2.ConnectRequest] = []
        self.say: asyncio.Queue[agent_pb2.ConnectResponse] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.welcomes = True

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        self.received.append(await anext(request_iterator))
        if self.welcomes:
            yield agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s"))
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self.say.get()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        await self.reading.wait()
        async for request in requests:
            self.received.append(request)
            await self.reading.wait()

    def kinds(self) -> list[str | None]:
        return [m.WhichOneof("message") for m in self.received]


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Scripted, str]]:
    servicer, server = Scripted(), grpc.aio.server()
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ----------------------------------------------------------------------------------------------------- a working stream


async def test_from_connect_to_the_last_outcome(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("before")
        await until(lambda: engine.link.connected)
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        assert control.names() == ["before"]
        engine.open("after", own_cap=9)
        engine.step()

        def told() -> bool:
            """Without a step: on a busy machine there would be more of them than the cap allows."""
            engine.take_inbox()
            return (1, 9) in engine.caps()

        await until(told)
        await engine.steps_until(lambda: control.engine().ends == {"hard_cap": 1})
        shown = control.engine()
        assert (shown.acked_revision, shown.vllm_version, shown.running) == (1, "", 2)
        counts = {r.request_id: (r.think_tokens, r.output_tokens) for r in control.fleet.requests("engine")}
        assert counts["after"][0] == 9
        for name in list(engine.engine.live):
            engine.engine.finish(name)
        await engine.steps_until(lambda: not control.engine().open_decisions)
        shown = control.engine()
        # What comes once the engine is idle the link answers for, without the engine.
        own = engine.engine.outcomes.values()
        assert sum(shown.decisions.values()) == sum(shown.outcomes.values()) >= len(own)
        assert {len(outcomes) for outcomes in own} == {1}
        assert "agent_off" not in shown.outcomes
        assert control.names() == []
        (connection,) = control.fleet.connections
        assert connection.session.totals.unknown_outcomes == 0


async def test_an_idle_engine_acknowledges_and_settles(control: Control) -> None:
    """No step is running that could carry an outcome."""
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        await control.set_policy(policy(scheduler={"shadow": True}))
        await until(lambda: control.engine().acked_revision == 2)
        await until(lambda: control.engine().decisions and not control.engine().open_decisions)
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 32768)])
        plan = engine.engine.directives.plan
        assert plan is not None
        assert plan.shadow, "the plan that came while it idled holds"


async def test_the_snapshot_comes_first(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        engine.step()
        await until(lambda: engine.link.connected)
        await engine.steps_until(lambda: "step" in servicer.kinds())
        assert servicer.kinds()[:3] == ["hello", "snapshot", "step"]
        snapshot, step = servicer.received[1].snapshot, servicer.received[2].step
        (row,) = snapshot.requests
        assert (row.slot, row.request_id) == (0, "a")
        # On a busy machine the report has more steps than the snapshot's.
        assert row.think_tokens == snapshot.step == step.step - step.steps + 1, "one token a step"
        assert len(step.tokens.slot) == step.steps - 1, "the step's own tokens are in the snapshot"
        await engine.steps_until(lambda: len(servicer.received) > 5)
        assert "snapshot" not in servicer.kinds()[2:]
        reports = [m.step for m in servicer.received[3:]]
        assert sum(len(r.tokens.slot) for r in reports) == sum(r.steps for r in reports)


async def test_what_the_engine_says_before_it_knows_of_the_new_stream(scripted: tuple[Scripted, str]) -> None:
    """Its record speaks of the old stream's decisions, whose numbers the new one gives out again."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.connected)
        engine.send(StepRecord(step=1, outcomes=[(1, 1, 0, "of the old stream")]))
        engine.take_inbox()
        engine.send(StepRecord(step=2, outcomes=[(1, 2, 0, "of the new stream")]))
        await until(lambda: "step" in servicer.kinds())
        assert servicer.kinds() == ["hello", "snapshot", "step"]
        assert [o.detail for o in servicer.received[-1].step.outcomes] == ["of the new stream"]


async def test_settings_round_trip(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        engine.refusal = "reasoning parser 'x': unknown"
        await control.set_policy(policy(fallback={"lease_ms": 500}))
        await until(lambda: control.engine().nack_error)
        shown = control.engine()
        assert (shown.revision, shown.acked_revision, shown.nack_error) == (2, 1, engine.refusal)
        assert (engine.link.revision, engine.link.lease_s) == (1, 30.0)
        engine.refusal = ""
        await control.set_policy(policy(fallback={"lease_ms": 700}, telemetry={"report_interval_steps": 3}))
        await until(lambda: control.engine().acked_revision == 3)
        assert control.engine().nack_error == ""
        assert (engine.link.revision, engine.link.lease_s, engine.link.report_interval_steps) == (3, 0.7, 3)
        assert [s.revision for s in engine.settings] == [1, 2, 3]
        assert control.fleet.totals().nacks == 1


async def test_changes_in_a_row_are_sent_as_one(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "QUIET_S", 1.0)
    monkeypatch.setattr(fleet, "MAX_WAIT_S", 60.0)
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        for lease_ms in range(500, 510):
            await control.set_policy(policy(fallback={"lease_ms": lease_ms}))
        await until(lambda: control.engine().acked_revision == 11)
        assert [s.revision for s in engine.settings] == [1, 11]


async def test_changes_without_end_are_sent_all_the_same(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only that ends the wait, however long the pauses between changes are on a busy machine.
    monkeypatch.setattr(fleet, "QUIET_S", 60.0)
    monkeypatch.setattr(fleet, "MAX_WAIT_S", 1.0)
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        revision = 1
        while len(engine.settings) < 3:
            revision += 1
            control.fleet.set_policy(StoredRevision(revision, "", policy(), "", "", utc_now()))
            await asyncio.sleep(0.02)
        assert revision - 1 > len(engine.settings)


async def test_a_refused_revision_is_not_sent_again(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        engine.refusal = "no"
        stored = await control.set_policy(policy(fallback={"lease_ms": 500}))
        await until(lambda: control.engine().nack_error)
        control.fleet.set_policy(stored)
        control.fleet._send_policies()
        engine.refusal = ""
        await control.set_policy(policy(fallback={"lease_ms": 500}))
        await until(lambda: control.engine().acked_revision == 3)
        assert [s.revision for s in engine.settings] == [1, 2, 3]


async def test_a_refused_revision_is_not_sent_again_on_a_new_stream(control: Control) -> None:
    """The engine is governed by the last good one instead, also by a control plane that knows nothing of before."""
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        engine.refusal = "no"
        await control.set_policy(policy(scheduler={"max_think_tokens": 100}))
        await until(lambda: control.engine().nack_error)
        engine.refusal = ""
        for restart in (engine.link.restart, control.kill):
            streams = engine.streams
            if restart is control.kill:
                await control.kill()
                await control.start()
            else:
                engine.link.restart()
            engine.open(f"after {streams}")
            await engine.steps_until(
                lambda before=streams: engine.streams > before and control.engine().acked_revision == 1  # type: ignore[misc]
            )
            await engine.steps_until(engine.caps)
            shown = control.engine()
            assert (shown.revision, shown.acked_revision, shown.nack_error) == (2, 1, "no")
            assert {cap for _, cap in engine.caps()} == {600}
        assert [s.revision for s in engine.settings] == [1, 2, 1, 1]
        await control.set_policy(policy(scheduler={"max_think_tokens": 200}))
        await engine.steps_until(lambda: control.engine().acked_revision == 3)
        assert control.engine().nack_error == ""


async def test_a_new_incarnation_is_asked_again(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.refusal = "no"
        await until(lambda: control.fleet.connections and control.engine().nack_error)
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.engine().acked_revision == 1)


async def test_an_engine_that_cannot_honour_a_policy_keeps_the_one_before(control: Control) -> None:
    poor = agent_pb2.Capabilities(force_end=True, dispatch=True)
    with LinkedEngine([control.target], capabilities=poor) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        await control.set_policy(policy(scheduler={"max_think_tokens": 100}, entropy={"shadow": False}))
        await until(lambda: control.engine().nack_error)
        shown = control.engine()
        assert (shown.revision, shown.acked_revision) == (2, 1)
        assert "the engine lacks eat_probe, needed for entropy.eat_level_threshold_nats" in shown.nack_error
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        engine.link.restart()
        await engine.steps_until(lambda: engine.streams == 2 and len(engine.caps()) == 2)
        assert [s.revision for s in engine.settings] == [1, 1]
        await control.set_policy(policy(entropy={"shadow": True}))
        await engine.steps_until(lambda: control.engine().acked_revision == 3)


async def test_an_ack_waits_for_the_step_that_applies(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        await control.set_policy(policy(fallback={"lease_ms": 500}))
        await until(lambda: len(engine.settings) == 2 and engine.link.arrived)
        await asyncio.sleep(0.1)
        assert (control.engine().acked_revision, engine.link.revision, engine.kept) == (1, 1, [1])
        engine.step()
        await until(lambda: control.engine().acked_revision == 2)
        assert (engine.link.revision, engine.kept) == (2, [1, 2])


async def test_every_setting_is_answered_once_whichever_thread_does(scripted: tuple[Scripted, str]) -> None:
    """An engine that falls idle and wakes again and again, while settings and freezes come."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        await until(lambda: engine.link.connected)
        for number in range(1, 401):
            settings = agent_pb2.Settings(nonce=number, revision=number, lease_ms=30_000)
            servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
            servicer.say.put_nowait(agent_pb2.ConnectResponse(freeze=agent_pb2.Freeze(nonce=number)))

        def wake_and_sleep() -> bool:
            engine.open("a")
            engine.step()
            engine.engine.abort("a")
            engine.step()
            return len([k for k in servicer.kinds() if k in {"settings_status", "freeze_status"}]) >= 800

        await until(wake_and_sleep, 60)
        said = [m.settings_status.nonce for m in servicer.received if m.HasField("settings_status")]
        assert sorted(said) == list(range(1, 401))
        said = [m.freeze_status.nonce for m in servicer.received if m.HasField("freeze_status")]
        assert sorted(said) == list(range(1, 401))
        assert engine.link.revision == 400


async def test_an_ack_of_one_stream_says_nothing_on_the_next(scripted: tuple[Scripted, str]) -> None:
    """Nonces begin anew with every stream."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        for revision in (7, 8):
            settings = agent_pb2.Settings(nonce=1, revision=revision, lease_ms=1000)
            servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
            await until(lambda wanted=revision: [s.revision for s in engine.settings][-1:] == [wanted])  # type: ignore[misc]
            if revision == 7:
                engine.link.restart()
                await until(lambda: servicer.kinds().count("hello") == 2)
        await engine.steps_until(lambda: "settings_status" in servicer.kinds())
        said = [m.settings_status.revision for m in servicer.received if m.HasField("settings_status")]
        assert said == [8]


async def test_a_surprise_in_the_tokenizer_is_a_refusal(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.link._prepare = {}.__getitem__  # type: ignore[assignment]
        await until(lambda: control.fleet.connections and control.engine().nack_error)
        assert "TypeError" in control.engine().nack_error
        assert engine.streams <= 1


# --------------------------------------------------------------------------------------------------- leases, freezes


async def test_a_sections_own_lease(scripted: tuple[Scripted, str]) -> None:
    """Past it, what the section decided has ended; the others go on until their own, or the general one."""
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        settings = agent_pb2.Settings(nonce=1, revision=1, lease_ms=4000)
        settings.scheduler_lease_ms, settings.entropy_lease_ms, settings.kv_memory_lease_ms = 1000, 2000, 3000
        servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
        await until(lambda: engine.link.revision == 1)
        engine.link.stop()
        await until(lambda: not engine.link.connected)
        found = []
        for now in (1.0, 1.1, 2.1, 3.1, 4.1):
            clock.now = now
            found.append((engine.link.lapsed(), engine.link.state))
        degraded, stale = agent_pb2.AGENT_STATE_DEGRADED, agent_pb2.AGENT_STATE_STALE
        scheduler = ORDER | CAPS
        assert found == [
            (0, stale),
            (scheduler, stale),
            (scheduler | RULES, stale),
            (scheduler | RULES | MEMORY, stale),
            (ALL_BUT_CAPS | CAPS, degraded),
        ]


@pytest.mark.parametrize("section", ["scheduler", "entropy", "kv_memory"])
async def test_leases_are_sent_and_answered_within(control: Control, section: str) -> None:
    """A busy stream without decisions is answered often enough that no lease runs out."""
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        await control.set_policy(policy(**{section: {"lease_ms": 300}}))
        engine.open("a")
        await engine.steps_until(lambda: control.engine().acked_revision == 2)
        assert getattr(engine.settings[-1], f"{section}_lease_ms") == 300
        (connection,) = control.fleet.connections
        assert connection.session._ack_interval_s == 0.075


async def test_the_agent_thaws_by_itself(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        engine.open("a")
        command = agent_pb2.Freeze(nonce=3, remaining_ms=5000, reason="test")
        servicer.say.put_nowait(agent_pb2.ConnectResponse(freeze=command))
        await engine.steps_until(lambda: "freeze_status" in servicer.kinds())
        (status,) = (m.freeze_status for m in servicer.received if m.HasField("freeze_status"))
        assert status == agent_pb2.FreezeStatus(nonce=3, frozen=True)
        engine.link.stop()
        await until(lambda: not engine.link.connected)
        clock.now = 4.9
        assert engine.link.frozen()
        clock.now = 5.1
        assert not engine.link.frozen()


async def test_after_a_thaw_the_agent_tells_everything_anew(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        for nonce, remaining_ms in ((1, 60_000), (2, 0)):
            command = agent_pb2.Freeze(nonce=nonce, remaining_ms=remaining_ms)
            servicer.say.put_nowait(agent_pb2.ConnectResponse(freeze=command))
            await engine.steps_until(lambda count=nonce: servicer.kinds().count("freeze_status") == count)  # type: ignore[misc]
        await engine.steps_until(lambda: servicer.kinds().count("snapshot") == 2)


async def test_an_agent_that_has_stepped_aside_is_frozen_at_once(scripted: tuple[Scripted, str]) -> None:
    """No step of its own comes any more; the engine is stock vLLM already."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.connected)
        engine.link.step_aside()
        await until(lambda: servicer.kinds().count("hello") == 2)
        servicer.say.put_nowait(agent_pb2.ConnectResponse(freeze=agent_pb2.Freeze(nonce=1, remaining_ms=1000)))
        await until(lambda: "freeze_status" in servicer.kinds())


async def test_states(control: Control) -> None:
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        assert engine.link.state == agent_pb2.AGENT_STATE_STALE
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 1)
        assert engine.link.state == control.engine().agent_state == agent_pb2.AGENT_STATE_READY
        await control.kill()
        await until(lambda: engine.link.state == agent_pb2.AGENT_STATE_STALE)
        clock.now += 31
        assert engine.link.state == agent_pb2.AGENT_STATE_DEGRADED
        await until(lambda: control.engine().agent_state == agent_pb2.AGENT_STATE_STALE)
        control.fleet.clock = lambda: utc_now() + timedelta(seconds=31)
        assert control.engine().agent_state == agent_pb2.AGENT_STATE_DEGRADED


async def test_who_connects_meanwhile_gets_the_newest_at_once_and_once(control: Control) -> None:
    await control.set_policy(policy(fallback={"lease_ms": 500}))
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == 2)
        await until(lambda: control.fleet._sending is None)
        engine.take_inbox()
        assert [s.revision for s in engine.settings] == [2]


async def test_reports_are_merged_as_the_policy_says(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        settings = agent_pb2.Settings(nonce=1, revision=4, report_interval_steps=300, lease_ms=1000)
        servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
        await until(lambda: engine.link.revision == 4)
        engine.open("a")
        for _ in range(301):
            engine.step()
        await until(lambda: sum(m.step.steps for m in servicer.received) == 301)
        reports = [m.step for m in servicer.received if m.HasField("step")]
        assert [r.steps for r in reports] == [300, 1], "the last one did not wait for ever"
        merged = reports[0].merged
        # The first of them is in the snapshot.
        assert list(merged.rows) == [0, *[1] * 299]
        assert list(merged.age_ms) == sorted(merged.age_ms, reverse=True)
        assert merged.age_ms[0] > merged.age_ms[-1] == 0


async def test_two_engines_at_once(control: Control) -> None:
    with LinkedEngine([control.target], "one") as one, LinkedEngine([control.target], "two") as two:
        one.open("a")
        two.open("b", own_cap=3)
        two.open("c")
        await one.steps_until(lambda: one.caps() == [(0, 600)])
        await two.steps_until(lambda: two.caps() == [(0, 3), (1, 600)])
        assert control.names() == ["a", "b", "c"]
        assert [r.request_id for r in control.fleet.requests("two")] == ["b", "c"]
        assert [e.engine_id for e in control.fleet.engines()] == ["one", "two"]
        await control.set_policy(policy())
        await one.steps_until(lambda: control.engine("one").acked_revision == 2)
        assert control.engine("two").acked_revision == 1, "it makes no step"
        await two.steps_until(lambda: control.engine("two").acked_revision == 2)


async def test_a_second_stream_of_one_engine_takes_the_first_ones_place(control: Control) -> None:
    """The end of a half-open stream may go unnoticed for long; an engine is listed once all the same."""
    hello = agent_pb2.ConnectRequest(hello=agent_pb2.Hello(engine_id="e", incarnation="1"))
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        first, second = stub.Connect(), stub.Connect()
        await first.write(hello)
        await first.read()
        await second.write(hello)
        await second.read()
        assert [e.engine_id for e in control.fleet.engines()] == ["e"]
        while await first.read() is not grpc.aio.EOF:
            pass
        await until(lambda: control.fleet.stream_ends == {"replaced": 1})
        assert [e.state for e in control.fleet.engines()] == [fleet_pb2.CONNECTION_STATE_CONNECTED]
        second.cancel()


# ------------------------------------------------------------------------------------------------- when streams end


async def test_a_server_that_is_killed_and_comes_back(control: Control) -> None:
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        assert not engine.link.lapsed()
        await control.kill()
        await until(lambda: not engine.link.connected)
        engine.step()
        assert not engine.link.lapsed()
        clock.now += 30.1
        assert engine.link.lapsed()
        await control.start()
        await until(lambda: engine.link.connected)
        assert engine.link.lapsed(), "nobody knows of its requests yet"
        await engine.steps_until(lambda: not engine.link.lapsed())
        await engine.steps_until(lambda: engine.caps() == [(0, 600)] * 2)
        assert (engine.streams, control.names()) == (2, ["a"])
        (tr,) = engine.engine.live.values()
        await until(lambda: control.fleet.requests("")[0].think_tokens == tr.state.think_tokens)
        engine.engine.finish("a")
        await engine.steps_until(lambda: not control.engine().open_decisions)
        assert "agent_off" not in control.engine().outcomes
        assert control.fleet.totals().unknown_outcomes == 0, "outcomes of the old stream are not this one's"


async def test_a_server_that_never_answers(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    servicer.welcomes = False
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        engine.open("a")
        await until(lambda: servicer.received)
        for _ in range(100):
            engine.step()
        assert not engine.link.connected
        assert engine.link.outbox.ring.qsize() == 0
        assert engine.link.outbox.reports_dropped == 0, "nothing was promised to anybody"
        clock.now += 30.1
        assert engine.link.lapsed()


async def test_a_server_that_never_answers_is_left_for_another(
    scripted: tuple[Scripted, str], control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, target = scripted
    servicer.welcomes = False
    monkeypatch.setattr(link, "PATIENCE_S", (0.2, 60.0))
    with LinkedEngine([target, control.target]) as engine:
        await until(lambda: servicer.received)
        await until(lambda: engine.link.connected)
        assert servicer.kinds() == ["hello"]
        assert control.engine().engine_id == "engine"
    assert f"no stream to {target}: no answer within 0 s" in caplog.text


async def test_a_server_that_is_slow_to_answer_is_waited_for_in_the_end(
    scripted: tuple[Scripted, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer with each attempt in vain."""
    servicer, target = scripted
    servicer.welcomes = False
    monkeypatch.setattr(link, "PATIENCE_S", (0.05, 60.0))
    with LinkedEngine([target]) as engine:
        began_s = time.monotonic()
        await until(lambda: servicer.kinds().count("hello") == 6)
        assert time.monotonic() - began_s > 0.05 * (2**5 - 1)
        servicer.say.put_nowait(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s")))
        await until(lambda: engine.link.connected)


async def test_a_server_that_ends_every_stream_is_called_less_and_less(scripted: tuple[Scripted, str]) -> None:
    """Else a fleet of agents would keep one that is about to fail busy with itself."""
    servicer, target = scripted
    servicer.say.put_nowait(agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway()))
    began_s = time.monotonic()
    with LinkedEngine([target]) as engine:
        for calls in range(1, 7):
            await until(lambda wanted=calls: servicer.kinds().count("hello") > wanted)  # type: ignore[misc]
            servicer.say.put_nowait(agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway()))
        assert engine.link.revision == 0
    low, high = link.BACKOFF_S
    assert time.monotonic() - began_s > 0.05 * sum(min(high, low * 2**attempt) for attempt in range(1, 7))


ABSURD: dict[str, dict[str, Any]] = {
    "no lease": {},
    "a lease of a millisecond": {"lease_ms": 1},
    "a section's lease": {"lease_ms": 1000, "entropy_lease_ms": 1},
    "an interval without end": {"lease_ms": 1000, "report_interval_steps": 1 << 31},
    "a text without end": {"lease_ms": 1000, "closing_text": "x" * 100_000},
    "a marker without end": {"lease_ms": 1000, "think_end_token_ids": [1] * 1000},
}


@pytest.mark.parametrize("fields", ABSURD.values(), ids=ABSURD.keys())
async def test_settings_that_nothing_could_live_under(scripted: tuple[Scripted, str], fields: dict[str, Any]) -> None:
    """They are refused, and the stream goes on: taken in, a lease of 0 was over before any answer."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        settings = agent_pb2.Settings(nonce=1, revision=7, **fields)
        servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
        await engine.steps_until(lambda: "settings_status" in servicer.kinds())
        (status,) = [m.settings_status for m in servicer.received if m.HasField("settings_status")]
        assert (status.nonce, status.revision) == (1, 0)
        assert " must " in status.error
        await engine.steps_until(lambda: servicer.kinds().count("step") > 5)
        assert servicer.kinds().count("hello") == 1
        assert engine.settings == []
        assert engine.link.refused == {}, "a server's own revision of that number is another one"


@pytest.mark.parametrize(("lease_ms", "wait_s"), [(0, 0.25), (2000, 0.25), (400, 0.1)])
def test_reports_are_merged_no_longer_than_a_lease_allows(lease_ms: int, wait_s: float) -> None:
    """An interval of so many steps that a section's lease would be over before the first answer."""
    engine = LinkedEngine(["nobody"])
    engine.link.hold(agent_pb2.Settings(lease_ms=30_000, scheduler_lease_ms=lease_ms), None)
    assert engine.link.merge_s == wait_s


async def step_of_a_long_interval(engine: LinkedEngine) -> None:
    """The engine's first step, on a stream whose reports wait for hours unless something presses."""
    engine.link.hold(agent_pb2.Settings(lease_ms=3_600_000, report_interval_steps=300), None)
    engine.link.merge_s = 3600.0
    engine.open("a")
    await until(lambda: engine.link.connected)
    engine.step()


async def test_the_last_step_before_a_rest_is_told_at_once(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        await step_of_a_long_interval(engine)
        await until(lambda: servicer.kinds()[-1] == "snapshot")
        engine.engine.finish("a")
        engine.step()
        await until(lambda: servicer.received[-1].step.closed)


async def test_a_stream_tells_where_things_stand_at_once(scripted: tuple[Scripted, str]) -> None:
    """The snapshot that begins it waits for no interval."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        await step_of_a_long_interval(engine)
        await until(lambda: any(m.HasField("snapshot") for m in servicer.received))


@pytest.mark.parametrize("kind", ["opened", "preempted", "resumed", "urgent"])
def test_what_presses(kind: str) -> None:
    record = StepRecord(slots=[0], phases=[2], flags=[32], rows=[0], closed=[(1, 1)], outcomes=[(1, 1, 0, "")])
    assert not record.presses
    setattr(record, kind, [(1,)])
    assert record.presses


async def test_a_server_that_stops_reading(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    with LinkedEngine([target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.connected)
        engine.take_inbox()
        gaps, dropped = 0, False
        # A send that waited for the server would not come back.
        for sent in range(400_000):
            reports_dropped = engine.link.outbox.reports_dropped
            record = StepRecord(step=sent, outcomes=[(sent + 1, 1, 0, "")], slots=[0] * 50)
            record.phases = record.flags = record.rows = [2] * 50
            engine.send(record)
            before, dropped = dropped, engine.link.outbox.reports_dropped > reports_dropped
            # What gRPC takes out at last may make room for some records more.
            gaps += dropped and not before
            assert engine.link.outbox.ring.qsize() <= RING_RECORDS + 2
            if engine.link.outbox.reports_dropped >= 100:
                break
        assert engine.link.outbox.reports_dropped == 100
        # It recovers: what had waited arrives, then a snapshot in place of what was lost, and no outcome is missing.
        servicer.reading.set()
        await until(lambda: engine.link.outbox.ring.qsize() == 0)
        last = StepRecord(step=sent + 1, counters=(("reports_dropped", engine.link.outbox.reports_dropped),))
        engine.send(last)
        await until(lambda: servicer.received[-1].step.step == sent + 1)
        assert servicer.kinds()[-2:] == ["snapshot", "step"]
        assert servicer.kinds().count("snapshot") == 1 + gaps
        assert servicer.received[-1].step.counters.reports_dropped == 100
        reported = [o.decision_id for m in servicer.received for o in m.step.outcomes]
        assert sorted(reported) == list(range(1, sent + 2))
        assert sum(m.step.steps for m in servicer.received) == sent + 2 - 100


async def test_a_stream_that_is_silent_past_the_lease_is_given_up(
    scripted: tuple[Scripted, str], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: "step" in servicer.kinds())
        servicer.say.put_nowait(agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1)))
        await until(lambda: engine.link._unheard_since is None)
        clock.now = 100.0
        assert not engine.link.lapsed(), "nothing was said that is to be answered"
        engine.step()
        clock.now = 130.0
        assert not engine.link.lapsed()
        clock.now = 130.1
        assert engine.link.lapsed()
        await until(lambda: servicer.kinds().count("hello") == 2)
        await until(lambda: engine.link.connected)
        await engine.steps_until(lambda: servicer.kinds().count("snapshot") == 2)
        assert engine.link.lapsed(), "a new stream is no answer yet"
        assert servicer.kinds().count("hello") == 2, "and has as long for one as the old one had"
        servicer.say.put_nowait(agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1)))
        await until(lambda: not engine.link.lapsed())
    assert f"stream to {target} ended: nothing heard for 30.1 s" in caplog.text


async def test_a_server_that_only_welcomes(scripted: tuple[Scripted, str], caplog: pytest.LogCaptureFixture) -> None:
    """And closes each stream: no lease is renewed by that. One answer is enough to go on."""
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        engine.open("a")
        for streams in range(1, 5):
            await engine.steps_until(lambda wanted=streams: servicer.kinds().count("snapshot") == wanted)  # type: ignore[misc]
            clock.now += 10.0
            state = engine.link.say_state()
            assert (state == agent_pb2.AGENT_STATE_DEGRADED) == (streams == 4), f"after {streams * 10} s"
            assert bool(engine.link.lapsed()) == (streams == 4)
            servicer.say.put_nowait(agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway()))
            await until(lambda wanted=streams: servicer.kinds().count("hello") > wanted and engine.link.connected)  # type: ignore[misc]
        assert engine.link.state == agent_pb2.AGENT_STATE_DEGRADED
        servicer.say.put_nowait(agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1)))
        await until(lambda: engine.link.say_state() == agent_pb2.AGENT_STATE_READY)


async def test_an_idle_engine_waits_for_no_answer(control: Control) -> None:
    """Its last report may have none: hours later it is as ready as ever, and its stream the same."""
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: control.names() == ["a"])
        engine.engine.finish("a")
        await engine.steps_until(lambda: control.names() == [])
        engine.step()
        clock.now += 3600.0
        assert engine.link.state == agent_pb2.AGENT_STATE_READY
        assert not engine.link.lapsed()
        engine.open("b")
        assert not engine.link.lapsed()
        await engine.steps_until(lambda: control.names() == ["b"])
        assert (engine.streams, control.fleet.stream_ends) == (1, {})


async def test_messages_that_nobody_takes_in(scripted: tuple[Scripted, str], caplog: pytest.LogCaptureFixture) -> None:
    """An engine that stands still: rather than lose a decision unseen, the stream begins anew."""
    servicer, target = scripted
    with LinkedEngine([target]) as engine:
        engine.open("a")
        for number in range(INBOX_MESSAGES + 1):
            servicer.say.put_nowait(agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=number)))
        await until(lambda: servicer.kinds().count("hello") == 2, 20)
        assert len(engine.link.inbox.messages) <= INBOX_MESSAGES + 1, "the one too many is let go with the others"
        await until(lambda: engine.link.connected)
        engine.take_inbox()
        assert engine.streams == 1, "what the old stream said is gone with it"
    assert any("connecting anew" in r.message for r in caplog.records)


async def test_settings_for_an_idle_engine(scripted: tuple[Scripted, str]) -> None:
    """However many come while it rests, or its agent is off, the newest are all that is kept; each is answered."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        for nonce in range(1, INBOX_MESSAGES + 3):
            settings = agent_pb2.Settings(nonce=nonce, revision=nonce, lease_ms=30_000)
            servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
        await until(lambda: engine.link.revision == INBOX_MESSAGES + 2, 30)
        await until(lambda: servicer.kinds().count("settings_status") == INBOX_MESSAGES + 2, 30)
        assert (len(engine.link.arrived), servicer.kinds().count("hello")) == (0, 1)
        engine.open("a")
        engine.step()
        assert engine.link.held is not None
        assert engine.link.held[0].revision == INBOX_MESSAGES + 2


def flooding(messages: int, decisions: int) -> list[agent_pb2.ConnectResponse]:
    probes = [agent_pb2.EatProbe(decision_id=number + 1, slot=9) for number in range(decisions)]
    return [agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1, probes=probes))] * messages


async def test_a_flood_is_taken_in_bit_by_bit(scripted: tuple[Scripted, str]) -> None:
    """No step takes in more than a little over its share, and in the end each decision has its outcome."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        for message in flooding(50, 300):
            servicer.say.put_nowait(message)
        await until(lambda: len(engine.link.inbox.messages) == 51)
        taken = []
        while engine.link.inbox.messages:
            before = len(engine.taken)
            engine.step()
            taken.append(len(engine.taken) - before)
        assert max(taken) == -(-STEP_DECISIONS // 300) == 4
        await engine.steps_until(lambda: sum(len(m.step.outcomes) for m in servicer.received) == 50 * 300)
        assert engine.streams == 1


@pytest.mark.parametrize("idle", [False, True])
async def test_a_flood_past_all_measure_ends_the_stream(
    scripted: tuple[Scripted, str], monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Whatever waits stays bounded, also for an idle engine, for which the link answers, and nobody reads."""
    monkeypatch.setattr(outbox, "RING_RECORDS", 50)
    for name in ("INBOX_MESSAGES", "INBOX_DECISIONS"):
        monkeypatch.setattr(inbox, name, 50)
    servicer, target = scripted
    with LinkedEngine([target]) as engine:
        if not idle:
            engine.open("a")
        for message in flooding(300, 1) if idle else flooding(10, 20):
            servicer.say.put_nowait(message)
        await until(lambda: servicer.kinds().count("hello") == 2, 20)
        assert engine.link.outbox.ring.qsize() <= 50 + 50
        assert sum(decisions_in(m) for m in list(engine.link.inbox.messages) if m) <= 50


async def test_outcomes_that_nobody_reads_are_bounded(scripted: tuple[Scripted, str]) -> None:
    servicer, target = scripted
    with LinkedEngine([target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.connected)
        engine.take_inbox()
        outcomes = [(1, 1, 0, "")] * 1000
        for step in range(1, 2 * INBOX_DECISIONS // 1000):
            engine.send(StepRecord(step=step, outcomes=list(outcomes)))
            if servicer.kinds().count("hello") == 2:
                break
        await until(lambda: servicer.kinds().count("hello") == 2)
        await until(lambda: engine.link.connected)
        assert engine.link.outbox._outcomes_in - engine.link.outbox._outcomes_out <= 2000


async def test_going_away(control: Control, tmp_path: Path) -> None:
    async with controlling(tmp_path / "other.db") as other:
        with LinkedEngine([control.target, other.target]) as engine:
            engine.open("a")
            await engine.steps_until(lambda: engine.caps() == [(0, 600)])
            assert not other.fleet.connections
            await control.server.stop(5.0)
            await engine.steps_until(lambda: other.names() == ["a"])
            assert control.fleet.stream_ends in ({"going_away": 1}, {"disconnected": 1})
            assert not control.fleet.connections
            (gone,) = control.fleet.engines()
            assert gone.open_decisions == 0
            assert sum(gone.decisions.values()) == sum(gone.outcomes.values())


@pytest.mark.parametrize(("ahead", "given"), [(2, 2), (9, 2)], ids=["of this replica", "of the store"])
async def test_an_engine_that_is_ahead_gets_what_the_store_has(control: Control, ahead: int, given: int) -> None:
    """Another replica stored what this one has not heard of; or it is a store that began anew."""
    await control.store.append(policy(), etag="", author="", reason="", now=utc_now())
    engine = LinkedEngine([control.target])
    engine.link.revision = ahead
    with engine:
        await until(lambda: control.fleet.connections and control.engine().acked_revision == given)
        assert [settings.revision for settings in engine.settings] == [given]


async def test_an_engine_that_is_ahead_keeps_what_it_has_while_the_store_is_away(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_S", 0.01)
    refusals = 0
    away = True

    async def refresh() -> None:
        nonlocal refusals
        if away:
            refusals += 1
            raise StoreUnavailable("away")
        await control.refresh()

    monkeypatch.setattr(control.fleet, "_refresh", refresh)
    engine = LinkedEngine([control.target])
    engine.link.revision = 3
    with engine, LinkedEngine([control.target], "other") as other:
        await until(lambda: refusals > 2 and other.settings)
        await control.set_policy(policy())
        await until(lambda: other.link.revision == 2)
        assert not engine.settings
        await control.store.append(policy(), etag="", author="", reason="", now=utc_now())
        away = False
        await until(lambda: engine.settings and other.link.revision == 3)
        assert [settings.revision for settings in engine.settings] == [3]


async def test_all_who_watch_share_a_look(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = 0, WholeFleet.state

    async def counted(whole: WholeFleet, engine_id: str = "", local_only: bool = False) -> Any:
        nonlocal looks
        looks += 1
        return await look(whole, engine_id, local_only)

    monkeypatch.setattr(WholeFleet, "state", counted)
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        watches: list[Any] = [stub.WatchFleet(fleet_pb2.WatchFleetRequest(interval_ms=200)) for _ in range(8)]
        for watch in watches:
            await watch.read()
        looks = 0
        for _ in range(4):
            await asyncio.gather(*(watch.read() for watch in watches))
        # One for each tick; some more where the machine is slow.
        assert 3 <= looks <= 12, "32 messages were sent"
        for watch in watches:
            watch.cancel()


async def test_an_agent_that_steps_aside_says_hello_anew(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        engine.link.restart()
        await engine.steps_until(lambda: engine.streams == 2 and control.names() == ["a"])
        # The old stream's end is noticed by itself, or because of the new one.
        await until(lambda: control.fleet.stream_ends in ({"disconnected": 1}, {"replaced": 1}))
        await engine.steps_until(lambda: engine.caps() == [(0, 600)] * 2)


# ------------------------------------------------------------------------------------------------------- bad clients


@asynccontextmanager
async def call_to(target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield agent_pb2_grpc.AgentServiceStub(channel).Connect()


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await to_the_end(call)
    return raised.value.code(), raised.value.details() or ""


def bad_slot() -> agent_pb2.ConnectRequest:
    opened = agent_pb2.RequestOpened(slot=MAX_SLOTS, request_id="a")
    return agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=1, steps=1, opened=[opened]))


@pytest.mark.parametrize(
    "first", [None, bad_slot(), agent_pb2.ConnectRequest(), agent_pb2.ConnectRequest(hello=hello(""))]
)
async def test_streams_that_begin_wrongly(control: Control, first: agent_pb2.ConnectRequest | None) -> None:
    async with call_to(control.target) as call:
        if first is None:
            await call.done_writing()
        else:
            await call.write(first)
        code, text = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    named = first is not None and first.HasField("hello")
    assert text == ("hello.engine_id must not be empty" if named else "message must begin with hello")
    assert control.fleet.stream_ends == {"invalid_request": 1}
    assert not control.fleet.connections


async def test_a_broken_message_ends_its_own_stream_only(control: Control) -> None:
    with LinkedEngine([control.target], "good") as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        async with call_to(control.target) as call:
            await call.write(agent_pb2.ConnectRequest(hello=hello("bad")))
            await call.write(bad_slot())
            assert await failure(call) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"step slot must be below {MAX_SLOTS}; got {MAX_SLOTS}",
            )
        await until(lambda: control.fleet.stream_ends == {"invalid_request": 1})
        engine.open("b")
        await engine.steps_until(lambda: control.names() == ["a", "b"])
        assert engine.streams == 1


async def test_an_error_of_the_servers_own_ends_the_stream_as_such(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with call_to(control.target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))
        await until(lambda: control.fleet.connections)
        (connection,) = control.fleet.connections
        monkeypatch.setattr(connection.session, "on_message", {}.__getitem__)
        await call.write(agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot()))
        code, _ = await failure(call)
    assert code is grpc.StatusCode.INTERNAL
    assert control.fleet.stream_ends == {"internal": 1}


async def test_a_client_that_closes_its_side(control: Control) -> None:
    async with call_to(control.target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))
        await until(lambda: control.fleet.connections)
        await call.done_writing()
        await to_the_end(call)
        assert await call.code() is grpc.StatusCode.OK
    assert control.fleet.stream_ends == {"agent_closed": 1}


async def test_an_engine_that_does_not_keep_up(control: Control) -> None:
    async with call_to(control.target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))
        await until(lambda: control.fleet.connections)
        (connection,) = control.fleet.connections
        for revision in range(2, QUEUE_MESSAGES + 10):
            control.fleet._give_policy(connection, StoredRevision(revision, "", policy(), "", "", utc_now()), utc_now())
        await call.write(agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot()))
        await to_the_end(call)
    assert control.fleet.stream_ends == {"overflow": 1}
