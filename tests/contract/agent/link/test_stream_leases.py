"""Leases and freezes on the stream: the agent notices by itself when decisions are no longer in force."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES
from tests.contract.streams import Clock, Control, Scripted
from tests.fakes.control import utc_now
from tests.fakes.linked import LinkedEngine, until
from tests.fakes.tables import policy


async def test_a_sections_own_lease(scripted: tuple[Scripted, str]) -> None:
    """When a section's lease is over, the section's decisions end; other sections go on until their own lease or the
    general lease is over."""
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        settings = agent_pb2.Settings(nonce=1, revision=1, lease_ms=4000)
        settings.scheduler_lease_ms, settings.entropy_lease_ms, settings.kv_memory_lease_ms = 1000, 2000, 3000
        servicer.say.put_nowait(agent_pb2.ConnectResponse(settings=settings))
        await until(lambda: engine.link.lease.revision == 1)
        engine.link.stop()
        await until(lambda: not engine.link.lease.connected)
        found = []
        for now in (1.0, 1.1, 2.1, 3.1, 4.1):
            clock.now = now
            found.append((engine.link.lapsed(), engine.link.lease.state))
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
    # The lease would run out on a machine that is too busy.
    with LinkedEngine([control.target], clock=Clock()) as engine:
        await until(lambda: control.connected() and control.engine().acked_revision == 1)
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
        await until(lambda: not engine.link.lease.connected)
        clock.now = 4.9
        assert engine.link.lease.frozen()
        clock.now = 5.1
        assert not engine.link.lease.frozen()


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
    """An agent that has stepped aside makes no step, and its engine is stock vLLM already, so the link confirms the
    freeze at once."""
    servicer, target = scripted
    servicer.reading.set()
    with LinkedEngine([target]) as engine:
        engine.open("a")
        await until(lambda: engine.link.lease.connected)
        engine.link.step_aside()
        await until(lambda: servicer.kinds().count("hello") == 2)
        servicer.say.put_nowait(agent_pb2.ConnectResponse(freeze=agent_pb2.Freeze(nonce=1, remaining_ms=1000)))
        await until(lambda: "freeze_status" in servicer.kinds())


async def test_states(control: Control) -> None:
    clock = Clock()
    with LinkedEngine([control.target], clock=clock) as engine:
        assert engine.link.lease.state == agent_pb2.AGENT_STATE_STALE
        await until(lambda: control.connected() and control.engine().acked_revision == 1)
        assert engine.link.lease.state == control.engine().agent_state == agent_pb2.AGENT_STATE_READY
        await control.kill()
        await until(lambda: engine.link.lease.state == agent_pb2.AGENT_STATE_STALE)
        clock.now += 31
        assert engine.link.lease.state == agent_pb2.AGENT_STATE_DEGRADED
        await until(lambda: control.engine().agent_state == agent_pb2.AGENT_STATE_STALE)
        control.fleet.views._clock = lambda: utc_now() + timedelta(seconds=31)
        assert control.engine().agent_state == agent_pb2.AGENT_STATE_DEGRADED


async def test_a_stream_that_is_silent_past_the_lease_is_given_up(
    scripted: tuple[Scripted, str], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        engine.open("a")
        await engine.steps_until(lambda: "step" in servicer.kinds())
        servicer.say.put_nowait(
            agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=engine.engine.tracker.newest))
        )
        await until(lambda: engine.link.lease.unheard_since is None)
        clock.now = 100.0
        assert not engine.link.lapsed(), "no report waits for an answer"
        engine.step()
        clock.now = 130.0
        assert not engine.link.lapsed()
        clock.now = 130.1
        assert engine.link.lapsed()
        await until(lambda: servicer.kinds().count("hello") == 2)
        await until(lambda: engine.link.lease.connected)
        await engine.steps_until(lambda: servicer.kinds().count("snapshot") == 2)
        assert engine.link.lapsed(), "a new stream alone renews no lease"
        assert servicer.kinds().count("hello") == 2, "a new stream has a full lease for its first answer"
        servicer.say.put_nowait(
            agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=engine.engine.tracker.newest))
        )
        await until(lambda: not engine.link.lapsed())
    assert f"stream to {target} ended: nothing heard for 30.1 s" in caplog.text


async def test_a_server_that_only_welcomes(scripted: tuple[Scripted, str], caplog: pytest.LogCaptureFixture) -> None:
    """A server that welcomes and closes streams again and again renews no lease. One answer from the control plane
    makes the agent READY again."""
    servicer, target = scripted
    servicer.reading.set()
    clock = Clock()
    with LinkedEngine([target], clock=clock) as engine:
        engine.open("a")
        for streams in range(1, 5):
            await engine.steps_until(lambda wanted=streams: servicer.kinds().count("snapshot") == wanted)  # type: ignore[misc]
            clock.now += 10.0
            state = engine.link.lease.say_state()
            assert (state == agent_pb2.AGENT_STATE_DEGRADED) == (streams == 4), f"after {streams * 10} s"
            assert bool(engine.link.lapsed()) == (streams == 4)
            servicer.say.put_nowait(agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway()))
            await until(lambda wanted=streams: servicer.kinds().count("hello") > wanted and engine.link.lease.connected)  # type: ignore[misc]
        assert engine.link.lease.state == agent_pb2.AGENT_STATE_DEGRADED
        servicer.say.put_nowait(agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=1)))
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


async def test_an_agent_whose_answers_are_late_is_not_ready(scripted: tuple[Scripted, str]) -> None:
    """An answer to an old report does not make up for the newer ones that wait."""
    servicer, target = scripted
    servicer.welcomes = False
    servicer.reading.set()
    clock = Clock()
    welcome = agent_pb2.Welcome(session_id="s", heartbeat_ms=600_000)
    await servicer.say.put(agent_pb2.ConnectResponse(welcome=welcome))

    def reported() -> list[int]:
        return [message.step.step for message in servicer.received if message.HasField("step")]

    def sent(number: int) -> bool:
        return len(reported()) == number

    with LinkedEngine([target], clock=clock) as engine:
        lease = engine.link.lease

        async def answered(step: int) -> None:
            await servicer.say.put(agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=step)))
            await until(lambda: engine.link.outbox.unreported.heard_step == step)
            # The thread of the link notes the answer a moment later.
            await until(lambda: lease.state == agent_pb2.AGENT_STATE_READY)

        await until(lambda: lease.connected)
        engine.open("a")
        for number in range(1, 5):
            engine.step()
            await until(partial(sent, number))
            assert lease.state == agent_pb2.AGENT_STATE_READY
            clock.now += 1.0
        first, *_, last = reported()
        assert lease.state == agent_pb2.AGENT_STATE_STALE
        # The oldest report that waits after this answer is a second younger.
        await answered(first)
        clock.now += 1.0
        assert lease.state == agent_pb2.AGENT_STATE_STALE
        await answered(last)
