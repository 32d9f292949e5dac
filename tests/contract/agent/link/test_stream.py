"""The stream end to end: a real server with a real store, and the agent's real link as its client."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, agent_pb2_grpc, fleet_pb2

from meridian_agent.core.step_record import StepRecord
from meridian_agent.link import outbox
from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.engine.request_table import THINK
from meridian_control.engine.token_rows import columns_of, row_count
from meridian_control.fleet.connection import QUEUE_MESSAGES
from meridian_control.policy.store import StoredRevision
from tests.contract.streams import Control, Scripted, bad_slot, call_to, failure, to_the_end
from tests.fakes.agent import hello
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of, requests_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy

# ----------------------------------------------------------------------------------------------------- a working stream


async def test_from_connect_to_the_last_outcome(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("before")
        await until(lambda: engine.link.lease.connected)
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        assert control.names() == ["before"]
        engine.open("after", own_cap=9)
        engine.step()
        await engine.hears(lambda: (1, 9) in engine.caps())
        await engine.steps_until(lambda: control.engine().ends == {"hard_cap": 1})
        shown = control.engine()
        assert (shown.acked_revision, shown.vllm_version, shown.running) == (1, "", 2)
        counts = {r.request_id: (r.think_tokens, r.output_tokens) for r in requests_of(control.fleet, "engine")}
        assert counts["after"][0] == 9
        for name in list(engine.engine.live):
            engine.engine.finish(name)
        await engine.steps_until(lambda: not control.engine().open_decisions)
        shown = control.engine()
        # Once the engine is idle, the link answers decisions itself, and the engine does not see those decisions.
        own = engine.engine.outcomes.values()
        assert sum(shown.decisions.values()) == sum(shown.outcomes.values()) >= len(own)
        assert {len(outcomes) for outcomes in own} == {1}
        assert "agent_off" not in shown.outcomes
        assert control.names() == []
        (connection,) = control.fleet.connections
        assert connection.session.totals.unknown_outcomes == 0


async def test_an_idle_engine_acknowledges_and_settles(control: Control, engine: LinkedEngine) -> None:
    """An idle engine makes no step that could carry an outcome, so the link reports the outcomes."""
    await control.set_policy(policy(scheduler={"shadow": True}))
    await until(lambda: control.engine().acked_revision == 2)
    await until(lambda: control.engine().decisions and not control.engine().open_decisions)
    engine.open("a")
    await engine.steps_until(lambda: engine.caps() == [(0, 32768)])
    plan = engine.engine.directives.plan
    assert plan is not None
    assert plan.shadow, "the plan that came while the engine was idle is in force"


async def test_the_snapshot_comes_first(scripted: Scripted) -> None:
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        engine.step()
        await until(lambda: engine.link.lease.connected)
        await engine.steps_until(lambda: "step" in scripted.kinds())
        assert scripted.kinds()[:3] == ["hello", "snapshot", "step"]
        snapshot, step = scripted.received[1].snapshot, scripted.received[2].step
        (row,) = snapshot.requests
        assert (row.slot, row.request_id) == (0, "a")
        # On a busy machine the report has more steps than the snapshot's own step.
        assert row.think_tokens == snapshot.step == step.step - step.steps + 1, "the request gets one token per step"
        assert len(step.tokens.slot) == step.steps - 1, "the first step's token is in the snapshot"
        await engine.steps_until(lambda: len(scripted.received) > 5)
        assert "snapshot" not in scripted.kinds()[2:]
        reports = [m.step for m in scripted.received[3:]]
        assert sum(len(r.tokens.slot) for r in reports) == sum(r.steps for r in reports)


async def test_each_stream_gets_the_columns_that_its_control_plane_reads(scripted: Scripted) -> None:

    def newest(engine_id: str) -> agent_pb2.TokenColumns | None:
        """Return the columns of the newest report with a row, if this engine's stream has sent one. Reports that the
        stream before it still brings do not count."""
        begun = max((n for n, kind in enumerate(scripted.kinds()) if kind == "hello"), default=None)
        if begun is None or scripted.received[begun].hello.engine_id != engine_id:
            return None
        rows = [m.step.tokens for m in scripted.received[begun:] if row_count(m.step.tokens)]
        return rows[-1] if rows else None

    for engine_id, reads in (("new", True), ("old", False)):
        scripted.reads_sparse_columns = reads
        with LinkedEngine([scripted.target], engine_id) as engine:
            engine.open("a")
            tokens = await engine.steps_until(partial(newest, engine_id))
        assert (tokens.HasField("sparse"), bool(tokens.slot)) == (reads, not reads)
        slots, phases, *_ = columns_of(tokens)[0].tolist()
        assert (set(slots), set(phases)) == ({0}, {THINK})


async def test_what_the_engine_says_before_it_knows_of_the_new_stream(scripted: Scripted) -> None:
    """A record with outcomes of the old stream is dropped, because the new stream uses the same decision ids again."""
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.lease.connected)
        engine.send(StepRecord(step=1, outcomes=[(1, 1, 0, "of the old stream", 0)]))
        engine.take_inbox()
        engine.send(StepRecord(step=2, outcomes=[(1, 2, 0, "of the new stream", 0)]))
        await until(lambda: "step" in scripted.kinds())
        assert scripted.kinds() == ["hello", "snapshot", "step"]
        assert [o.detail for o in scripted.received[-1].step.outcomes] == ["of the new stream"]


@pytest.mark.parametrize(("steps", "wait_s"), [(300, 3600.0), (1, 0.25)], ids=["interval", "wait"])
async def test_reports_are_merged_as_the_policy_says(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, steps: int, wait_s: float
) -> None:
    """A report is sent after as many steps as the interval has, or after a wait: one step does not wait for 299
    more."""
    with LinkedEngine([scripted.target]) as engine:
        scripted.say(settings={"nonce": 1, "revision": 4, "report_interval_steps": 300, "lease_ms": 3_600_000})
        await until(lambda: "settings_status" in scripted.kinds())
        engine.link.lease.merge_s = wait_s
        # On a busy machine the sender may look before all steps are made.
        first, looks, made = engine.link.outbox._first, threading.Event(), threading.Event()

        def look(*waiting: Any) -> Any:
            looks.set()
            made.wait()
            return first(*waiting)

        monkeypatch.setattr(engine.link.outbox, "_first", look)
        await until(looks.is_set)
        engine.open("a")
        for _ in range(steps):
            engine.step()
        made.set()
        await until(lambda: sum(m.step.steps for m in scripted.received) == steps)
        (report,) = scripted.heard("step")
        merged = report.merged
        # The token of the first step is in the snapshot.
        assert list(merged.rows) == ([0, *[1] * 299] if steps == 300 else [])
        assert list(merged.age_ms) == sorted(merged.age_ms, reverse=True)
        assert steps == 1 or merged.age_ms[0] > merged.age_ms[-1] == 0


async def test_a_second_stream_of_one_engine_takes_the_first_ones_place(control: Control) -> None:
    """The control plane may notice late that a half-open stream has ended, and still lists each engine only once."""
    hello = agent_pb2.ConnectRequest(hello=agent_pb2.Hello(engine_id="e", incarnation="1"))
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        first, second = stub.Connect(), stub.Connect()
        await first.write(hello)
        await first.read()
        await second.write(hello)
        await second.read()
        assert [e.engine_id for e in engines_of(control.fleet)] == ["e"]
        while await first.read() is not grpc.aio.EOF:
            pass
        await until(lambda: control.fleet.stream_ends == {"replaced": 1})
        assert [e.state for e in engines_of(control.fleet)] == [fleet_pb2.CONNECTION_STATE_CONNECTED]
        second.cancel()


@pytest.mark.parametrize(("lease_ms", "wait_s"), [(0, 0.5), (2000, 0.5), (400, 0.1)])
def test_reports_are_merged_no_longer_than_a_lease_allows(lease_ms: int, wait_s: float) -> None:
    """An interval of many steps does not delay a report until a section's lease is over."""
    engine = LinkedEngine(["nobody"])
    engine.link.lease.hold(agent_pb2.Settings(lease_ms=30_000, scheduler_lease_ms=lease_ms), None)
    assert engine.link.lease.merge_s == wait_s


