"""A hostile control plane on the agent's side of a stream: the link's own protocol, the real tracker and directives.

A case is a list of TraceRecords whose `down` is the control plane's message; the engine makes a step after each record,
over a workload that is always the same. Allowed reactions: the message is obeyed, refused or ignored. No exception is
raised, the agent's memory stays bounded, requests end, own caps are kept, and only the tokens of an ending are ever
forced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core import directives
from meridian_agent.core.phases import Phase
from meridian_agent.core.probe_admission import MAX_HOLD_MS
from meridian_agent.core.step_record import Outcome
from meridian_agent.engine.queue_order import left_out
from tests.fakes.engine import END, START, TEXT
from tests.fakes.linked import LinkedEngine
from tests.fuzz.hostile import Hostile
from tests.sim.clock import Timeline

if TYPE_CHECKING:
    import random

    Case = list[fleet_pb2.TraceRecord]

THINK_TOKENS, ANSWER_TOKENS, OWN_CAP = 12, 6, 5
# Steps within which every request has ended, whatever the control plane sends.
ENOUGH_STEPS = 600


def make(rng: random.Random) -> Case:
    hostile = Hostile(rng, rng.choice((0.6, 0.9, 0.97)))
    made: Case = []
    if rng.random() < 0.95:
        made.append(fleet_pb2.TraceRecord(down=agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s"))))
    for _ in range(rng.randint(1, 25)):
        response = agent_pb2.ConnectResponse()
        kind = rng.choice(("directives",) * 10 + ("settings",) * 3 + ("welcome", "going_away", ""))
        if kind:
            getattr(response, kind).SetInParent()
            hostile.fill(getattr(response, kind))
        if kind == "directives" and rng.random() < 0.7:
            response.directives.step = 1 << 40
        if kind == "directives" and rng.random() < 0.03:
            for number in range(3000):
                response.directives.probes.add(decision_id=number, slot=number % 5, placement=2)
        made.append(fleet_pb2.TraceRecord(down=response))
    return made


def run(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directives, "MAX_SKIP_STEPS", 3)
        _run(case)


def _run(case: Case) -> None:
    world = World()
    for record in case:
        world.hear(record.down)
        world.step()
    for _ in range(ENOUGH_STEPS):
        if not world.engine.live:
            break
        world.step()
    assert not world.engine.live, "requests do not end"
    assert not world.engine.directives.probes


class World:
    """One engine and its link without a thread: the test hands messages to the link as its thread would."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.linked = LinkedEngine(["nobody"], clock=self.timeline.time)
        self.engine = self.linked.engine
        self.opened = 0

    def hear(self, response: agent_pb2.ConnectResponse) -> None:
        copy = agent_pb2.ConnectResponse()
        copy.CopyFrom(response)
        self.linked.link._receive(copy)

    def step(self) -> None:
        self.timeline.advance(0.005)
        while self.opened < 8 and len(self.engine.live) < 5:
            own = OWN_CAP if self.opened % 2 else None
            prompt = ((START,), (START,), (TEXT,))[self.opened % 3]
            self.linked.open(f"r{self.opened}", prompt=prompt, own_cap=own)
            self.opened += 1
        self.linked.take_inbox()
        joining = self._joining()
        engine = self.engine
        self._schedule()
        for row in engine.mask().values():
            assert set(row.values()) <= {END}, "only the end of thinking is ever forced"
        for name in list(engine.live):
            if name in joining:
                self._token(name)
        self.linked.link.lapsed()
        self.linked.send(engine.take())

    def _schedule(self) -> None:
        """Begin a step like FakeEngine.schedule, but let probes wait for their sentence end, as they do in the
        agent."""
        own = self.engine.directives
        self.engine.step += 1
        own.active_plan()
        assert len(own.probes) <= len(self.engine.live), "probes pile up"
        for decision_id, tr, flags, hold_ms in list(own.probes):
            assert hold_ms <= MAX_HOLD_MS, "a request would wait for very long"
            if tr.state.phase is not Phase.THINK or tr.sentence_flags & flags == flags:
                own.probes.take(tr)
                own.report(decision_id, Outcome.REFUSED, tr, "no engine")

    def _joining(self) -> set[str]:
        """Return the requests that join the step under the plan in force, by the agent's rules."""
        plan, live = self.engine.directives.plan, self.engine.live
        joining = set(live)
        if plan is None or plan.shadow or plan.stock:
            return joining
        for phase, limit in ((Phase.THINK, plan.think_per_step), (Phase.OUTPUT, plan.output_per_step)):
            sequences = [tr for tr in live.values() if tr.state.phase is phase]
            for tr in left_out(sequences, limit, plan.max_skip_steps):
                tr.skipped_steps += 1
                joining.discard(tr.info.request_id)
        return joining

    def _token(self, name: str) -> None:
        engine = self.engine
        tr = engine.live[name]
        tr.skipped_steps, tr.joined_step = 0, engine.step
        state = tr.state
        thinking = state.phase is Phase.THINK
        wanted = END if thinking and state.think_tokens >= THINK_TOKENS else TEXT
        token = engine.sample(name, [wanted])[0]
        if thinking and tr.info.max_think_tokens is not None and state.think_tokens >= tr.info.max_think_tokens:
            assert token == END, "a request thinks past its own cap"
        engine.feed(name, [token])
        if state.output_tokens >= ANSWER_TOKENS:
            engine.finish(name)
