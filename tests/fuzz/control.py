"""Hostile agents on the control plane's side of their streams: the real Fleet and Sessions, in virtual time.

A case is a list of TraceRecords: `up` is a message of a stream's agent, `policy` is put in force, `end_thinking` is an
operator's call for the stream's requests, and an empty record lets time pass. Allowed reactions: the message is
handled, or the stream ends with InvalidRequest or MemoryExceeded. Either way the state of the fleet can be shown, its
tables stay bounded, and an engine on another stream is served as usual.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.errors import MeridianError, NotFound, PolicyError
from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.common.slices import at_once
from meridian_control.engine.decision_ledger import MAX_OPEN_DECISIONS
from meridian_control.engine.step_cost import WARM_STEPS
from meridian_control.fleet.fleet import Fleet
from meridian_control.fleet.thinking_ends import end_here
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema
from tests.fakes.agent import FakeAgent, Script, hello
from tests.fakes.fleets import engines_of, requests_of, totals_of
from tests.fuzz.hostile import Hostile
from tests.sim.clock import Timeline, stored
from tests.sim.policies import NO_LIMITS, draw

if TYPE_CHECKING:
    import random

    from meridian_control.fleet.connection import Connection

    Case = list[fleet_pb2.TraceRecord]

# Largest size of a live request in the table.
MAX_OPENED_BYTES = 16 << 10
# Number of a stream's requests that an operator ends at once.
ENDED = 8


def make(rng: random.Random) -> Case:
    hostile = Hostile(rng, rng.choice((0.6, 0.9, 0.97)))
    made: Case = []
    if rng.random() < 0.7:
        made.append(_policy(rng))
    if rng.random() < 0.15:
        # Enough records for the well-behaved engine to teach the control plane the cost of its steps.
        made += [_policy(rng, 0.5), *[fleet_pb2.TraceRecord()] * (WARM_STEPS + 5)]
    for stream in rng.sample("abc", rng.randint(1, 3)):
        if rng.random() < 0.9:
            first = agent_pb2.ConnectRequest(hello=hello(stream) if rng.random() < 0.7 else None)
            if not first.hello.engine_id:
                hostile.fill(first.hello)
            made.append(_up(stream, first))
            if rng.random() < 0.8:
                status = agent_pb2.SettingsStatus(nonce=1, revision=1)
                made.append(_up(stream, agent_pb2.ConnectRequest(settings_status=status)))
        for _ in range(rng.randint(1, 12)):
            made.append(_up(stream, _message(rng, hostile)))
            if rng.random() < 0.05:
                made.append(_policy(rng))
            if rng.random() < 0.1:
                made.append(fleet_pb2.TraceRecord(session_id=stream, end_thinking=fleet_pb2.TracedEnd()))
    return made


def _message(rng: random.Random, hostile: Hostile) -> agent_pb2.ConnectRequest:
    message = agent_pb2.ConnectRequest()
    kind = rng.choice(("step",) * 8 + ("snapshot", "settings_status", "hello", ""))
    if kind:
        getattr(message, kind).SetInParent()
        hostile.fill(getattr(message, kind))
    return message


def _policy(rng: random.Random, extreme: float = 0.1) -> fleet_pb2.TraceRecord:
    calibrated = {"shadow": False, "eat_warmup_samples": 1} if rng.random() < 0.5 else {}
    # The engine beside cannot hand requests over and has no limits that can change, so it would refuse a policy with
    # either.
    drawn = draw(rng, extreme, entropy=calibrated, disagg={"enabled": False}, engine=NO_LIMITS)
    return fleet_pb2.TraceRecord(policy=fleet_pb2.TracedPolicy(revision=1, policy=forms.to_proto(drawn)))


def _up(stream: str, message: agent_pb2.ConnectRequest) -> fleet_pb2.TraceRecord:
    return fleet_pb2.TraceRecord(session_id=stream, up=message)


def run(case: Case) -> None:
    timeline = Timeline()
    with timeline.running():
        World(timeline).run(case)


class World:
    """The fleet, the streams of the case, and a well-behaved engine on another stream."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.fleet = Fleet(timeline.utc_now, capabilities=CAPABILITIES)
        self.revision = 0
        self.streams: dict[str, Connection] = {}
        self.put_in_force(schema.Policy())
        self.beside = FakeAgent()
        self.beside_connection = self.fleet.join(hello("beside"))
        # The steps are so long that some requests are left out of them.
        self.beside.step_cost_ms = 5.0, 20.0
        for name, think in (("a", 0), ("b", 0), ("c", 500), ("d", 500), ("e", 500)):
            self.beside.open(name, Script(think, 500))

    def put_in_force(self, policy: schema.Policy) -> None:
        self.revision += 1
        self.fleet.set_policy(stored(self.revision, policy))
        self.timeline.advance(3.0)

    def run(self, case: Case) -> None:
        for record in case:
            self.timeline.advance(0.01)
            self._play(record)
            self._look()
            self._serve_beside()
        assert self.beside_connection in self.fleet.connections
        assert self.beside_connection.session.acked_revision == self.revision
        assert not self.beside_connection.session.totals.unknown_outcomes

    def _play(self, record: fleet_pb2.TraceRecord) -> None:
        if record.HasField("policy"):
            try:
                self.put_in_force(forms.from_proto(record.policy.policy))
            except PolicyError:
                return
            return
        connection = self.streams.get(record.session_id)
        if record.HasField("end_thinking") and connection is not None:
            self._end_thinking(connection)
        if not record.HasField("up"):
            return
        try:
            if connection is None:
                # The server refuses a stream that begins with another message.
                if record.up.HasField("hello"):
                    self.streams[record.session_id] = self.fleet.join(record.up.hello)
                return
            at_once(self.fleet.receiving(connection, record.up))
        except MeridianError as error:
            self._expect(error)
            if connection is not None:
                self._leave(record.session_id, error.code)

    def _end_thinking(self, connection: Connection) -> None:
        """Let an operator end some of the stream's requests. A stream of the same engine may have replaced this one."""
        session = connection.session
        for _, opened in list(session.table.requests())[:ENDED]:
            with suppress(NotFound):
                end_here(self.fleet, session.hello.engine_id, opened.request_id, "")

    def _expect(self, error: MeridianError) -> None:
        assert error.code in {"invalid_request", "memory_exceeded"}, error
        assert len(str(error)) < 10_000

    def _leave(self, stream: str, reason: str) -> None:
        self.fleet.leave(self.streams.pop(stream), reason)

    def _look(self) -> None:
        """Check that the fleet's state can be shown and has a bounded size."""
        for stream, connection in list(self.streams.items()):
            outgoing = connection.outgoing
            while not outgoing.empty():
                response = outgoing.get_nowait()
                if response is None:
                    self._leave(stream, "replaced")
                    break
                response.SerializeToString()
            session = connection.session
            assert len(session.table.info) <= MAX_SLOTS
            assert len(session.open_decisions) <= MAX_OPEN_DECISIONS
            assert all(info is None or info.held_bytes <= MAX_OPENED_BYTES for info in session.table.info)
        fleet_pb2.WatchFleetResponse(
            engines=engines_of(self.fleet), requests=requests_of(self.fleet)
        ).SerializeToString()
        totals_of(self.fleet)

    def _serve_beside(self) -> None:
        self._exchange()
        self.beside.step()
        self._exchange()

    def _exchange(self) -> None:
        agent, connection = self.beside, self.beside_connection
        while True:
            while not connection.outgoing.empty():
                response = connection.outgoing.get_nowait()
                assert response is not None, "the well-behaved engine lost its stream"
                agent.receive(response)
            if not (heard := agent.heard()):
                return
            for message in heard:
                at_once(self.fleet.receiving(connection, message))
