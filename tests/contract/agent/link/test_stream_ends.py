"""Streams that end or break: the agent connects again, and each decision still has its outcome."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import STEP_DECISIONS
from meridian_agent.core.step_record import COUNTERS, StepRecord
from meridian_agent.link import control_stream as link
from meridian_agent.link import inbox, outbox
from meridian_agent.link.inbox import INBOX_DECISIONS, INBOX_MESSAGES
from meridian_agent.link.messages import decisions_in
from meridian_agent.link.outbox import RING_RECORDS
from meridian_agent.link.record_queue import RecordQueue
from meridian_control.server import agent_service
from tests.contract.streams import Clock, Control, Scripted, controlling
from tests.fakes.control import utc_now
from tests.fakes.fleets import engines_of, requests_of
from tests.fakes.linked import LinkedEngine, until
from tests.processes import BUSY


async def test_a_server_that_is_killed_and_comes_back(control: Control) -> None:
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.caps() == [(0, 600)])
        assert not engine.link.lapsed()
        assert engine.link.lease.state == control.engine().agent_state == agent_pb2.AGENT_STATE_READY
        await control.kill()
        await until(lambda: control.engine().agent_state == engine.link.lease.state == agent_pb2.AGENT_STATE_STALE)
        engine.step()
        assert not engine.link.lapsed()
        clock.now += 30.1
        assert engine.link.lapsed()
        assert engine.link.lease.state == agent_pb2.AGENT_STATE_DEGRADED
        control.fleet.views._clock = lambda: utc_now() + timedelta(seconds=31)
        assert control.engine().agent_state == agent_pb2.AGENT_STATE_DEGRADED
        await control.start()
        await until(lambda: engine.link.lease.connected)
        assert engine.link.lapsed(), "the control plane does not know the requests yet"
        await engine.steps_until(lambda: not engine.link.lapsed())
        await engine.steps_until(lambda: engine.caps() == [(0, 600)] * 2)
        assert (engine.streams, control.names()) == (2, ["a"])
        (tr,) = engine.engine.live.values()
        await until(lambda: requests_of(control.fleet)[0].think_tokens == tr.state.think_tokens)
        engine.engine.finish("a")
        await engine.steps_until(lambda: not control.engine().open_decisions)
        assert "agent_off" not in control.engine().outcomes
        totals = await control.fleet.totals()
        assert totals.unknown_outcomes == 0, "no outcome of the old stream may reach the new stream"


async def test_a_server_that_never_answers(scripted: Scripted) -> None:
    scripted.welcomes = False
    clock = Clock()
    with LinkedEngine([scripted.target], clock=clock) as engine:
        engine.open("a")
        await until(lambda: scripted.received)
        for _ in range(100):
            engine.step()
        assert not engine.link.lease.connected
        assert engine.link.outbox.ring.qsize() == 0
        assert engine.link.outbox.reports_dropped == 0, "reports before a welcome do not count as dropped"
        clock.now += 30.1
        assert engine.link.lapsed()


async def test_a_server_that_begins_without_a_welcome_is_not_obeyed(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """No outcome would reach the server, and its messages would renew the lease without end."""
    scripted.welcomes = False
    clock = Clock()
    with LinkedEngine([scripted.target], clock=clock) as engine:
        engine.open("a")
        for streams in range(1, 4):
            scripted.say(directives={"step": 1, "plan": {"decision_id": 1}})
            await engine.steps_until(lambda wanted=streams: scripted.kinds().count("hello") > wanted)  # type: ignore[misc]
        clock.now += 30.1
        assert engine.link.lapsed()
        assert engine.taken == []
    assert "ended: it began without a Welcome" in caplog.text


async def test_a_server_that_never_answers_is_left_for_another(
    scripted: Scripted, control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.welcomes = False
    monkeypatch.setattr(link, "PATIENCE_S", (3600.0, 3600.0))
    with LinkedEngine([scripted.target, control.target]) as engine:
        timers: list[threading.Timer] = []

        def timer_runs() -> bool:
            running = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
            timers[:] = [timer for timer in running if timer.function == engine.link._lose_patience]
            return bool(timers)

        # Hello may arrive before the link has started its timer.
        await until(lambda: scripted.received and timer_runs())
        # The first timer runs out here, because on a busy machine a short one could run out before Hello arrives.
        (timer,) = timers
        assert timer.interval == 3600.0
        timer.function(*timer.args)
        await until(lambda: engine.link.lease.connected)
        assert scripted.kinds() == ["hello"]
        assert control.engine().engine_id == "engine"
    assert f"no stream to {scripted.target}: no answer within 3600 s" in caplog.text


async def test_a_server_that_is_slow_to_answer_is_waited_for_in_the_end(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link waits longer for a welcome after each attempt that failed."""
    scripted.welcomes = False
    monkeypatch.setattr(link, "PATIENCE_S", (0.02, 60.0))
    begun_s: list[float] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            begun_s.append(self.interval)
            super().start()

    monkeypatch.setattr(threading, "Timer", Timer)
    with LinkedEngine([scripted.target]) as engine:
        await until(lambda: len(begun_s) >= 6)
        assert begun_s[:6] == [0.02 * 2**attempt for attempt in range(6)]
        # On a busy machine one of the next attempts may be given up, too.
        scripted.welcomes = True
        await until(lambda: engine.link.lease.connected)