@pytest.mark.parametrize(
    ("merges", "measures", "frozen", "rows", "steps"),
    [
        (True, False, False, 1, 256),
        (True, False, False, 0, 256),
        (True, False, False, 64, 128),
        (True, False, False, 1000, 24),
        (False, False, True, 1, 256),
        (True, True, False, 1, 24),
        (False, False, False, 1, 24),
    ],
)
def test_steps_of_which_nothing_is_measured_wait_for_more(
    merges: bool, measures: bool, frozen: bool, rows: int, steps: int
) -> None:
    """Nobody acts on their report, unless a request begins in it."""
    link = LinkedEngine(["nobody"]).link
    settings = agent_pb2.Settings(lease_ms=30_000, report_interval_steps=24, merge_unmeasured=merges)
    link.lease.hold(settings, None)
    link.lease.freeze_for(3600.0 if frozen else 0.0)
    link.outbox.measures, link.outbox._rows = measures, rows
    assert link.outbox._wanted() == (24, steps)


@pytest.mark.parametrize(
    ("interval", "step_tokens", "late"), [(24, 1, 24), (1000, 1, 24), (24, 9, 2), (24, 100, 1), (8, 2, 8), (1, 1, 1)]
)
def test_the_report_of_a_new_request_waits_for_few_of_its_tokens(interval: int, step_tokens: int, late: int) -> None:
    """A policy's cap of 128 tokens reaches the engine in time whatever the interval is and however many draft tokens a
    step has."""
    link = LinkedEngine(["nobody"]).link
    link.lease.hold(agent_pb2.Settings(lease_ms=30_000, report_interval_steps=interval), None)
    link.outbox.step_tokens = step_tokens
    assert link.outbox._wanted() == (late, interval)


