"""One run: engines, a control plane, a workload and faults, all from one seed, then a calm phase with the final
checks."""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from meridian.v1 import fleet_pb2
from meridian.v1.fleet_pb2 import BudgetStage

from meridian_agent.core import guard as guard_module
from meridian_agent.core import tracker as tracker_module
from meridian_agent.core.guard import Guard
from meridian_agent.engine import lifecycle as lifecycle_module
from meridian_agent.engine import probe_runner as probing_module
from meridian_agent.engine import scheduler_mixin as scheduler_module
from meridian_agent.link import inbox as inbox_module
from meridian_agent.link import outbox as outbox_module
from meridian_control.capabilities.budgets.fleet import BudgetSharing
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.order import rule as dispatch
from meridian_control.capabilities.pressure.rule import MAX_LEVEL
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.common.slices import at_once
from meridian_control.engine.operator_ends import ENDING
from meridian_control.fleet import connection as connection_module
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.thinking_ends import end_here
from meridian_control.fleet.trace_records import part_record
from meridian_control.policy.model import Policy
from tests.fakes.fleets import requests_of
from tests.sim.clock import Timeline, stored
from tests.sim.engine import Script, Shape, mix, share_tokenizer, words
from tests.sim.faults import FAULTS
from tests.sim.inject import INJECTED_AT, LINK, Fault, Injected
from tests.sim.invariants import Invariants
from tests.sim.network import Network, SteppedLink
from tests.sim.plant import NoFile, Plant
from tests.sim.policies import BUDGETS, NO_LIMITS, draw
from tests.sim.recorded import Replayed

# Limits that are small enough for rings, queues and windows to fill up within a run.
LIMITS: tuple[tuple[Any, str, int], ...] = (
    (inbox_module, "INBOX_MESSAGES", 24),
    (outbox_module, "MERGE_RECORDS", 4),
    (connection_module, "QUEUE_MESSAGES", 16),
    (dispatch, "WARM_STEPS", 4),
)
NOTHING = {"enabled": False}
CALM_TICKS = 3000
# One request in this many has a long prompt.
LONG_PROMPTS = 8
# Mean numbers of tokens after which a request's model stops while it thinks; most never do.
STOPS = (0, 0, 0, 0, 2, 4, 12)
# Rests of an agent that meets faults; they are short enough for it to come back within a run.
RESTS_S = (0.1, 0.1, 0.1)


@dataclass(frozen=True)
class Options:
    """Options with which a run is cut short, or kinds of fault are left out, so that a failing run can be made
    smaller."""

    ticks: int = 1 << 30
    without: frozenset[str] = frozenset()
    trace: bool = False
    # How engines are built; None if the seed draws it.
    shape: Shape | None = None
    # The fault that the agent meets.
    fault: Fault | None = None
    # Largest number of tokens of a request.
    longest: int = 100


class Failure(AssertionError):  # noqa: N818 - it is one
    """A violation and the run in which it happened."""

    def __init__(self, seed: int, tick: int, reason: str, trace: list[str]) -> None:
        super().__init__(f"seed {seed}, tick {tick}: {reason}")
        self.seed, self.tick, self.reason, self.trace = seed, tick, reason, trace