async def test_a_server_that_ends_every_stream_is_called_less_and_less(scripted: Scripted) -> None:
    """The delay between calls grows, so that a fleet of agents does not overload a server that is about to fail."""
    pauses_s: list[float] = []
    engine = LinkedEngine([scripted.target])
    wait = engine.link._stop.wait

    def pauses(seconds: float) -> bool:
        pauses_s.append(seconds)
        return wait(seconds)

    engine.link._stop.wait = pauses  # type: ignore[method-assign, assignment]
    with engine:
        for calls in range(1, 7):
            # Before the next stream begins, the server's side of the last one may still take what is said.
            await until(lambda wanted=calls: len(scripted.heard("hello")) >= wanted)  # type: ignore[misc]
            scripted.say(going_away={})
            await until(lambda wanted=calls: len(pauses_s) >= wanted)  # type: ignore[misc]
        assert engine.link.lease.revision == 0
    low, high = link.BACKOFF_S
    # The jitter of these engines is the smallest, a tenth of the product's mean.
    assert pauses_s[:6] == [pytest.approx(0.05 * min(high, low * 2**attempt)) for attempt in range(1, 7)]


async def test_a_server_that_stops_reading(scripted: Scripted) -> None:
    scripted.reading.clear()
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.lease.connected)
        engine.take_inbox()
        gaps, dropped = 0, False
        # This loop would hang if `send` waited for the server.
        for sent in range(400_000):
            reports_dropped = engine.link.outbox.reports_dropped
            record = StepRecord(step=sent, outcomes=[(sent + 1, 1, 0, "", 0)], slots=[0] * 50)
            record.phases = record.flags = record.rows = [2] * 50
            engine.send(record)
            before, dropped = dropped, engine.link.outbox.reports_dropped > reports_dropped
            # gRPC may still take out some records after the first loss, which makes room for a few more.
            gaps += dropped and not before
            assert engine.link.outbox.ring.qsize() <= RING_RECORDS + 2
            if engine.link.outbox.reports_dropped >= 100:
                break
        assert engine.link.outbox.reports_dropped == 100
        # When the server reads again, the waiting records arrive, then a snapshot in place of the lost records, and no
        # outcome is missing.
        scripted.reading.set()
        await until(lambda: engine.link.outbox.ring.qsize() == 0)
        outbox = engine.link.outbox
        outbox.counters = lambda: tuple(outbox.reports_dropped * (name == "reports_dropped") for name in COUNTERS)
        last = StepRecord(step=sent + 1)
        engine.send(last)
        await until(lambda: scripted.received[-1].step.step == sent + 1)
        assert scripted.kinds()[-2:] == ["snapshot", "step"]
        assert scripted.kinds().count("snapshot") == 1 + gaps
        assert scripted.received[-1].step.counters.reports_dropped == 100
        reported = [o.decision_id for m in scripted.received for o in m.step.outcomes]
        assert sorted(reported) == list(range(1, sent + 2))
        assert sum(m.step.steps for m in scripted.received) == sent + 2 - 100