@pytest.mark.parametrize(
    ("interval_ms", "step_ms", "steps"), [(0, 1.0, 8), (40, 1.0, 24), (40, 2.5, 16), (40, 5.0, 8), (40, 30.0, 8)]
)
def test_fast_steps_wait_for_more(interval_ms: int, step_ms: float, steps: int) -> None:
    link = LinkedEngine(["nobody"]).link
    settings = agent_pb2.Settings(lease_ms=30_000, report_interval_steps=8, report_interval_ms=interval_ms)
    link.lease.hold(settings, None)
    assert link.outbox._wanted() == (8, 8), "the time of a step is not known"
    link.outbox._step_ms = step_ms
    assert link.outbox._wanted() == (steps, steps)


async def test_what_waits_for_no_interval(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream whose reports wait for hours, the snapshot that begins it and the last step before a rest are sent at
    once."""
    monkeypatch.setattr(outbox, "IDLE_WAIT_S", 3600.0)
    with LinkedEngine([scripted.target]) as engine:
        engine.link.lease.hold(agent_pb2.Settings(lease_ms=3_600_000, report_interval_steps=300), None)
        engine.link.lease.merge_s = 3600.0
        engine.open("a")
        await until(lambda: engine.link.lease.connected)
        engine.step()
        await until(lambda: "snapshot" in scripted.kinds())
        engine.engine.finish("a")
        engine.step()
        await until(lambda: scripted.received[-1].step.closed)


async def test_an_agent_that_steps_aside_says_hello_anew(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        engine.link.restart()
        await engine.steps_until(lambda: engine.streams == 2 and control.names() == ["a"])
        # The control plane notices the end of the old stream by itself, or because the new stream replaces it. gRPC's
        # server may end a cancelled call's messages, as if the agent had closed the call, before it cancels the call.
        reasons = ("disconnected", "replaced", "agent_closed")
        await until(lambda: control.fleet.stream_ends in [{reason: 1} for reason in reasons])
        await engine.steps_until(lambda: engine.caps() == [(0, 600)] * 2)


# ------------------------------------------------------------------------------------------------------- bad clients


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


async def test_a_broken_message_ends_its_own_stream_only(control: Control, caplog: pytest.LogCaptureFixture) -> None:
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
        assert control.parts.gate.faults.counts == {"invalid_request": 1}
        assert not any(record.exc_info for record in caplog.records)
        engine.open("b")
        await engine.steps_until(lambda: control.names() == ["a", "b"])
        assert engine.streams == 1


@pytest.mark.parametrize("says_so", [False, True])
async def test_a_client_that_ends_its_stream(control: Control, says_so: bool) -> None:
    """A client closes its side; or it says that its engine shuts down, and then its connection breaks."""
    async with call_to(control.target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))
        await until(control.connected)
        (connection,) = control.fleet.connections
        if says_so:
            await call.write(agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(last=True)))
            await until(lambda: connection.session.shuts_down)
            call.cancel()
            await until(lambda: control.fleet.stream_ends)
        else:
            await call.done_writing()
            await to_the_end(call)
            assert await call.code() is grpc.StatusCode.OK
    assert control.fleet.stream_ends == {"agent_closed": 1}


async def test_an_engine_that_fails_is_lost(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        await until(lambda: engine.link.lease.connected)
        engine.link.stop(fails=True)
        await until(lambda: control.fleet.stream_ends)
    assert control.fleet.stream_ends == {"disconnected": 1}
    assert control.engine().lost


async def test_an_engine_that_does_not_keep_up(control: Control) -> None:
    async with call_to(control.target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))
        await until(control.connected)
        (connection,) = control.fleet.connections
        for revision in range(2, QUEUE_MESSAGES + 10):
            control.fleet._policies.give(connection, StoredRevision(revision, "", "", "", utc_now(), policy()))
        # The stream ends although the engine says nothing.
        await to_the_end(call)
    assert control.fleet.stream_ends == {"overflow": 1}
