"""Play tapes to control planes as the streams of many simulated engines, on one event loop.

The module owns the streams, each with a TCP connection of its own, the decisions that wait for their outcome, and the
counts. Reports are encoded already (`fleet_tape`), so an engine costs a small part of what the control plane spends on
it. An engine obeys no forced end and no cap, because its tape is fixed; it reports the outcome that an end of its own
gives. Every other decision has the outcome that the agent would report.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import Phase
from meridian_agent.core.step_record import Outcome
from meridian_agent.link.control_stream import BACKOFF_S, CHANNEL_OPTIONS, PATIENCE_S
from tests.bench.fleet_tape import ENGINE, Report
from tests.fakes.agent import hello
from tests.fakes.traces import add_probe

# Duration of a real engine's step in milliseconds.
STEP_MS = 20.0
METHOD = "/meridian.v1.AgentService/Connect"
# Each engine has a connection of its own.
OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
# Tag of ConnectRequest.step.
STEP_TAG = b"\x1a"
EAT_NATS = 0.3, 2.0


class StreamEndedError(Exception):
    """The control plane has ended the stream."""


# An engine whose stream ends in one of these ways opens the next one.
ENDS = (StreamEndedError, TimeoutError, grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


def varint(number: int) -> bytes:
    """Return a number as protobuf encodes it."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Decisions:
    """The decisions of one stream. received: decisions that arrived; told: outcomes that were taken to be sent."""

    def __init__(self) -> None:
        self.received = self.told = 0
        self._caps: dict[int, int] = {}
        self._tiers: dict[int, tuple[int, bool]] = {}
        self._probes: list[tuple[int, int]] = []
        self._plan: tuple[int, bool] | None = None
        # Outcomes to send: decision id, outcome, thinking tokens.
        self._outcomes: list[tuple[int, int, int]] = []
        # Step in which the request of each slot began.
        self._born: dict[int, int] = {}

    @property
    def open(self) -> int:
        """The decisions without an outcome."""
        return self.received - self.told

    def accept(self, message: agent_pb2.Directives, report: Report) -> None:
        """Take in decisions. report: the newest that was sent."""
        step = message.step
        for force in message.forces:
            if self._take(force, report, step):
                thinks = report.phases[force.slot] == Phase.THINK
                shadowed = Outcome.SHADOWED if force.shadow else Outcome.REFUSED
                self._tell(force.decision_id, shadowed if thinks else Outcome.ENDED_NATURALLY)
        for cap in message.caps:
            if self._take(cap, report, step):
                self._end_cap(cap.slot, Outcome.SUPERSEDED)
                self._caps[cap.slot] = cap.decision_id
                if not cap.HasField("max_think_tokens"):
                    self._end_cap(cap.slot, Outcome.APPLIED)
                elif report.phases[cap.slot] != Phase.THINK:
                    self._end_cap(cap.slot, Outcome.ENDED_NATURALLY)
        for tier in message.tiers:
            if self._take(tier, report, step):
                if older := self._tiers.pop(tier.slot, None):
                    self._tell(older[0], Outcome.SUPERSEDED)
                self._tiers[tier.slot] = (
                    tier.decision_id,
                    tier.shadow and tier.tier == agent_pb2.EVICTION_TIER_UNREACHABLE,
                )
        for probe in message.probes:
            if self._take(probe, report, step):
                self._probes.append((probe.decision_id, probe.slot))
        if message.HasField("plan"):
            self._accept_plan(message.plan)

    def _accept_plan(self, plan: agent_pb2.DispatchPlan) -> None:
        self.received += 1
        if self._plan:
            self._tell(self._plan[0], Outcome.SUPERSEDED)
        self._plan = plan.decision_id, plan.shadow

    def _take(self, decision: Any, report: Report, step: int) -> bool:
        """Count a decision about a request; return whether the request is there, and tell the outcome if it is not."""
        self.received += 1
        there = decision.slot not in report.closed and self._born.get(decision.slot, 0) <= step
        if not there:
            self._tell(decision.decision_id, Outcome.REQUEST_GONE)
        return there

    def _tell(self, decision_id: int, outcome: Outcome, think_tokens: int = 0) -> None:
        self._outcomes.append((decision_id, outcome, think_tokens))

    def _end_cap(self, slot: int, outcome: Outcome, think_tokens: int = 0) -> None:
        if decision_id := self._caps.pop(slot, 0):
            self._tell(decision_id, outcome, think_tokens)

    def begin(self, report: Report) -> None:
        """Give every decision about a request the outcome that its request is gone, because a snapshot follows."""
        for slot in range(len(report.numbers)):
            self._close(slot)
        self._born.clear()

    def _close(self, slot: int) -> None:
        self._end_cap(slot, Outcome.REQUEST_GONE)
        if tier := self._tiers.pop(slot, None):
            self._tell(tier[0], Outcome.SHADOWED if tier[1] else Outcome.APPLIED)
        for decision_id, _ in (gone := [probe for probe in self._probes if probe[1] == slot]):
            self._tell(decision_id, Outcome.REQUEST_GONE)
        self._probes = [probe for probe in self._probes if probe not in gone] if gone else self._probes

    def play(self, report: Report, step: int, rng: random.Random) -> agent_pb2.StepReport:
        """Return what a report of the tape lacks: the number of its last step, outcomes, and results of probes."""
        added = agent_pb2.StepReport(step=step)
        for slot in report.opened:
            self._born[slot] = step
        for slot in report.ended:
            self._end_cap(slot, Outcome.ENDED_NATURALLY, report.thinks[slot])
        for slot in report.closed:
            self._close(slot)
        if self._plan:
            self._tell(self._plan[0], Outcome.SHADOWED if self._plan[1] else Outcome.APPLIED)
            self._plan = None
        for decision_id, slot in self._probes:
            thinks = report.phases[slot] == Phase.THINK
            self._tell(decision_id, Outcome.APPLIED if thinks else Outcome.REFUSED)
            if thinks:
                add_probe(added.probes, slot, report.thinks[slot], rng.uniform(*EAT_NATS), 1, decision_id)
        self._probes = []
        for decision_id, outcome, think_tokens in self._outcomes:
            added.outcomes.add(decision_id=decision_id, outcome=outcome, think_tokens=think_tokens)
        self.told += len(self._outcomes)
        self._outcomes = []
        return added


