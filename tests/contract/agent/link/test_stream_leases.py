"""Leases and freezes on the stream: the agent notices by itself when decisions are no longer in force."""

from __future__ import annotations

import pytest
from meridian.v1 import agent_pb2

from tests.contract.streams import Clock, Control, Scripted
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy


async def test_leases_are_sent_and_answered_within(control: Control) -> None:
    """A busy stream without decisions is answered often enough that no lease runs out."""
    # The lease would run out on a machine that is too busy.
    with LinkedEngine([control.target], clock=Clock()) as engine:
        await until(lambda: control.connected() and control.engine().acked_revision == 1)
        engine.open("a")
        for revision, section in enumerate(("scheduler", "entropy", "kv_memory"), 2):
            await control.set_policy(policy(**{section: {"lease_ms": 300}}))
            await engine.steps_until(lambda wanted=revision: control.engine().acked_revision == wanted)  # type: ignore[misc]
            assert getattr(engine.settings[-1], f"{section}_lease_ms") == 300
            (connection,) = control.fleet.connections
            assert connection.session._ack_interval_s == 0.075


async def test_after_a_thaw_the_agent_tells_everything_anew(scripted: Scripted) -> None:
    """The first freeze ends by itself, the second one by a command."""
    clock = Clock()
    with LinkedEngine([scripted.target], clock=clock) as engine:
        engine.open("a")
        for nonce, remaining_ms, snapshots in ((1, 5000, 2), (2, 60_000, 2), (3, 0, 3)):
            scripted.say(freeze={"nonce": nonce, "remaining_ms": remaining_ms})
            status = agent_pb2.FreezeStatus(nonce=nonce, frozen=remaining_ms > 0)
            await engine.steps_until(lambda wanted=status: scripted.heard("freeze_status")[-1:] == [wanted])  # type: ignore[misc]
            if nonce == 1:
                clock.now = 4.9
                assert engine.link.lease.frozen()
                clock.now = 5.1
            await engine.steps_until(lambda wanted=snapshots: scripted.kinds().count("snapshot") == wanted)  # type: ignore[misc]


