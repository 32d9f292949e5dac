"""Thinking counts once, on whatever replicas and with whatever streams that break: real agents' outboxes and real
sessions, between which streams end at random."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.step_record import StepRecord
from meridian_agent.link.message_sizes import SnapshotRecord
from meridian_agent.link.messages import step_report
from meridian_control.capabilities.budgets.charges import TenantUsage
from meridian_control.capabilities.budgets.fleet_budgets import FleetBudgets
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.engine.session import Session
from tests.fakes.agent import hello
from tests.fakes.engine import START, TEXT
from tests.fakes.linked import LinkedEngine
from tests.fakes.parts import parts
from tests.fakes.tables import policy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
BUDGETS = [
    {"name": "acme", "tenant": "acme", "tokens_per_day": 10**9},
    {"name": "high", "effort": "high", "tokens_per_day": 10**9},
]
HELD = policy(entropy={"enabled": False}, budget=BUDGETS)


class Replica:
    """The parts of a replica that count."""

    def __init__(self) -> None:
        self.budgets, self.tenants = FleetBudgets(), TenantUsage()
        self.budgets.set_budgets([HELD])

    def take(self, session: Session) -> None:
        self.tenants.take_charges(session.part(EngineBudgets).charges)
        self.budgets.collect(session.part(EngineBudgets).charges)


class World:
    """One engine and two replicas. `counted` has what replicas had counted when they were killed."""

    def __init__(self, seed: int) -> None:
        self.draw, self.now_s = random.Random(seed), 0.0
        self.engine = LinkedEngine(["nowhere:1"], clock=lambda: self.now_s)
        self.link, self.opened, self.streams = self.engine.link, 0, 0
        self.replicas = [Replica(), Replica()]
        self.killed: list[Replica] = []
        self.session: Session | None = None
        self.replica = 0
        # Thinking tokens of each tenant and effort that the engine has generated; and those on their way to a replica
        # when the stream broke.
        self.truth = {"acme": 0, "high": 0}
        self.under_way = 0

    # ----------------------------------------------------------------------------------------------------- the engine

    def step(self) -> None:
        self.now_s += 0.02
        for live in self.engine.engine.live.values():
            self.truth["acme"] += live.info.tenant == "acme"
            self.truth["high"] += live.info.effort == "high"
        if self.engine.engine.live or not self.link.lease.idle:
            self.engine.step()

    def open(self) -> None:
        self.opened += 1
        tenant, effort = self.draw.choice(["acme", "other"]), self.draw.choice(["high", ""])
        # All inputs of a streaming session have one id, and each one's prompt has those before it.
        name = f"r{self.opened}" if "session" in self.engine.engine.live else "session"
        prompt = [TEXT] * self.opened + [START]
        self.engine.open(name, prompt=prompt, tenant=tenant, effort=effort)

    def finish(self) -> None:
        if live := list(self.engine.engine.live):
            self.engine.engine.finish(self.draw.choice(live))

    def resync(self) -> None:
        self.link.outbox.resync()

    # ----------------------------------------------------------------------------------------------------- the stream

    def connect(self) -> None:
        if self.session is not None:
            return
        self.replica, self.streams = self.draw.randrange(2), self.streams + 1
        name = f"s{self.streams}"
        carried = self.replicas[self.replica].budgets.carried(("engine", "1"), {})
        makers = parts(budgets=lambda stream: EngineBudgets(stream, carried))
        self.session = session = Session(name, hello(), self.now, parts=makers)
        self.link.outbox.new_ring()
        self.link._receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id=name)))
        for response in session.on_policy(1, HELD):
            self.link._receive(response)

    @property
    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.now_s)

    def deliver(self, most: int) -> None:
        """Let the replica take in the oldest messages that wait, and answer them."""
        ring = self.link.outbox.ring
        for _ in range(min(most, ring.qsize()) if self.session is not None else 0):
            item: Any = ring.get_nowait()
            if isinstance(item, StepRecord):
                item = agent_pb2.ConnectRequest(step=step_report([item]))
            assert self.session is not None
            for response in self.session.on_message(_message(item), self.now):
                self.link._receive(response)

    def share(self) -> None:
        if self.session is not None:
            self.replicas[self.replica].take(self.session)

    def lose(self) -> None:
        """Break the stream; the replica, unless it is killed, keeps what the stream has counted."""
        if self.session is None:
            return
        ring, replica = self.link.outbox.ring, self.replicas[self.replica]
        while ring.qsize():
            if isinstance(item := ring.get_nowait(), StepRecord):
                self.under_way += sum(item.think_tokens().values())
            elif isinstance(item, SnapshotRecord):
                # The tokens of the snapshot's own step.
                self.under_way += len(item.rows)
        replica.budgets.carry(("engine", "1"), self.session.session_id, self.session.part(EngineBudgets).charges)
        replica.take(self.session)
        self.session = None
        self.link.mailbox.lose_stream()

    def kill(self) -> None:
        """Kill the replica just after it has stored its tokens; another one starts in its place."""
        if self.session is not None:
            self.lose()
            self.killed.append(self.replicas[self.replica])
            self.replicas[self.replica] = Replica()

    def rest(self) -> None:
        """Bring all that is left to a replica."""
        self.connect()
        self.open()
        self.step()
        self.deliver(10**6)
        self.share()

    def counted(self, name: str) -> int:
        return sum(replica.budgets.counted[name] for replica in (*self.replicas, *self.killed))

    def billed(self, tenant: str) -> int:
        return sum(replica.tenants.counted[tenant, "model"] for replica in (*self.replicas, *self.killed))


def _message(item: Any) -> agent_pb2.ConnectRequest:
    message = item.whole(1 << 30)[0] if isinstance(item, SnapshotRecord) else item
    assert isinstance(message, agent_pb2.ConnectRequest)
    return message


@pytest.mark.parametrize("loses", [False, True], ids=["all reports arrive", "reports are lost"])
@pytest.mark.parametrize("seed", range(8))
def test_thinking_counts_once_however_streams_break(seed: int, loses: bool) -> None:
    world = World(seed)
    draw = world.draw
    acts = [world.step] * 8 + [world.open, world.finish] * 2
    acts += [world.connect, world.share, world.lose, world.kill, world.resync, lambda: world.deliver(draw.randrange(9))]
    for _ in range(300):
        act = draw.choice(acts)
        if not loses and act in (world.lose, world.kill):
            world.deliver(10**6)
        act()
    world.rest()
    for name, truth in world.truth.items():
        assert truth - world.under_way <= world.counted(name) <= truth
    assert world.billed("acme") == world.counted("acme")
    assert loses or world.under_way == 0
    assert world.counted("acme") > 0