@dataclass
class Counts:
    """Counts over all engines since the counting began. up_bytes, down_bytes: messages without gRPC's framing.

    latencies_s: times from writing a report to the answer to it, for reports that were answered. cut: decisions that
    had no outcome when their stream ended.
    """

    steps: int = 0
    reports: int = 0
    answers: int = 0
    decisions: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    cut: int = 0
    latencies_s: list[float] = field(default_factory=list)


class Fleet:
    """All engines. targets: addresses of replicas. tapes: what the engines play.

    While `playing` is set, each step of an engine takes `step_s` seconds.
    """

    def __init__(self, engines: int, targets: Sequence[str], tapes: Sequence[Sequence[Report]], seed: int = 0) -> None:
        self.targets, self.tapes, self.rng = list(targets), tapes, random.Random(seed)
        self.counts, self.step_s = Counts(), 1.0
        self.playing, self.plays = asyncio.Event(), 0
        # Bounds how many engines connect at once at the beginning; an engine that lost its stream does not wait.
        self.joining = asyncio.Semaphore(32)
        self.engines = [Engine(self, number) for number in range(engines)]
        # Errors of this program, after each of which an engine stands still.
        self.errors: list[Exception] = []
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self) -> None:
        self._tasks = [asyncio.create_task(self.guarded(engine.run())) for engine in self.engines]

    async def guarded(self, running: Coroutine[Any, Any, None]) -> None:
        """Run a part of an engine, and keep an error that no end of a stream explains."""
        try:
            await running
        except ENDS:
            pass
        except Exception as error:
            self.errors.append(error)
            raise

    def play(self, step_s: float) -> None:
        """Let all engines make steps of this many seconds, each beginning at a time of its own."""
        self.step_s, self.plays = step_s, self.plays + 1
        self.playing.set()

    def pause(self) -> None:
        self.playing.clear()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Engine:
    """One engine: its place on its tape, and its stream.

    governed: whether a policy is in force on the present stream; acked: revision of the newest policy and the time of
    the ACK. answered: whether caps have followed a snapshot on the present stream. streams: number of streams begun.
    target: address of the present stream's replica.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet, self.engine_id = fleet, f"fleet-{number:06}"
        self._name = self.engine_id[-len(ENGINE) :].encode()
        self._tape = fleet.tapes[number % len(fleet.tapes)]
        self._at, self._step = fleet.rng.randrange(max(1, len(self._tape) // 2)), 1
        # Addresses that are still to be tried. The first streams are spread evenly, all others at random.
        self._order, self._rng = [fleet.targets[number % len(fleet.targets)]], random.Random(number)
        self._decisions, self._loaded = Decisions(), False
        self._call: Any = None
        self._one_at_a_time = asyncio.Lock()
        # Times of the reports that were not answered yet, by step.
        self._asked: dict[int, float] = {}
        self.governed = self.answered = False
        self.acked, self.streams, self.target = (0, 0.0), 0, ""

    @property
    def open_decisions(self) -> int:
        return self._decisions.open

    async def load(self) -> None:
        """Begin with all requests of the tape at once."""
        self._loaded = True
        await self._snapshot(self._call)

    @property
    def waits(self) -> bool:
        """Whether a report was not answered yet."""
        return bool(self._asked)

    async def spread(self) -> None:
        """Spread the probes of the requests that `load` has begun."""
        await self._report(self._call, self._tape[self._at].spread())

    async def run(self) -> None:
        """Open one stream after another, as the agent's link does."""
        attempt, fleet = 0, self._fleet
        while True:
            self._order = self._order or self._rng.sample(fleet.targets, len(fleet.targets))
            self.target = self._order.pop(0)
            with suppress(*ENDS):
                await self._stream(min(PATIENCE_S[1], PATIENCE_S[0] * 2**attempt))
            attempt = 0 if self.governed else min(attempt + 1, 10)
            self._order = [] if self.governed else self._order
            fleet.counts.cut += self._decisions.open
            self._decisions, self._asked = Decisions(), {}
            self.governed = self.answered = False
            await asyncio.sleep(min(BACKOFF_S[1], BACKOFF_S[0] * 2**attempt) * self._rng.uniform(0.5, 1.5))

    async def _stream(self, patience_s: float) -> None:
        async with grpc.aio.insecure_channel(self.target, OPTIONS) as channel:
            call: Any = channel.stream_stream(METHOD)()
            self._call = call
            places = len(self._tape[0].numbers)
            said = hello(self.engine_id, max_num_seqs=places, num_blocks=128 * places, revision=self.acked[0])
            first = not self.streams
            self.streams += 1
            async with self._fleet.joining if first else nullcontext():
                async with asyncio.timeout(patience_s):
                    await self._write(call, agent_pb2.ConnectRequest(hello=said).SerializeToString())
                    await self._snapshot(call)
                    await self._hear(call, await call.read())
                while not self.governed:
                    await self._hear(call, await call.read())
            player = asyncio.create_task(self._fleet.guarded(self._play(call)))
            try:
                while True:
                    await self._hear(call, await call.read())
            finally:
                player.cancel()
                await asyncio.gather(player, return_exceptions=True)

    async def _hear(self, call: Any, encoded: Any) -> None:
        """Take in a message. Raises StreamEndedError at the end of the stream."""
        if encoded is grpc.aio.EOF:
            raise StreamEndedError
        now, counts = time.monotonic(), self._fleet.counts
        counts.down_bytes += len(encoded)
        response = agent_pb2.ConnectResponse.FromString(encoded)
        if response.HasField("directives"):
            directives = response.directives
            if sent_s := self._asked.get(directives.step):
                counts.latencies_s.append(now - sent_s)
                self._asked = {step: at_s for step, at_s in self._asked.items() if step > directives.step}
            counts.answers += 1
            before = self._decisions.received
            self._decisions.accept(directives, self._tape[self._at])
            counts.decisions += self._decisions.received - before
            self.answered = self.answered or len(directives.caps) > 0
        elif response.HasField("settings"):
            settings = response.settings
            status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=settings.revision)
            # The answer to this message names the newest report, too.
            self._asked.clear()
            await self._write(call, agent_pb2.ConnectRequest(settings_status=status).SerializeToString())
            self.governed, self.acked = True, (settings.revision, time.monotonic())

    async def _snapshot(self, call: Any) -> None:
        self._decisions.begin(self._tape[self._at])
        found = self._tape[self._at].snapshot(self._name.decode(), self._step)
        if not self._loaded:
            found.ClearField("requests")
        await self._write(call, agent_pb2.ConnectRequest(snapshot=found).SerializeToString())

    async def _play(self, call: Any) -> None:
        """Send one report after another, each when its last step is over."""
        fleet, plays, due_s = self._fleet, 0, 0.0
        while True:
            if self._at + 1 == len(self._tape):
                # The tape is over, so it begins anew with other requests.
                self._at = 0
                await self._snapshot(call)
            report = self._tape[self._at + 1]
            await fleet.playing.wait()
            now = time.monotonic()
            takes_s = report.steps * fleet.step_s
            if plays != fleet.plays:
                plays, due_s = fleet.plays, now + takes_s * self._rng.random()
            else:
                # An engine that is late by more than a report leaves the steps out.
                due_s = max(due_s + takes_s, now - takes_s)
            await asyncio.sleep(due_s - now)
            if not fleet.playing.is_set():
                continue
            self._at += 1
            fleet.counts.steps += report.steps
            fleet.counts.reports += 1
            await self._report(call, report)

    async def _report(self, call: Any, report: Report) -> None:
        async with self._one_at_a_time:
            self._step += report.steps
            added = self._decisions.play(report, self._step, self._rng).SerializeToString()
            body = report.body.replace(ENGINE.encode(), self._name) if report.opened else report.body
            self._asked[self._step] = time.monotonic()
            await self._send(call, STEP_TAG + varint(len(body) + len(added)) + body + added)

    async def _write(self, call: Any, encoded: bytes) -> None:
        async with self._one_at_a_time:
            await self._send(call, encoded)

    async def _send(self, call: Any, encoded: bytes) -> None:
        self._fleet.counts.up_bytes += len(encoded)
        await call.write(encoded)
