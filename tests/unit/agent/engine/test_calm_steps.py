"""Everything that a full look would act on ends the calm, and keeps it from beginning."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import Directives
from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_agent.core.probe_admission import COLLECT_STEPS, PLACE_STEPS, Placed
from meridian_agent.core.step_record import Outcome
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.calm_steps import CalmSteps
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.engine.queue_order import Limit
from meridian_agent.link.inbox import Inbox
from meridian_agent.link.lease import Lease
from meridian_agent.link.mailbox import Arrived, Mailbox
from meridian_agent.link.record_queue import RecordQueue
from tests.fakes.engine import END, MARKERS, START, TEXT, opened
from tests.fakes.sentences import ends_by_id

# A token that ends a sentence.
STOP = 4
IDS = ["a", "b"]


class Engine:
    """The calm steps of an engine with two thinking requests in a run of text steps."""

    def __init__(self, drafts: int = 0) -> None:
        self.now_s = 100.0
        lease = Lease(lambda: self.now_s)
        inbox = Inbox(lease)
        self.link: Any
        self.link = SimpleNamespace(lease=lease, inbox=inbox, mailbox=Mailbox(lease, inbox, lambda _: None))
        self.tracker = Tracker(MARKERS, 1 + drafts)
        self.tracker.sentences = ends_by_id(bytes([0, 0, 0, 0, FLAG_SENTENCE]))
        self.directives = Directives(self.tracker)
        self.probing = ProbeRunner(self.tracker, self.directives, 16, True)
        self.queues: Any
        self.queues = SimpleNamespace(prompts_last=False)
        self.waiting: deque[str] = deque()
        self.scheduler = SimpleNamespace(
            num_spec_tokens=drafts,
            current_step=7,
            max_num_running_reqs=256,
            get_request_counts=lambda: (2, len(self.waiting)),
        )
        self.calm = CalmSteps(self.tracker, self.directives, self.probing, self.queues, self.link)
        lease.begins()
        lease.found()
        # The ids in the order of the runner's rows.
        self.ids = IDS
        for name in IDS:
            opened(self.tracker, name, ref=SimpleNamespace(num_tokens=1))
        self.counted([TEXT], [TEXT])
        assert self.tracker.run.whole

    def look(self, plan: Any = None, limits: list[Limit] | None = None) -> bool:
        """Have a full look; return whether the coming step is calm."""
        self.calm.begin_full_look(self.now_s)
        self.calm.end_full_look(self.scheduler, plan, limits or [])
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

    def ask(self, placement: agent_pb2.Placement.ValueType, slot: int = 0, hold_ms: int = 0) -> None:
        probe = agent_pb2.EatProbe(decision_id=1, slot=slot, placement=placement, hold_ms=hold_ms)
        self.directives.probes.add(probe, self.tracker.by_slot[slot])

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


def test_a_probe_that_arrives_in_calm_steps_is_placed_at_its_sentence_end() -> None:
    engine, asked = Engine(), agent_pb2.EatProbe(decision_id=1, slot=0, placement=agent_pb2.PLACEMENT_SENTENCE)
    assert engine.look()
    engine.probing.rows_possible = True
    engine.step([STOP], [TEXT])
    engine.link.inbox.put(agent_pb2.Directives(step=1, probes=[asked]))
    engine.take()
    engine.calm.find_due(engine.scheduler)
    assert engine.calm.due == {engine.tracker.by_id["a"]: 0}, "the sentence has just ended"
    engine = Engine()
    assert engine.look()
    engine.probing.rows_possible = True
    engine.link.inbox.put(agent_pb2.Directives(step=1, probes=[asked]))
    engine.take()
    assert engine.holds()
    assert not engine.calm.due
    engine.step([STOP], [STOP])
    assert engine.holds()
    assert engine.calm.due == {engine.tracker.by_id["a"]: 0}


def test_a_probe_that_needs_a_place_ends_the_calm_until_places_are_kept_free() -> None:
    probes = [agent_pb2.EatProbe(decision_id=n, slot=n, placement=agent_pb2.PLACEMENT_SENTENCE) for n in range(2)]
    engine = Engine()
    assert engine.look()
    engine.link.inbox.put(agent_pb2.Directives(step=1, probes=probes[:1]))
    engine.take()
    assert not engine.holds()
    assert engine.look(), "the full look keeps places free"
    engine.link.inbox.put(agent_pb2.Directives(step=1, probes=probes[1:]))
    engine.take()
    assert engine.holds()


def test_new_ranks_change_the_order_in_a_calm_step() -> None:
    """A plan that differs from the one before in its ranks alone is obeyed and reported without a full look; any other
    plan needs one."""
    engine, obeyed = Engine(), list[Any]()
    engine.queues.obey = lambda scheduler, plan: obeyed.append(plan)

    def arrives(number: int, **fields: Any) -> bool:
        plan = agent_pb2.DispatchPlan(decision_id=number, slot=[1], rank=[number], **fields)
        engine.link.inbox.put(agent_pb2.Directives(step=1, plan=plan))
        engine.take()
        return engine.holds()

    assert engine.look()
    assert not arrives(1), "there was no plan before"
    assert engine.look(engine.directives.active_plan())
    for number in (2, 3):
        assert arrives(number)
        assert engine.calm.go_on(engine.scheduler)
        assert engine.tracker.by_id["b"].rank == number
    assert engine.calm.go_on(engine.scheduler)
    assert [plan.decision_id for plan in obeyed] == [2, 3]
    assert [outcome[:2] for outcome in engine.tracker.record.outcomes] == [(n, Outcome.APPLIED) for n in (1, 2, 3)]
    others: list[dict[str, Any]] = [{"prefill_tokens_per_step": 9}, {"hold_admission": True}, {"stock": True}]
    for number, fields in enumerate(others, 4):
        assert not arrives(number, **fields)
        assert engine.look(engine.directives.active_plan())
    assert arrives(7, stock=True)
    assert engine.calm.go_on(engine.scheduler)
    assert len(obeyed) == 2, "vLLM's own order applies"


def test_settings_and_a_new_stream_need_a_full_look() -> None:
    engine = Engine()
    assert engine.look()
    engine.link.inbox.put(ACTS_LATER[0])
    settings_arrive(engine)
    assert not engine.calm.only_decisions_wait(engine.now_s)
    assert engine.link.lease.attention, "the full look takes them in"
    engine.calm.took(None)
    assert engine.calm.number == 0


def test_a_full_look_takes_in_only_what_may_have_arrived() -> None:
    engine = Engine()
    assert engine.calm.begin_full_look(engine.now_s), "nothing is known about the leases yet"
    engine.calm.end_full_look(engine.scheduler, None, [])
    engine.calm.end()
    assert not engine.calm.begin_full_look(engine.now_s)
    settings_arrive(engine)
    assert engine.calm.begin_full_look(engine.now_s)
    assert engine.calm.begin_full_look(engine.now_s), "no look has found out how long the new leases hold"
    engine.calm.end_full_look(engine.scheduler, None, [])
    assert not engine.calm.begin_full_look(engine.now_s)
    engine.link.lease.lost()
    assert engine.calm.begin_full_look(engine.now_s)
    engine.calm.end_full_look(engine.scheduler, None, [])
    engine.now_s += engine.link.lease.lease_s
    assert engine.calm.begin_full_look(engine.now_s)


def test_an_awaited_token_ends_the_calm() -> None:
    engine = Engine()
    engine.ask(agent_pb2.PLACEMENT_SENTENCE)
    assert engine.look()
    engine.step([TEXT], [STOP])
    assert engine.holds(), "another request's sentence has ended"
    engine.calm.go_on(engine.scheduler)
    engine.scheduler.get_request_counts = lambda: (2, 1)
    assert engine.probing._keep_places_until > engine.scheduler.current_step
    engine.ask(agent_pb2.PLACEMENT_SENTENCE, hold_ms=9)
    assert engine.look()
    engine.step([STOP], [TEXT])
    assert not engine.holds(), "the request waits for the decision, so the probe is placed now"
    assert not engine.look()


def test_probes_that_have_reached_their_places_end_the_calm_together() -> None:
    engine = Engine()
    first, second = engine.tracker.by_id.values()
    for slot in range(2):
        engine.ask(agent_pb2.PLACEMENT_SENTENCE, slot)
    assert engine.look()
    begun = engine.scheduler.current_step
    engine.step([STOP], [TEXT])
    while engine.scheduler.current_step < begun + COLLECT_STEPS:
        assert engine.holds()
        assert engine.calm.go_on(engine.scheduler)
        assert not engine.probing._asked_here(engine.scheduler)
        engine.scheduler.current_step += 1
        engine.step([TEXT], [STOP])
    assert engine.holds()
    assert not engine.calm.go_on(engine.scheduler)
    here = engine.probing._asked_here(engine.scheduler)
    assert [(live, past) for (_, live, _, _), past in here] == [(first, COLLECT_STEPS), (second, COLLECT_STEPS - 1)]


def test_a_probe_waits_for_another_place_once_thinking_was_interrupted_behind_its_own() -> None:
    engine = Engine()
    engine.ask(agent_pb2.PLACEMENT_SENTENCE)
    assert engine.look()
    engine.step([STOP], [TEXT])
    for token in (END, START, TEXT):
        engine.counted([token], [TEXT])
        engine.scheduler.current_step += COLLECT_STEPS
    assert engine.probing.collects(engine.scheduler)
    assert not engine.probing._asked_here(engine.scheduler)
    assert not engine.directives.probes.reached
    assert len(engine.directives.probes) == 1


def test_a_sentence_that_ends_among_drafts_ends_the_calm() -> None:
    engine = Engine(drafts=2)
    engine.ask(agent_pb2.PLACEMENT_SENTENCE)
    assert engine.look()
    engine.step([TEXT, TEXT], [TEXT, STOP, TEXT])
    assert engine.holds(), "another request's sentence has ended"
    engine.step([STOP, TEXT, TEXT], [TEXT])
    assert not engine.holds()
    assert not engine.look(), "the probe can be placed behind the sentence"
    engine.step([TEXT], [TEXT])
    assert not engine.look(), "the end of a sentence may become known one token later"
    engine.step([TEXT], [TEXT])
    assert engine.look(), "the end of the sentence is too far back"


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_probe_that_waits_has_no_place_in_the_newest_tokens(drafts: int) -> None:
    rng, engine, waiting, placed = random.Random(drafts), Engine(drafts), 0, 0
    live = engine.tracker.by_id["a"]
    engine.ask(agent_pb2.PLACEMENT_SENTENCE)
    for _ in range(300):
        if rng.random() < 0.1:
            engine.tracker.run.end()
        if rng.random() < 0.3:
            engine.ids = engine.ids[::-1]
        engine.counted(*(rng.choices((TEXT, STOP), (90, 10), k=rng.randint(1, 1 + drafts)) for _ in IDS))
        waits = live in engine.probing.waiting(engine.directives.probes)
        since = live.since_end(FLAG_SENTENCE, drafts)
        assert not waits or since is None
        waiting, placed = waiting + waits, placed + (since is not None)
        if since is not None and rng.random() < 0.5:
            live.probed_at = live.think_tokens
    assert min(waiting, placed) > 20


SHARE = SimpleNamespace(think_per_step=None, output_per_step=1)
FREE = SimpleNamespace(think_per_step=1, output_per_step=None)


def test_a_plan_whose_share_leaves_nobody_out_lets_the_calm_begin() -> None:
    assert Engine().look(FREE), "no request answers"
    assert not Engine().look(SHARE), "two requests think"
    engine = Engine()
    engine.queues.prompts_last = True
    assert not engine.look(FREE), "a prompt that is complete moves up"
    assert engine.look()


NOT_CALM: list[Callable[[Engine], Any]] = [
    lambda engine: engine.tracker.due.update({engine.tracker.by_id["a"]: None}),
    lambda engine: engine.tracker.preempt(engine.tracker.by_id["a"]),
    lambda engine: engine.probing.held.update({engine.tracker.by_id["a"]: 9}),
    lambda engine: engine.probing.placed.update(p=Placed(1, engine.tracker.by_id["a"], 0, 0)),
    lambda engine: engine.ask(agent_pb2.PLACEMENT_UNSPECIFIED),
    lambda engine: engine.tracker.run.end(),
]


@pytest.mark.parametrize("holds", NOT_CALM)
def test_no_calm_begins(holds: Callable[[Engine], Any]) -> None:
    engine = Engine()
    assert engine.look()
    holds(engine)
    assert not engine.look()


def test_limits_last_while_they_cannot_change() -> None:
    engine, limit = Engine(), Limit(None, "max_num_running_reqs", 3)
    assert engine.look(limits=[limit]), "no request waits"
    assert engine.calm.go_on(engine.scheduler)
    assert engine.calm.limits == [limit]
    engine.waiting.append("c")
    assert engine.look(), "vLLM's own limits apply"
    engine.ask(agent_pb2.PLACEMENT_SENTENCE)
    engine.probing.keep_places(engine.scheduler)
    for _ in range(2 * PLACE_STEPS):
        assert engine.look(limits=[limit])
        assert engine.calm.go_on(engine.scheduler), "a probe that waits keeps its places"
        engine.scheduler.current_step += 1
    engine.directives.probes.drop(None)
    assert engine.look(limits=[limit])
    begun = engine.scheduler.current_step
    while engine.calm.go_on(engine.scheduler):
        engine.scheduler.current_step += 1
        assert engine.scheduler.current_step - begun <= PLACE_STEPS, "the places become free by themselves"
    assert engine.scheduler.current_step - begun > PLACE_STEPS // 2
    engine.directives.plan = SimpleNamespace(hold_admission=True)  # type: ignore[assignment]
    assert not engine.look(limits=[limit]), "the limit follows the requests that wait with blocks"
