"""An agent that comes back after a fault begins with nothing of what was sent to the one before it."""

from __future__ import annotations

from typing import Any

from tests.contract.streams import Control, Scripted
from tests.fakes.engine import START, TEXT
from tests.fakes.linked import LinkedEngine, until


def settings(revision: int) -> dict[str, int]:
    """Return settings that an agent accepts."""
    return {"revision": revision, "nonce": revision, "lease_ms": 30_000, "report_interval_steps": 1}


def cap(decision_id: int) -> dict[str, Any]:
    return {"step": 1, "caps": [{"decision_id": decision_id, "slot": 0, "max_think_tokens": 5}]}


async def test_settings_decisions_and_refusals_of_the_agent_before_are_dropped(scripted: Scripted) -> None:
    with LinkedEngine([scripted.target]) as engine:
        link = engine.link
        engine.open("a")
        await engine.hears(lambda: engine.streams)
        await engine.steps_until(lambda: "step" in scripted.kinds())
        # The engine steps no more, so what arrives now waits for the agent that then fails.
        engine.refusal = "the agent is off"
        scripted.say(settings=settings(7))
        await until(lambda: link.refused == {7: "the agent is off"})
        engine.refusal = ""
        scripted.say(settings=settings(8))
        scripted.say(directives=cap(1))
        await until(lambda: len(link.mailbox.arrived) == 1 and len(link.inbox.messages) == 1)
        before = engine.engine.step

        link.come_back()

        assert link.refused == {}
        assert not link.mailbox.arrived
        assert not link.inbox.messages
        await engine.steps_until(lambda: any(report.step > before for report in scripted.heard("step")))
        # Earlier reports may arrive after the agent has come back.
        new = [m for m in scripted.received if max(m.snapshot.step, m.step.step) > before]
        assert new[0].HasField("snapshot"), "the control plane gets all live requests anew"
        assert not engine.caps()
        assert (engine.kept, link.lease.revision) == ([], 0)
        assert not [m for m in scripted.received if m.settings_status.revision == 8], "nobody obeys revision 8"
        link.restart()
        await engine.steps_until(lambda: scripted.kinds().count("hello") == 2)
        assert not scripted.heard("hello")[-1].refused


async def test_requests_that_begin_and_end_in_the_first_step_of_a_stream_are_counted(control: Control) -> None:
    """The snapshot before the step says nothing of them. One that has thought is among the ended ones of which it
    says the tokens."""
    with LinkedEngine([control.target]) as linked:
        await until(lambda: linked.link.lease.connected)
        now_s = linked.link.lease.clock()
        for name, prompt in (("goes on", [START]), ("thinks", [START]), ("answers", [TEXT])):
            linked.open(name, prompt=prompt, queued_s=now_s)
            linked.engine.join(linked.engine.live[name], now_s)
            linked.engine.feed(name, [TEXT])
        linked.engine.finish("thinks")
        linked.engine.finish("answers")
        await linked.steps_until(control.names)
        totals = await control.fleet.totals()
        assert control.names() == ["goes on"]
        assert (totals.requests, totals.answer_tokens) == (2, 1)


async def test_what_arrives_on_the_stream_of_the_new_agent_is_kept(scripted: Scripted) -> None:
    """The stream that begins while the agent is off belongs to the agent that comes back."""
    with LinkedEngine([scripted.target]) as engine:
        link = engine.link
        engine.open("a")
        await engine.hears(lambda: engine.streams)
        scripted.say(directives=cap(1))
        await until(lambda: link.inbox.messages)
        link.restart()
        await until(lambda: list(link.inbox.messages) == [None])
        scripted.say(directives=cap(2))
        await until(lambda: len(link.inbox.messages) == 2)
        link.come_back()
        await engine.hears(lambda: engine.streams == 2 and engine.caps())
        assert [each.decision_id for taken in engine.taken for each in taken.caps] == [2]


async def test_messages_wait_for_the_new_agents_step(scripted: Scripted) -> None:
    """While the agent was off the link answered by itself; from now on the engine takes messages in."""
    with LinkedEngine([scripted.target]) as engine:
        link = engine.link
        engine.open("a")
        await engine.hears(lambda: engine.streams)
        link.mailbox.step_aside()
        link.come_back()
        scripted.say(settings=settings(9))
        await until(lambda: link.mailbox.arrived)
        assert link.lease.revision == 0
        engine.take_inbox()
        assert (link.lease.revision, engine.kept) == (9, [9])