async def test_an_agent_that_has_stepped_aside_is_frozen_at_once(scripted: Scripted) -> None:
    """An agent that has stepped aside makes no step, and its engine is stock vLLM already, so the link confirms the
    freeze at once."""
    with LinkedEngine([scripted.target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.lease.connected)
        engine.link.step_aside()
        await until(lambda: scripted.kinds().count("hello") == 2)
        scripted.say(freeze={"nonce": 1, "remaining_ms": 1000})
        await until(lambda: "freeze_status" in scripted.kinds())


async def test_a_stream_that_is_silent_past_the_lease_is_given_up(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with LinkedEngine([scripted.target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: "step" in scripted.kinds())
        scripted.say(directives={"step": engine.engine.tracker.newest})
        await until(lambda: engine.link.lease.unheard_since is None)
        clock.now = 100.0
        assert not engine.link.lapsed(), "no report waits for an answer"
        engine.step()
        clock.now = 130.0
        assert not engine.link.lapsed()
        clock.now = 130.1
        assert engine.link.lapsed()
        await until(lambda: scripted.kinds().count("hello") == 2)
        await until(lambda: engine.link.lease.connected)
        await engine.steps_until(lambda: scripted.kinds().count("snapshot") == 2)
        assert engine.link.lapsed(), "a new stream alone renews no lease"
        assert scripted.kinds().count("hello") == 2, "a new stream has a full lease for its first answer"
        scripted.say(directives={"step": engine.engine.tracker.newest})
        await until(lambda: not engine.link.lapsed())
    assert f"stream to {scripted.target} ended: nothing heard for 30.1 s" in caplog.text


async def test_a_control_plane_that_hangs_is_left_for_another(scripted: Scripted, control: Control) -> None:
    """Also if chance would choose it again."""
    clock = Clock()
    with LinkedEngine([scripted.target, control.target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: "step" in scripted.kinds())
        clock.now += 30.1
        assert engine.link.lapsed()
        await engine.steps_until(lambda: control.connected() or scripted.kinds().count("hello") > 1)
        assert control.connected()
        await engine.steps_until(lambda: not engine.link.lapsed())


async def test_an_engine_leaves_a_control_plane_that_hangs_also_if_it_is_often_idle(scripted: Scripted) -> None:
    """The engine is never busy for as long as a lease."""
    clock = Clock()
    with LinkedEngine([scripted.target], clock=clock) as engine:
        await until(lambda: engine.link.lease.connected)
        for burst in (1, 2):
            engine.open("a")
            await engine.steps_until(lambda wanted=burst: scripted.kinds().count("step") >= 2 * wanted)  # type: ignore[misc]
            clock.now += 20.0
            assert bool(engine.link.lapsed()) == (burst == 2)
            engine.engine.finish("a")
            engine.step()
            clock.now += 60.0
        await until(lambda: scripted.kinds().count("hello") == 2)


async def test_a_server_that_only_welcomes(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """A server that welcomes and closes streams again and again renews no lease. One answer from the control plane
    makes the agent READY again."""
    clock = Clock()
    with LinkedEngine([scripted.target], clock=clock) as engine:
        engine.open("a")
        for streams in range(1, 5):
            await engine.steps_until(lambda wanted=streams: scripted.kinds().count("snapshot") == wanted)  # type: ignore[misc]
            clock.now += 10.0
            state = engine.link.lease.say_state()
            assert (state == agent_pb2.AGENT_STATE_DEGRADED) == (streams == 4), f"after {streams * 10} s"
            assert bool(engine.link.lapsed()) == (streams == 4)
            scripted.say(going_away={})
            await until(lambda wanted=streams: scripted.kinds().count("hello") > wanted and engine.link.lease.connected)  # type: ignore[misc]
        assert engine.link.lease.state == agent_pb2.AGENT_STATE_DEGRADED
        scripted.say(directives={"step": 1})
        await until(lambda: engine.link.lease.say_state() == agent_pb2.AGENT_STATE_READY)


async def test_an_idle_engine_waits_for_no_answer(control: Control) -> None:
    """The last report of an idle engine may get no answer; hours later the agent is still READY, on the same stream."""
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: control.names() == ["a"])
        engine.engine.finish("a")
        await engine.steps_until(lambda: control.names() == [])
        engine.step()
        clock.now += 3600.0
        assert engine.link.lease.state == agent_pb2.AGENT_STATE_READY
        assert not engine.link.lapsed()
        engine.open("b")
        assert not engine.link.lapsed()
        await engine.steps_until(lambda: control.names() == ["b"])
        assert (engine.streams, control.fleet.stream_ends) == (1, {})


async def test_an_agent_whose_answers_are_late_is_not_ready(scripted: Scripted) -> None:
    """An answer to an old report does not make up for the newer ones that wait."""
    scripted.welcomes = False
    clock = Clock()
    scripted.say(welcome={"session_id": "s", "heartbeat_ms": 600_000})
    with LinkedEngine([scripted.target], clock=clock) as engine:
        lease = engine.link.lease

        async def answered(step: int) -> None:
            scripted.say(directives={"step": step})
            await until(lambda: engine.link.outbox.unreported.heard_step == step)
            # The thread of the link notes the answer a moment later.
            await until(lambda: lease.state == agent_pb2.AGENT_STATE_READY)

        await until(lambda: lease.connected)
        engine.open("a")
        for number in range(1, 5):
            engine.step()
            await until(lambda wanted=number: scripted.kinds().count("step") == wanted)  # type: ignore[misc]
            assert lease.state == agent_pb2.AGENT_STATE_READY
            clock.now += 1.0
        first, *_, last = (report.step for report in scripted.heard("step"))
        assert lease.state == agent_pb2.AGENT_STATE_STALE
        # The oldest report that waits after this answer is a second younger.
        await answered(first)
        clock.now += 1.0
        assert lease.state == agent_pb2.AGENT_STATE_STALE
        await answered(last)