class World:
    """All parts of one run. is_stock: run the same workload on stock vLLM."""

    def __init__(self, seed: int, options: Options, patch: pytest.MonkeyPatch, is_stock: bool = False) -> None:
        self.seed, self.options, self.patch, self.governed = seed, options, patch, not is_stock
        self.timeline = Timeline()
        self.rng, self.work = random.Random(f"faults {seed}"), random.Random(f"work {seed}")
        self.invariants = Invariants()
        self.invariants.trace = [] if options.trace else None
        # Whether some of the requests repeat themselves while they think.
        self.loops = random.Random(f"loops {seed}").random() < 0.2
        kinds = random.Random(f"kind {seed}")
        # Whether policies decide nothing, or only in shadow, so that the engine must do what stock vLLM does.
        self.is_quiet = kinds.random() < 0.15
        self.network = Network(self.timeline, self.rng, self.invariants, records=kinds.random() < 0.25)
        self.network.latency_ms = kinds.choice((0.0, 1.0, 10.0, 60.0))
        self.harshness = kinds.choice((0.0, 0.05, 0.15, 0.4))
        self.step_ms = kinds.choice((1.0, 5.0, 30.0))
        self.ticks = min(kinds.choice((20, 40, 80)), options.ticks)
        # Draws the ends of thinking that operators ask for, apart from all other draws; None if nobody asks for any.
        operators = random.Random(f"operators {seed}")
        self.operators = operators if self.governed and not self.is_quiet and operators.random() < 0.3 else None
        # The smallest rings are full before a report interval is over.
        self.ring_records = kinds.choice((2, 3, 12, 12))
        self.patches()
        self.tick = 0
        self.revision = 0
        self.opened = 0
        # Draws the stages of budgets, apart from all other draws.
        self.spenders = random.Random(f"spenders {seed}")
        # Decisions that operators' calls made.
        self.ended = 0
        self.server = self.network.server
        with self.timeline.running():
            self.put_policy()
            if self.rng.random() < 0.9:
                self.server.start()
        self.plants = [Plant(self, f"engine-{n}") for n in range(kinds.choice((1, 1, 1, 2)))]

    def patches(self) -> None:
        self.patch.setenv("MERIDIAN_CONTROL", "control:1")
        self.patch.setattr(lifecycle_module, "ControlStream", partial(SteppedLink, self.network))
        self.patch.setattr(lifecycle_module, "StateFile", NoFile)
        self.patch.setattr(scheduler_module, "Guard", partial(Guard, clock=self.timeline.time))
        share_tokenizer(self.patch)
        for module in (guard_module, probing_module, scheduler_module):
            self.patch.setattr(module, "time", self.timeline)
        names = random.Random(self.seed)
        self.patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=names.getrandbits(128), version=4))
        drawn = (
            (outbox_module, "RING_RECORDS", self.ring_records),
            # Half of the seeds use a slot again at once.
            (tracker_module, "RESTING_SLOTS", self.seed % 2 * tracker_module.RESTING_SLOTS),
        )
        for module, name, value in (*LIMITS, *drawn):
            self.patch.setattr(module, name, value)
        say = Connection.say

        def checked(connection: Connection, responses: list[Any], now: datetime) -> None:
            """Check the control plane's messages while its table is still as it was when it decided."""
            for response in responses:
                self.invariants.said(connection.session, response)
            say(connection, responses, now)

        self.patch.setattr(Connection, "say", checked)
        self.injected, self.was_raised, self.last = None, False, False
        if self.governed and self.options.fault is not None:
            self.injected = Injected(self.options.fault)
            self.injected.install(self.patch, RESTS_S)
            self.network.on_link = self.injected.on_link

    # ------------------------------------------------------------------------------------------------------ the run

    def run(self) -> None:
        with self.timeline.running():
            while self.tick < self.ticks:
                self.tick += 1
                if self.work.random() < 0.35:
                    self.open()
                if self.work.random() < 0.03:
                    self.abort()
                if self.governed and self.rng.random() < self.harshness:
                    self.fault()
                if self.operators is not None and self.operators.random() < 0.3:
                    self.end_thinking(self.operators)
                if self.governed and self.spenders.random() < 0.1:
                    self.spend(self.spenders)
                self.pass_time(self.rng.uniform(0.0, 0.5) * self.step_ms / 1e3)
            self.come_to_rest()
            if self.options.fault is not None:
                self.go_on("after")
                self.go_on("later")
                # The request before may have met the fault.
                self.last = self.last or (self.injected is not None and self.injected.raised and not self.was_raised)
                if self.last:
                    self.go_on("last")
                self.check_recovery()

    def go_on(self, name: str) -> None:
        """Run a request on each engine to its end."""
        self.was_raised = self.injected is not None and self.injected.raised
        for number, plant in enumerate(self.plants):
            plant.open(f"{name}-{number}", [words()[0]], Script(number, 5, 5, restless=False), {})
        self.come_to_rest()

    def pass_time(self, seconds: float) -> None:
        self.timeline.advance(seconds)
        if self.governed:
            self.network.tick()
        for plant in self.plants:
            plant.step()
        if self.governed:
            self.network.tick()
            self.compare()

    def compare(self) -> None:
        """Compare the control plane's and the agent's state wherever no message is under way."""
        for plant in self.plants:
            link = plant.link
            if plant.engine.agent is None:
                continue
            if link is None or not link.quiet() or not link.outbox.follows or plant.engine._queue:
                continue
            assert link.stream is not None
            if link.stream.connection is not None and not link.stream.dead:
                plant.books.sides_agree(link.stream.connection.session)

    def open(self) -> None:
        """Open a request on some engine; it depends only on the workload's seed."""
        work, (start, end, _, text) = self.work, words()
        plant = work.choice(self.plants)
        self.opened += 1
        prompt = [work.choice(text) for _ in range(work.choice((1, 6, 20, 40)))]
        if mix(self.seed, self.opened) % LONG_PROMPTS == 0:
            # The context leaves this request fewer tokens than its max_tokens may be.
            prompt = [*[text[0]] * 60, *prompt]
        prompt += work.choice(([], [start], [start], [start, end]))
        own: dict[str, Any] = {"meridian_tenant": work.choice("ab"), "meridian_effort": work.choice(("", "low"))}
        cap = work.choice((None, None, 0, 3, 20)) if not self.is_quiet else None
        if cap is not None:
            own["meridian_max_think_tokens"] = cap
        if self.opened % 9 == 0:
            own["meridian_effort"] = "ultra"
        if work.random() < 0.2 and not self.is_quiet:
            own["meridian_min_think_tokens"] = work.choice((0, 5, 30))
        script = Script(
            work.getrandbits(32),
            think_mean=work.choice((3, 20, 60)),
            answer_mean=work.choice((3, 20)),
            restless=work.random() < 0.3,
            max_tokens=min(work.choice((1, 10, 60, 100)), self.options.longest),
            priority=work.choice((0, 0, 5)),
            loop=work.choice((1, 2, 7, 16)) if self.loops and work.random() < 0.3 else 0,
            counts=work.random() < 0.5,
            stops=STOPS[mix(self.seed, self.opened, 5) % len(STOPS)],
        )
        name = f"r{self.opened}"
        plant.open(name, prompt, script, own)

    def abort(self) -> None:
        plant, which = self.work.choice(self.plants), self.work.random()
        if live := plant.engine.live:
            plant.engine.abort(live[int(which * len(live))])

    def end_thinking(self, rng: random.Random) -> None:
        """Let an operator end the thinking of some live request, sometimes in two calls one after the other."""
        fleet = self.server.fleet
        if fleet is None or self.timeline.now_s < self.server.hung_until_s or not (live := requests_of(fleet)):
            return
        chosen = rng.choice(live)
        calls = [end_here(fleet, chosen.engine_id, chosen.request_id, "")[1] for _ in range(rng.choice((1, 1, 2)))]
        self.invariants.note(f"an operator ends {chosen.request_id} at tick {self.tick}: {calls[0].state}")
        self.ended += calls[0].state == ENDING
        for again in calls[1:]:
            assert again.state != ENDING, f"a second call decides again about {chosen.request_id}"
            assert again.decision is calls[0].decision, "a second call names another decision"

    def spend(self, rng: random.Random) -> None:
        """Let budgets be used up or be refilled, and targets be missed or met."""
        fleet = self.server.fleet
        if fleet is None or self.timeline.now_s < self.server.hung_until_s:
            return
        budgets = fleet.part(BudgetSharing).budgets
        budgets.stages = {name: rng.choice(BudgetStage.values()[1:]) for name in BUDGETS}
        self.invariants.note(f"budgets are in stages {budgets.stages} at tick {self.tick}")
        # The fleet keeps its sessions in a set, whose order would make a run differ from its repetition.
        for session in sorted(fleet.counted_sessions(), key=lambda one: (one.hello.engine_id, one.connected_at)):
            at_once(session.part(EngineBudgets).set_stages(budgets.stages))
            now = self.timeline.utc_now()
            fleet.recordings.note(session, part_record, now, session.part(EngineBudgets).record())
            if session.part(EnginePressure).entries:
                # The runs are shorter than a window, so that the levels are drawn too.
                session.part(EnginePressure).set_levels({name: rng.randint(0, MAX_LEVEL) for name in BUDGETS})
                levels = session.part(EnginePressure).record()
                fleet.recordings.note(session, part_record, now, levels)

    # ----------------------------------------------------------------------------------------------------- the faults

    def fault(self) -> None:
        name, rng = self.rng.choice(sorted(FAULTS)), random.Random(self.rng.getrandbits(64))
        if name not in self.options.without:
            self.invariants.note(f"{name} at tick {self.tick}")
            FAULTS[name](self, rng)

    def put_policy(self, rng: random.Random | None = None) -> None:
        """Put a new revision in force."""
        self.revision += 1
        self.server.put_in_force(stored(self.revision, self.policy(rng or self.rng)))

    def policy(self, rng: random.Random) -> Policy:
        if self.is_quiet:
            # Whether an answer would be empty is measured in shadow, too, by probes, which take part in steps.
            shadow = {"shadow": True, "empty_answer_extension_tokens": 0} if rng.random() < 0.5 else NOTHING
            others: dict[str, Any] = {"kv_memory": {"shadow": True}, "engine": NO_LIMITS, "override": []}
            others["preemption"] = {"shadow": True}
            return draw(rng, scheduler=shadow, entropy=NOTHING, loop={"shadow": True}, **others)
        sections: dict[str, Any] = {}
        if rng.random() < 0.5:
            sections["entropy"] = {"enabled": True, "shadow": False, "eat_warmup_samples": 1}
            sections["scheduler"] = {"min_think_tokens": rng.choice((0, 1, 5))}
        return draw(rng, model=self.markers(rng), **sections)

    def markers(self, rng: random.Random) -> dict[str, Any]:
        """Return the policy's model section, which is seldom set: other markers, a closing text, ids outside the
        vocabulary."""
        start, end, _, text = words()
        chance = rng.random()
        if chance < 0.7:
            return {}
        if chance < 0.8:
            return {"m": {"closing_text": " ".join(["Wait ."] * rng.choice((1, 1, 6)))}}
        if chance < 0.85:
            return {"m": {"think_end_token_ids": [1 << 20]}}
        if chance < 0.9:
            return {"m": {"supports_think_disable": False, "eat_answer_prefix": "the"}}
        return {"m": {"think_start_token_ids": [start], "think_end_token_ids": [text[0], end]}}

    def start_control(self) -> None:
        if self.server.fleet is None:
            self.server.start()

    # ------------------------------------------------------------------------------------------------------- the calm

    def calm(self) -> None:
        """End all faults, and check that requests end, both sides agree and every decision has its outcome."""
        self.network.latency_ms, self.server.hung_until_s = 0.0, 0.0
        self.start_control()
        self.server.set_freezes(())
        pause_s = 0.01
        for _ in range(CALM_TICKS):
            self.tick += 1
            self.pass_time(pause_s)
            if not any(plant.engine.busy() for plant in self.plants):
                if self.settled():
                    break
                # The longer pauses let dead connections be detected and leases end.
                pause_s = min(2.0, pause_s * 1.5)
        for plant in self.plants:
            assert not plant.engine.busy(), f"requests do not end: {plant.engine.live}"
            plant.books.nothing_left()
        assert self.settled(), self.unsettled()

    def come_to_rest(self) -> None:
        if self.governed:
            self.calm()
        while any(plant.engine.busy() for plant in self.plants):
            self.pass_time(0.01)

    def check_recovery(self) -> None:
        """Check that every agent is back with the next request and knows its fault."""
        if self.injected is None:
            return
        guards = [plant.engine.scheduler._guard for plant in self.plants]
        for plant, guard in zip(self.plants, guards, strict=True):
            assert plant.engine.agent is not None, f"{plant.name} stays without its agent: {guard.text}"
        if self.injected.raised:
            said, where = [guard.last_fault for guard in guards if guard.last_fault], self.injected.fault
            assert all(INJECTED_AT in fault for fault in said), f"something else failed: {said}"
            # The guard is not concerned with a fault on the link's thread, which connects anew.
            on_link = where.line is not None and where.line[0] == LINK and not self.injected.was_early
            assert bool(said) is not on_link, f"the guard has stopped {said}"

    def settled(self) -> bool:
        return not self.unsettled()

    def unsettled(self) -> str:  # noqa: PLR0911 - as many reasons
        """Return what keeps the two sides from being at rest with each other, or an empty string."""
        for plant in self.plants:
            link = plant.link
            assert link is not None
            if plant.engine.scheduler._guard.rest_s():
                return f"the agent of {plant.name} is off"
            if not link.quiet():
                return f"{plant.name} is not connected, or says something still"
            assert link.stream is not None
            if link.stream.agent_learns_s is not None or link.stream.connection is None:
                return f"{plant.name} has a stream that is over"
            session = link.stream.connection.session
            if session.revision != self.revision:
                return f"{plant.name} was not given revision {self.revision}"
            if not session.nack_error and not link.lease.revision == session.acked_revision == self.revision:
                return f"{plant.name} has revision {link.lease.revision}, not {self.revision}"
            if session.open_decisions:
                return f"{plant.name} leaves without an outcome: {list(session.open_decisions.values())}"
        return ""

    def check_replay(self) -> None:
        """Check that a replay of the recording gives the same responses and satisfies the invariants by itself."""
        invariants = Invariants(self.invariants.hidden_drafts)
        for recording in self.server.recordings:
            sessions: dict[str, Replayed] = {}
            for record in map(fleet_pb2.TraceRecord.FromString, recording._waiting):
                if record.up.HasField("hello"):
                    sessions[record.session_id] = Replayed(record, invariants)
                else:
                    sessions[record.session_id].take(record)
            for replayed in sessions.values():
                replayed.end()

    def check_stock(self) -> None:
        """Check that stock vLLM does the same with the same workload, step by step."""
        with pytest.MonkeyPatch.context() as patch:
            stock = World(self.seed, self.options, patch, is_stock=True)
            stock.last = self.last
            stock.run()
        for ours, theirs in zip(self.plants, stock.plants, strict=True):
            steps = [[s for s in plant.engine.schedule if s] for plant in (ours, theirs)]
            assert steps[0] == steps[1], "stock vLLM schedules otherwise"
            assert ours.engine.model.tokens == theirs.engine.model.tokens, "stock vLLM says something else"
            assert ours.engine.finished == theirs.engine.finished, "requests end otherwise in stock vLLM"
            assert ours.books.forced_tokens == 0


@contextmanager
def _silent() -> Iterator[None]:
    logger = logging.getLogger("vllm.meridian")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def run(seed: int, options: Options = Options()) -> World:
    """Run one seed. Raises Failure."""
    with pytest.MonkeyPatch.context() as patch, _silent():
        world = World(seed, options, patch)
        try:
            world.run()
            world.check_replay()
            if world.is_quiet:
                world.check_stock()
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise Failure(seed, world.tick, reason, world.invariants.trace or []) from error
    return world
