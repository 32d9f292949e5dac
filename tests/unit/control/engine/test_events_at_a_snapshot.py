"""Events of the step at which an agent sends a snapshot count as those of any other step: the agent's real outbox sends
a session its messages. The test plays the link's thread."""

from __future__ import annotations

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.gateway.stream import REFUSED_TOTAL
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.engine.session import Session
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from tests.fakes.agent import hello
from tests.fakes.engine import END, TEXT
from tests.fakes.linked import LinkedEngine
from tests.fakes.tables import policy
from tests.unit.sessions import NOW, govern

COUNTED = policy(entropy={"shadow": False, "holdout_share": 0.5})


class Connected:
    """An engine, and a session on its newest stream."""

    def __init__(self, *names: str) -> None:
        """names: requests that have a token before the first stream."""
        self.made, self.log, self.streams = LinkedEngine(["nowhere:1"], clock=lambda: 1.0), DecisionLog(), 0
        for name in names:
            self.open(name)
        self.made.step()
        self.connect()

    def open(self, name: str) -> None:
        self.made.open(name, effort="turbo", refused_slo_class="gold", queued_s=0.75)
        self.made.engine.join(self.made.engine.live[name], 1.0)

    def connect(self) -> None:
        self.streams += 1
        session_id, said = f"s{self.streams}", hello(request_sources="slo class from x-slo")
        self.made.link.outbox.new_ring()
        welcome = agent_pb2.Welcome(session_id=session_id, reads_snapshot_parts=True)
        self.made.link._receive(agent_pb2.ConnectResponse(welcome=welcome))
        journal = Journal(self.log, said.engine_id, said.incarnation, session_id, NOW)
        self.session = Session(session_id, said, NOW, journal, parts=STREAM_PARTS)
        govern(self.session, 1, COUNTED)

    def step(self, **tokens: int) -> list[str]:
        """Make a step, in which requests get these tokens, and others text; return the kinds of messages that it
        sends."""
        made, outbox = self.made, self.made.link.outbox
        made.take_inbox()
        made.send(made.engine.run({**dict.fromkeys(made.engine.live, TEXT), **tokens}))
        outbox.ring.put(None)
        _, *messages = outbox.messages(outbox.ring, made.hello)
        for message in messages:
            self.session.on_message(message, NOW)
        return [str(message.WhichOneof("message")) for message in messages]

    @property
    def counts(self) -> set[int]:
        totals = self.session.totals
        queueing = int(totals.queueing.counts.sum())
        return {totals.requests, totals.unknown_efforts, totals.counted[REFUSED_TOTAL, ()], queueing}

    @property
    def charged(self) -> int:
        return sum(self.session.part(EngineBudgets).charges.take_by_tenant().values())


@pytest.mark.parametrize("earlier", [(), ("a", "b")])
def test_a_request_that_arrives_in_the_first_step_of_a_stream_counts(earlier: tuple[str, ...]) -> None:
    """An idle engine's stream has no snapshot before the engine's first step. A request that had a token before may
    have been counted by an earlier replica."""
    engine = Connected(*earlier)
    for name in ("c", "d"):
        engine.open(name)
    assert engine.step() == ["snapshot", "step"]
    table, lives = engine.session.table, [engine.log.back(("engine", "1", name, 1)) for name in "cd"]
    assert {info.request_id: bool(table.counted[slot]) for slot, info in table.requests()} == {
        **dict.fromkeys(earlier, False),
        **dict.fromkeys("cd", True),
    }
    assert [life is not None and life.joined_late for life in lives] == [False, False]
    engine.step()
    assert engine.counts == {2}
    assert table.think_tokens[table.slots()].tolist() == [3] * len(earlier) + [2, 2]
    assert engine.charged == 3 * len(earlier) + 4
    engine.connect()
    engine.step()
    assert engine.counts == {0}, "the earlier stream has counted them"


def test_the_step_after_which_a_thawed_engine_sends_a_snapshot_counts() -> None:
    engine = Connected()
    engine.step()
    for name in ("ends", "answers", "stays"):
        engine.open(name)
    engine.step()
    engine.step(ends=END)
    engine.made.link.outbox.resync()
    engine.open("begins")
    engine.made.engine.finish("ends")
    assert engine.step(answers=END) == ["step", "snapshot"]
    totals = engine.session.totals
    assert engine.counts == {4}
    assert (totals.ends["natural"], totals.answers["empty_after_natural"], sum(totals.think_tokens.counts)) == (2, 1, 1)
    assert engine.step() == ["step"]
    assert engine.counts == {4}
    life = engine.log.back(("engine", "1", "begins", 1))
    assert life is not None
    assert not life.joined_late
    table = engine.session.table
    assert {info.request_id: int(table.think_tokens[slot]) for slot, info in table.requests()} == {
        "answers": 2,
        "stays": 4,
        "begins": 2,
    }
    assert engine.charged == 1 + 2 + 4 + 2