async def test_messages_that_nobody_takes_in(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """If the engine makes no step, it takes in no messages, and the link begins a new stream rather than lose a
    decision unnoticed."""
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        for number in range(INBOX_MESSAGES + 1):
            scripted.say(directives={"step": number, "caps": [{"decision_id": number + 1}]})
        await until(lambda: scripted.kinds().count("hello") == 2, 20)
        await until(lambda: engine.link.lease.connected)
        engine.take_inbox()
        assert (engine.streams, engine.taken) == (1, []), "messages of the old stream are dropped with the stream"
    assert any("opening a new stream" in r.message for r in caplog.records)


def flood(scripted: Scripted, messages: int, decisions: int) -> None:
    probes = [agent_pb2.EatProbe(decision_id=number + 1, slot=9) for number in range(decisions)]
    for _ in range(messages):
        scripted.say(directives=agent_pb2.Directives(step=1, probes=probes))


@pytest.mark.parametrize(("messages", "decisions"), [(50, 300), (2, 7500)])
async def test_a_flood_is_taken_in_bit_by_bit(scripted: Scripted, messages: int, decisions: int) -> None:
    """No step takes in many more than STEP_DECISIONS decisions, however large a message is, and in the end each
    decision has its outcome."""
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        flood(scripted, messages, decisions)
        waiting = engine.link.inbox.messages
        await until(lambda: sum(decisions_in(m) for m in list(waiting) if m) == messages * decisions)
        taken = []
        while engine.link.inbox.messages:
            before = len(engine.taken)
            engine.step()
            taken.append(sum(map(decisions_in, engine.taken[before:])))
        assert STEP_DECISIONS <= max(taken) < STEP_DECISIONS + inbox.PART_DECISIONS
        assert sum(taken) == messages * decisions
        await engine.steps_until(lambda: sum(len(m.step.outcomes) for m in scripted.received) == messages * decisions)
        assert engine.streams == 1


@pytest.mark.parametrize("idle", [False, True])
async def test_a_flood_past_all_measure_ends_the_stream(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Every queue stays bounded, also for an idle engine, for which the link reports outcomes that gRPC does not take
    because the server does not read."""
    monkeypatch.setattr(outbox, "RING_RECORDS", 50)
    for name in ("INBOX_MESSAGES", "INBOX_DECISIONS"):
        monkeypatch.setattr(inbox, name, 50)
    scripted.reading.clear()

    def none_in_time(_: Any, timeout: float, *wanted: int) -> None:
        time.sleep(min(timeout, 0.01))
        raise queue.Empty

    waits: list[tuple[int, int]] = []
    receive = link.ControlStream._receive

    def received(stream: link.ControlStream, response: agent_pb2.ConnectResponse) -> None:
        receive(stream, response)
        waits.append((stream.inbox._in - stream.inbox._out, stream.outbox.ring.qsize()))

    monkeypatch.setattr(link.ControlStream, "_receive", received)
    if idle:
        monkeypatch.setattr(RecordQueue, "get", none_in_time)
    with LinkedEngine([scripted.target]) as engine:
        if not idle:
            engine.open("a")
        flood(scripted, *((300, 1) if idle else (10, 20)))
        # The messages that are left may end further streams.
        await until(lambda: scripted.kinds().count("hello") >= 2, 20)
    decisions, records = map(max, zip(*waits, strict=True))
    if idle:
        assert (decisions, records) == (0, 50 + 50)
    else:
        assert 50 - 20 < decisions <= 50


async def test_outcomes_that_nobody_reads_are_bounded(scripted: Scripted) -> None:
    scripted.reading.clear()
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.lease.connected)
        engine.take_inbox()
        outcomes = [(1, 1, 0, "", 0)] * 1000
        for step in range(1, 2 * INBOX_DECISIONS // 1000):
            engine.send(StepRecord(step=step, outcomes=list(outcomes)))
            if scripted.kinds().count("hello") == 2:
                break
        await until(lambda: scripted.kinds().count("hello") == 2)
        await until(lambda: engine.link.lease.connected)
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
            (gone,) = engines_of(control.fleet)
            assert gone.open_decisions == 0
            assert sum(gone.decisions.values()) == sum(gone.outcomes.values())


async def test_an_engine_that_makes_no_step_leaves_all_the_same(control: Control) -> None:
    """vLLM may be paused, or in a long step."""
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: control.names() == ["a"])
        (first,) = control.fleet.connections
        control.fleet.send_away(first, "a test")
        await until(lambda: control.fleet.connections and first not in control.fleet.connections)
        await engine.steps_until(lambda: control.names() == ["a"])
        assert control.fleet.stream_ends == {"going_away": 1}


async def test_an_old_stream_is_left_before_it_breaks_off(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_service, "LASTS_S", (0.0, 0.0))
    with LinkedEngine([control.target]) as engine:
        await until(lambda: control.fleet.stream_ends.get("going_away"))
        monkeypatch.undo()
        await until(lambda: engine.link.lease.connected and control.connected())


# Parts of programs with an engine's link.
MADE = """
import atexit, sys, threading, time
from meridian.v1 import agent_pb2
from meridian_agent.link.control_stream import ControlStream

link = ControlStream(sys.argv[1:], lambda: agent_pb2.Hello(engine_id="e"), lambda _: None, lambda _: None)
"""
CONNECTED = """
link.start()
while not link.lease.connected:
    time.sleep(0.01)
"""

# A program whose engine is shut down by Python at the program's end, as vLLM's in the same process is. On every version
# of Python it starts no thread then, as on the newer ones.
ENDS = f"""{MADE}
def started(thread, start=threading.Thread.start):
    assert threading.main_thread().is_alive(), "can't create new thread at interpreter shutdown"
    start(thread)

threading.Thread.start = started
atexit.register(link.stop)
{CONNECTED}"""

IMPORTS = f"""{MADE}
def imported(event, arguments):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        print(arguments[0], file=sys.stderr)

sys.addaudithook(imported)
{CONNECTED}
link.stop()
"""


async def run(program: str, target: str) -> None:
    """Run a program, which must end well and write nothing to its standard error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, target, stderr=pipe)
    _, error = await asyncio.wait_for(process.communicate(), 10 * BUSY)
    assert (process.returncode, error) == (0, b"")


async def test_an_engine_that_ends_with_its_program_says_goodbye(scripted: Scripted) -> None:
    scripted.welcomes = False
    scripted.say(welcome=agent_pb2.Welcome(session_id="s", heartbeat_ms=3_600_000))
    await run(ENDS, scripted.target)
    assert [heartbeat.last for heartbeat in scripted.heard("heartbeat")] == [True]


async def test_a_stream_imports_nothing(scripted: Scripted) -> None:
    """The engine may be going through the loaded modules meanwhile, or through their loggers as pytest does."""
    await run(IMPORTS, scripted.target)
