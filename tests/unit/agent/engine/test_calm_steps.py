"""Everything that a full look would act on ends the calm, and keeps it from beginning."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import Directives
from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_agent.core.probe_admission import Placed
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.calm_steps import CalmSteps
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.link.inbox import Inbox
from meridian_agent.link.lease import Lease
from meridian_agent.link.mailbox import Arrived, Mailbox
from meridian_agent.link.record_queue import RecordQueue
from tests.fakes.engine import END, MARKERS, TEXT, opened
from tests.fakes.sentences import ends_by_id

if TYPE_CHECKING:
    from collections.abc import Callable

# A token that ends a sentence.
STOP = 4
IDS = ["a", "b"]


class Engine:
    """The calm steps of an engine with two thinking requests in a run of text steps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        lease = Lease(lambda: self.now_s)
        inbox = Inbox(lease)
        self.link: Any
        self.link = SimpleNamespace(lease=lease, inbox=inbox, mailbox=Mailbox(lease, inbox, lambda _: None))
        self.tracker = Tracker(MARKERS)
        self.tracker.sentences = ends_by_id(bytes([0, 0, 0, 0, FLAG_SENTENCE]))
        self.directives = Directives(self.tracker)
        self.probing = ProbeRunner(self.tracker, self.directives, 16, True)
        queues: Any = SimpleNamespace(prompts_last=False)
        self.waiting: deque[str] = deque()
        self.scheduler = SimpleNamespace(
            num_spec_tokens=0,
            current_step=7,
            max_num_running_reqs=256,
            get_request_counts=lambda: (2, len(self.waiting)),
        )
        self.calm = CalmSteps(self.tracker, self.directives, self.probing, queues, self.link)
        lease.begins()
        lease.found()
        # The ids in the order of the runner's rows.
        self.ids = IDS
        for name in IDS:
            opened(self.tracker, name, ref=SimpleNamespace(num_tokens=1))
        self.counted([TEXT], [TEXT])
        assert self.tracker.run.whole

    def look(self) -> bool:
        """Have a full look; return whether the coming step is calm."""
        self.calm.begin_full_look(self.now_s)
        self.calm.end_full_look(self.scheduler, None, [])
        return self.holds()

    def holds(self) -> bool:
        """Return whether the coming step is calm."""
        return self.calm.hold(self.now_s)

    def take(self) -> None:
        """Take in the message that waits."""
        assert self.calm.only_decisions_wait(self.now_s)
        message, _ = self.link.inbox.take()
        if message is not None:
            self.directives.accept(message)
        self.calm.took(message)

    def ask(self) -> None:
        self.directives.probes.add(agent_pb2.EatProbe(decision_id=1, slot=0), self.tracker.by_slot[0])

    def counted(self, *tokens: list[int]) -> list[int]:
        """Account a step; return the rows that were looked at one by one."""
        for name, new in zip(self.ids, tokens, strict=True):
            if live := self.tracker.by_id.get(name):
                live.ref.num_tokens += len(new)
        others = self.tracker.note(self.ids, tokens)
        self.tracker.count(others)
        for row in others:
            self.tracker.feed(self.tracker.by_id[self.ids[row]], tokens[row], row)
        self.tracker.looked_at(others)
        return others

    def step(self, *tokens: list[int]) -> None:
        assert not self.counted(*tokens)
        self.calm.find_due(self.scheduler)


def settings_arrive(engine: Engine) -> None:
    engine.link.mailbox.arrive(Arrived(agent_pb2.ConnectRequest(), RecordQueue(), agent_pb2.Settings(), None))


def a_decision_arrives(engine: Engine) -> None:
    engine.link.inbox.put(agent_pb2.Directives(step=1, plan=agent_pb2.DispatchPlan(decision_id=1)))


def a_report_is_not_answered(engine: Engine) -> None:
    engine.link.lease.asks(engine.now_s)
    engine.now_s += engine.link.lease.lease_s


ENDS: list[Callable[[Engine], Any]] = [
    settings_arrive,
    a_decision_arrives,
    a_report_is_not_answered,
    lambda engine: engine.link.inbox.begin(),
    lambda engine: engine.link.lease.lost(),
    lambda engine: engine.calm.end(),
    lambda engine: engine.calm.scheduled(3),
    lambda engine: opened(engine.tracker, "c"),
    lambda engine: engine.tracker.feed(engine.tracker.by_id["a"], [END], 0),
    lambda engine: engine.tracker.close(engine.tracker.by_id["a"], 1),
    lambda engine: engine.tracker.run.leave(engine.tracker.by_id["a"]),
]


def test_steps_stay_calm_while_nothing_happens() -> None:
    engine = Engine()
    assert engine.look()
    for _ in range(20):
        engine.now_s += 0.1
        engine.step([TEXT], [STOP])
        engine.calm.scheduled(2)
        assert engine.holds()
        assert engine.calm.go_on(engine.scheduler)
        assert engine.calm.limits == []
    assert engine.calm.full_steps == 1


@pytest.mark.parametrize("happens", ENDS)
def test_what_happens_ends_the_calm(happens: Callable[[Engine], Any]) -> None:
    engine = Engine()
    assert engine.look()
    happens(engine)
    assert not engine.holds()


ACTS_LATER: list[agent_pb2.Directives] = [
    agent_pb2.Directives(step=1, caps=[agent_pb2.ThinkCap(decision_id=1, slot=2)]),
    agent_pb2.Directives(step=1, tiers=[agent_pb2.TierChange(decision_id=1, slot=0)]),
    agent_pb2.Directives(
        step=1, probes=[agent_pb2.EatProbe(decision_id=1, slot=0, placement=agent_pb2.PLACEMENT_SENTENCE)]
    ),
]
ACTS_NOW: list[agent_pb2.Directives] = [
    agent_pb2.Directives(step=1, plan=agent_pb2.DispatchPlan(decision_id=1)),
    agent_pb2.Directives(step=1, forces=[agent_pb2.ForceEnd(decision_id=1, slot=0)]),
    agent_pb2.Directives(step=1, probes=[agent_pb2.EatProbe(decision_id=1, slot=0)]),
    agent_pb2.Directives(step=1, hand_overs=[agent_pb2.HandOver(decision_id=1, slot=0)]),
]


@pytest.mark.parametrize("message", ACTS_LATER + ACTS_NOW)
def test_decisions_end_the_calm_if_they_act_before_the_step(message: agent_pb2.Directives) -> None:
    engine = Engine()
    engine.probing.rows_possible = True
    assert engine.look()
    engine.link.inbox.put(message)
    assert not engine.holds()
    assert engine.calm.only_decisions_wait(engine.now_s)
    engine.take()
    assert engine.holds() == (message in ACTS_LATER)


NOT_CALM: list[Callable[[Engine], Any]] = [
    lambda engine: engine.tracker.due.update({engine.tracker.by_id["a"]: None}),
    lambda engine: engine.tracker.preempt(engine.tracker.by_id["a"]),
    lambda engine: engine.probing.held.update({engine.tracker.by_id["a"]: 9}),
    lambda engine: engine.probing.placed.update(p=Placed(1, engine.tracker.by_id["a"], 0, 0)),
    lambda engine: engine.ask(),
    lambda engine: engine.tracker.run.end(),
]


@pytest.mark.parametrize("holds", NOT_CALM)
def test_no_calm_begins(holds: Callable[[Engine], Any]) -> None:
    engine = Engine()
    assert engine.look()
    holds(engine)
    assert not engine.look()
