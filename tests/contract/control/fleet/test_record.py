"""Recording from a real server: the contents of a recording, and that no recorder ever delays an agent."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from datetime import UTC
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from meridian.v1 import agent_pb2, audit_pb2, fleet_pb2, fleet_pb2_grpc

from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.engine.session import Session
from meridian_control.fleet import recording
from meridian_control.offline.episodes import collect
from meridian_control.offline.trace_file import read
from meridian_control.policy import formats as forms
from meridian_control.server.rate_limits import CallLimits, Limiter
from tests.contract.clients import calling
from tests.contract.ctl import FakeFleet, run
from tests.contract.streams import Control, bad_slot, call_to, failure
from tests.fakes import traces
from tests.fakes.agent import FakeAgent, Script, hello
from tests.fakes.fleets import engines_of
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy
from tests.processes import MERIDIANCTL, begin

OK, FAILED, INVALID, UNREACHABLE = range(4)


class Recorder:
    """A client of RecordTrace that reads only when a test tells it to read."""

    def __init__(self, control: Control, engine_id: str = "") -> None:
        self.control = control
        # The transport buffers no more than it must for a client that does not read.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
        self.channel = grpc.aio.insecure_channel(control.target, options)
        stub = fleet_pb2_grpc.FleetServiceStub(self.channel)
        self.call: Any = stub.RecordTrace(fleet_pb2.RecordTraceRequest(engine_id=engine_id))
        self.responses = aiter(self.call)

    async def __aenter__(self) -> Recorder:
        await self.call.initial_metadata()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def read(self, count: int) -> list[fleet_pb2.TraceRecord]:
        return [(await anext(self.responses)).record for _ in range(count)]

    async def rest(self) -> list[fleet_pb2.TraceRecord]:
        return [response.record async for response in self.responses]

    async def finished(self) -> list[fleet_pb2.TraceRecord]:
        """End the only recording that runs, and return the records that are left."""
        (waiting,) = self.control.fleet.recordings
        waiting.close()
        return await self.rest()


async def stream_of(target: str, agent: FakeAgent, steps: int, **fields: Any) -> None:
    """Play the whole stream of an agent, which opens a request with these fields from time to time, and disconnect."""
    async with call_to(target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))

        async def listen() -> None:
            # The responses bypass the agent's checker, because the agent makes steps while answers are under way.
            async for response in call:
                if response.HasField("settings"):
                    settings = response.settings
                    agent.say(settings_status={"nonce": settings.nonce, "revision": settings.revision})
                elif response.HasField("directives"):
                    agent.engine.accept(response.directives)

        listening = asyncio.create_task(listen())
        for step in range(steps):
            if step % 7 == 0:
                agent.open(f"r{step}", Script(think_tokens=step % 11 + 2, answer_tokens=3), **fields)
            agent.step()
            for message in agent.heard():
                await call.write(message)
            await asyncio.sleep(0.002)
        await call.done_writing()
        await listening


def replayed(records: list[fleet_pb2.TraceRecord]) -> list[agent_pb2.ConnectResponse]:
    """Return what a new session answers to the messages of a recorded session, at the recorded times."""
    first = records[0]
    session = Session(first.session_id, first.up.hello, first.time.ToDatetime(UTC), parts=STREAM_PARTS)
    said: list[agent_pb2.ConnectResponse] = []
    for record in records[1:]:
        if record.HasField("policy"):
            said += session.on_policy(record.policy.revision, forms.from_proto(record.policy.policy))
        elif record.HasField("end_thinking"):
            ended = session.on_end_thinking(record.end_thinking.request_id, "", record.time.ToDatetime(UTC))
            said += ended.responses if ended is not None else []
        elif record.HasField("up"):
            said += session.on_message(record.up, record.time.ToDatetime(UTC))
        else:
            session.on_record(record)
    return said


def check_replay(records: list[fleet_pb2.TraceRecord]) -> None:
    """Assert that a new session gives exactly the recorded answers, after the Welcome."""
    sent = [r.down.SerializeToString(deterministic=True) for r in records if r.HasField("down")]
    assert sent[1:] == [response.SerializeToString(deterministic=True) for response in replayed(records)]


async def test_a_recorded_session_replays_exactly(control: Control) -> None:
    await control.set_policy(policy(entropy={"shadow": False, "eat_probe_interval_tokens": 2, "eat_warmup_samples": 2}))
    agent = FakeAgent()
    async with Recorder(control) as recorder:
        playing = asyncio.create_task(stream_of(control.target, agent, 120))
        await until(lambda: any(engine.step > 40 for engine in engines_of(control.fleet)))
        await control.set_policy(policy(scheduler={"max_think_tokens": 5, "min_think_tokens": 0}))
        await playing
        records = await recorder.finished()
    assert len({record.session_id for record in records}) == 1
    assert not any(record.joined_late for record in records)
    down = [record.down for record in records if record.HasField("down")]
    assert down[0].HasField("welcome")
    assert [kind for kind in (d.WhichOneof("message") for d in down) if kind == "settings"] == ["settings"] * 2
    assert sum(len(d.directives.forces) + len(d.directives.probes) + len(d.directives.caps) for d in down) > 10
    check_replay(records)
    times = [record.time.ToNanoseconds() for record in records]
    assert times == sorted(times)


async def test_a_refused_message_is_in_no_recording(control: Control) -> None:
    """A recording holds only messages that replay, so a message that the session refused is left out."""
    async with Recorder(control) as recorder, call_to(control.target) as call:
        await call.write(agent_pb2.ConnectRequest(hello=hello()))
        opened = agent_pb2.RequestOpened(slot=0, request_id="a")
        await call.write(agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=1, steps=1, opened=[opened])))
        await call.write(bad_slot())
        await failure(call)
        records = await recorder.finished()
    replayed(records)
    assert [r.up.WhichOneof("message") for r in records if r.HasField("up")] == ["hello", "step"]


async def test_a_session_under_way(control: Control, tmp_path: Path) -> None:
    with LinkedEngine([control.target], "e") as engine:
        engine.open("before")
        await engine.steps_until(engine.caps)
        async with Recorder(control, "e") as recorder:
            first, given = await recorder.read(2)
            assert (first.up.hello.engine_id, first.joined_late) == ("e", True)
            assert given.policy.revision == 1
            assert forms.from_proto(given.policy.policy).scheduler.max_think_tokens == 600
            engine.open("after")
            await engine.steps_until(lambda: len(engine.caps()) == 2)
            control.fleet.going_away("enough")
            records = [first, given, *await recorder.rest()]
    assert records[-1].down.HasField("going_away")
    found = collect([traces.write(tmp_path / "a.trace", records)])
    assert found.seen == {"after"}


async def test_a_client_that_leaves_at_any_moment_is_neither_refused_nor_an_error(control: Control) -> None:
    """gRPC ends some of these calls before it cancels their tasks."""
    control.parts.gate.limiter = Limiter(CallLimits(1e9, 10**9, streams=400, all_streams=400))
    async with calling(control.target) as clients:
        for number in range(400):
            begun = clients.fleet.RecordTrace(fleet_pb2.RecordTraceRequest(), timeout=0.001 + number / 130_000)
            assert (await failure(begun))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        asked = audit_pb2.ListAuditRequest(page_size=1000)
        while "" in (outcomes := {record.outcome for record in (await clients.audit.ListAudit(asked)).records}):
            await asyncio.sleep(0.01)
    assert outcomes <= {"CANCELLED"}


async def test_a_killed_recorder_changes_nothing(control: Control) -> None:
    with LinkedEngine([control.target]) as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        async with Recorder(control) as recorder:
            await recorder.read(2)
            assert len(control.fleet.recordings) == 1
        await until(lambda: not control.fleet.recordings)
        step = engine.engine.step
        await engine.steps_until(lambda: control.engine().step > step + 20)
        assert engine.streams == 1


async def test_a_slow_recorder_is_dropped_and_told(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "QUEUE_RECORDS", 100)
    with LinkedEngine([control.target]) as engine:
        engine.open("long")
        await engine.steps_until(engine.caps)
        async with Recorder(control) as slow:
            (first,) = control.fleet.recordings
            async with Recorder(control) as quick:
                (second,) = (r for r in control.fleet.recordings if r is not first)
                reading = asyncio.create_task(quick.rest())

                async def step_on() -> None:
                    """Make a step, and wait while so much is under way that the quick client would be too slow.

                    Each step ends a request and opens one with long texts, which soon fill what the transport takes.
                    """
                    engine.engine.abort("long")
                    engine.open("long", tenant="t" * 900, effort="e" * 900)
                    engine.step()
                    await asyncio.sleep(0.002)
                    await until(lambda: engine.engine.step - control.engine().step < 60 and len(second._waiting) < 30)

                while not first.overflowed:
                    await step_on()
                # The agent's stream goes on, and so does the other recording.
                step = engine.engine.step
                while control.engine().step <= step + 20:
                    await step_on()
                got: list[fleet_pb2.TraceRecord] = []
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await read_into(got, slow)
                assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "records already sent are valid" in (raised.value.details() or "")
                await until(lambda: len(control.fleet.recordings) == 1)
                (left,) = control.fleet.recordings
                left.close()
                assert last_step_of(await reading) > step
                assert 0 < last_step_of(got) < step
        assert engine.streams == 1


async def read_into(got: list[fleet_pb2.TraceRecord], recorder: Recorder) -> None:
    while True:
        got += await recorder.read(1)


def last_step_of(records: list[fleet_pb2.TraceRecord]) -> int:
    """Return the newest step, and assert that no step before it is missing."""
    reports = [record.up.step for record in records if record.up.HasField("step")]
    for earlier, later in pairwise(reports):
        assert later.step - later.steps == earlier.step
    return reports[-1].step


# ------------------------------------------------------------------------------------------------------- meridianctl


async def test_record_so_many_requests(control: Control, tmp_path: Path) -> None:
    out = tmp_path / "a.trace"
    recording_ = asyncio.create_task(run("record", out, "--requests", 3, server=control.target))
    await until(lambda: control.fleet.recordings)
    await stream_of(control.target, FakeAgent(), 60)
    result = await recording_
    assert result.exit_code == OK, result.output
    assert result.stdout.startswith(f"{out}: 3 requests, ")
    assert result.stdout.endswith(f", {out.stat().st_size} bytes\n")
    records = list(read(out))
    assert records[0].up.HasField("hello")
    assert len(records[-1].up.step.closed) == 1


async def test_record_for_a_while(control: Control, tmp_path: Path) -> None:
    joined: list[bool] = []
    with LinkedEngine([control.target], "e") as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        # On a busy machine the shortest time may be over before a record arrives.
        for seconds in (0.5, 2, 8, 32):
            out = tmp_path / f"{seconds}.trace"
            result = await run("record", out, "--engine", "e", "--duration", seconds, server=control.target)
            joined = [r.joined_late for r in read(out)] if out.exists() else []
            if len(joined) > 1:
                break
    assert result.exit_code == OK, result.output
    # The recording begins on a running stream, so exactly its first record says that it joined late.
    assert len(joined) > 1
    assert joined == [True, *[False] * (len(joined) - 1)]


async def test_record_until_interrupted(control: Control, tmp_path: Path) -> None:
    out = tmp_path / "a.trace"
    command = [*MERIDIANCTL, "record", str(out)]
    environment = {**os.environ, "MERIDIAN_SERVER": control.target}
    told, errors = tmp_path / "told", tmp_path / "errors"
    with open(os.devnull, "rb") as given, told.open("wb") as said, errors.open("wb") as complained:
        process = begin(command, [given.fileno(), said.fileno(), complained.fileno()], environment)
    try:
        await until(lambda: control.fleet.recordings, 30)
        # The recorder writes to the file once it has taken in more than it packs at once. Random text hardly packs.
        while not out.stat().st_size:
            random_text = {name: secrets.token_urlsafe(750) for name in ("tenant", "effort")}
            await stream_of(control.target, FakeAgent(), 10, **random_text)
        process.send_signal(signal.SIGINT)
        await until(lambda: process.poll() is not None, 120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors.read_text()) == (OK, "")
    assert told.read_text().startswith(f"{out}: ")
    steps = [record.up.step.step for record in read(out) if record.up.HasField("step")]
    assert steps


async def test_record_over_a_restart_of_the_control_plane(control: Control, tmp_path: Path) -> None:
    out = tmp_path / "a.trace"
    with LinkedEngine([control.target], "e") as engine:
        engine.open("a")
        await engine.steps_until(engine.caps)
        recording_ = asyncio.create_task(run("record", out, "--requests", 1, server=control.target))
        await until(lambda: control.fleet.recordings)
        await engine.steps_until(lambda: engine.engine.step > 20)
        await control.kill()
        await control.start()
        await until(lambda: control.fleet.recordings)
        await engine.steps_until(lambda: len(engine.caps()) == 2)
        engine.open("b")
        await engine.steps_until(lambda: len(engine.caps()) == 3)
        engine.engine.finish("b")
        await engine.steps_until(recording_.done)
        result = await recording_
    assert result.exit_code == OK, result.output
    assert result.stdout.rstrip().endswith(", 1 interruptions")
    hellos = [record for record in read(out) if record.up.HasField("hello")]
    assert len({record.session_id for record in hellos}) == 2


async def test_record_to_a_file_that_is_there(control: Control, tmp_path: Path) -> None:
    (tmp_path / "a.trace").write_text("x")
    result = await run("record", tmp_path / "a.trace", server=control.target)
    assert result.exit_code == INVALID
    assert result.stderr == f"{tmp_path / 'a.trace'}: cannot be written: File exists\n"


async def test_a_recording_of_nothing_says_so(control: Control, tmp_path: Path) -> None:
    out = tmp_path / "a.trace"
    result = await run("record", out, "--duration", 0.1, server=control.target)
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert result.stderr == f"{out} was not written, because no message of an engine arrived\n"
    assert not out.exists()


async def test_record_that_the_server_ends(tmp_path: Path) -> None:
    """The records that arrived before the server's error are kept, as a whole trace."""
    fleet = FakeFleet()
    fleet.records = traces.records([traces.made_up(0)])
    fleet.records_end = grpc.StatusCode.RESOURCE_EXHAUSTED
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    out = tmp_path / "a.trace"
    result = await run("record", out, server=f"127.0.0.1:{port}")
    await server.stop(0)
    assert (result.exit_code, result.stderr) == (FAILED, "RESOURCE_EXHAUSTED: the end\n")
    assert result.stdout.startswith(f"{out}: 1 requests, ")
    assert list(read(out)) == fleet.records
