"""Holds all engines of this replica: takes them in, passes on what their agents report, and lets them go.

All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, TypeVar

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control import __version__
from meridian_control.common.errors import TooMany
from meridian_control.engine.part import having
from meridian_control.engine.session import Session
from meridian_control.engine.totals import Totals
from meridian_control.fleet.connection import Connection, Connections
from meridian_control.fleet.departed import Departed
from meridian_control.fleet.freeze_delivery import FreezeDelivery
from meridian_control.fleet.memory import STEP_BYTES, Account, Memory
from meridian_control.fleet.part import FleetPart, each
from meridian_control.fleet.policy_delivery import PolicyDelivery
from meridian_control.fleet.recording import Recording, Recordings
from meridian_control.fleet.trace_records import hello_record, records_at_start
from meridian_control.fleet.turns import LoopDelay, Tasks, Turns, in_turns
from meridian_control.fleet.views import Views, engine_view
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from datetime import datetime

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Capability
    from meridian_control.engine.shadow_comparison import Comparison
    from meridian_control.fleet.memory import MemoryLimits
    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.state import Rollout

logger = logging.getLogger(__name__)

# Seconds without a message after which an agent sends a heartbeat. Proxies cut idle streams after 5 s or more.
HEARTBEAT_S = 3.0
# Largest number of an engine's processes that have streams at the same time: a process that has ended may leave its
# stream open for a while.
INCARNATIONS = 4
# Seconds after which an agent may try again that found too many of them.
RETRY_S = 5.0
# Seconds between two times at which sessions take in the time.
REST_S = 1.0
DONE = object()
AnyFleetPart = TypeVar("AnyFleetPart", bound=FleetPart)


class Fleet:
    """The engines of this replica.

    `clock` gives UTC, and is not set back or forward while the process runs. `revision` reads a policy revision from
    the store, and raises NotFound, StoreUnavailable or StoredPolicyUnreadable. `decisions` is the log that keeps
    decisions. `heartbeat_s`: the field of Welcome. `memory` bounds what the sessions take.
    `capabilities` decide in their order, and `parts` has their parts over all engines.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        *,
        revision: Callable[[int], Awaitable[StoredRevision]] | None = None,
        decisions: DecisionLog | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        memory: MemoryLimits | None = None,
        capabilities: Sequence[Capability],
    ) -> None:
        self.clock, self._heartbeat_ms = clock, round(heartbeat_s * 1e3)
        self.began_at = clock()
        self.turns, self.tasks = Turns(), Tasks()
        self.memory, self.loop_delay = Memory(memory), LoopDelay()
        self.decisions = decisions or DecisionLog()
        # Comparisons of rules in shadow, by engine id; each outlives the engine's streams.
        self.shadows: dict[str, Comparison] = {}
        self.connections, self.departed = Connections(), Departed()
        self.recordings = Recordings()
        self.views = Views(self.connections, self.departed, clock, self.engine_view)
        self.closed_totals = Totals()
        self.stream_ends: dict[str, int] = {}
        # Why the fleet is closed; empty while it is not.
        self._closed = ""
        self._policies = PolicyDelivery(self.connections, clock, self.turns, self.tasks, revision)
        self.freezes = FreezeDelivery(self.connections, clock, self.tasks, self._froze)
        self.capabilities = capabilities
        self.parts = {
            capability.name: capability.fleet(self) for capability in capabilities if capability.fleet is not None
        }
        sharing = {name for name, part in self.parts.items() if having([part], FleetPart.stream)}
        makers = [
            self.parts[capability.name].stream if capability.name in sharing else capability.stream
            for capability in capabilities
        ]
        self._makers = [make for make in makers if make is not None]
        self._show_engine = having(self.parts.values(), FleetPart.show_engine)

    def join(
        self, hello: agent_pb2.Hello, refresh: Callable[[], Awaitable[None]] | None = None, who: str = ""
    ) -> Connection:
        """Begin a session and queue its first messages. Raises InvalidRequest, and TooMany if too many processes have
        streams under the engine's id.

        who: name of the caller.
        refresh: brings the newest state of the store to this fleet, and raises StoreUnavailable or
        StoredPolicyUnreadable. `refresh` is called if the engine has a newer policy than this fleet knows; without
        `refresh` such an engine keeps its policy.
        """
        now = self.clock()
        same_name = self.connections.of_engine(hello.engine_id)
        others = {c.session.hello.incarnation for c in same_name} - {hello.incarnation}
        if len(others) >= INCARNATIONS:
            raise TooMany(f'{INCARNATIONS} processes of engine "{hello.engine_id}" have streams', RETRY_S)
        session_id = uuid.uuid4().hex
        journal = Journal(self.decisions, hello.engine_id, hello.incarnation, session_id, now)
        # An agent has one stream, so an older stream has ended although its end was not noticed yet.
        replaced = self.connections.of_process((hello.engine_id, hello.incarnation))
        session = Session(session_id, hello, now, journal, self.shadows.get(hello.engine_id), parts=self._makers)
        self.shadows[hello.engine_id] = session.shadow
        account = Account(self.memory, who)
        connection = Connection(session, who=who, memory=account, recordings=self.recordings)
        connection.note(hello_record, now)
        for part in self.parts.values():
            part.joined(connection)
        welcome = agent_pb2.Welcome(
            session_id=session_id,
            server_version=__version__,
            reads_byte_columns=True,
            reads_sparse_columns=True,
            other_incarnation=self.connections.namesake(session),
            reads_snapshot_parts=True,
            heartbeat_ms=self._heartbeat_ms,
        )
        connection.say([agent_pb2.ConnectResponse(welcome=welcome)], now)
        self.freezes.begin(connection)
        self._policies.begin(connection, refresh)
        for older in replaced:
            self.connections.disconnect(older)
            older.close("replaced")
        self.connections.connect(connection)
        self.departed.remove(hello.engine_id)
        if self._closed:
            self.send_away(connection, self._closed)
        return connection

    async def keep_resting(self) -> None:
        """Let all sessions take in the time that passes, until cancelled: an engine without requests sends no
        reports."""
        while True:
            await self.rest()
            await asyncio.sleep(REST_S)

    async def rest(self) -> None:
        """Let all sessions take in the time once. The method ends, so that no connection that leaves meanwhile is
        kept."""
        async for connection in in_turns(list(self.connections)):
            if not connection.busy:
                connection.session.rest(self.clock())

    def receiving(self, connection: Connection, message: agent_pb2.ConnectRequest) -> Sliced[None]:
        """Take in a message of an agent and queue the responses.

        Raises InvalidRequest for a message that breaks the contract, and MemoryExceeded for one that would take too
        much memory; recordings leave such a message out.
        """
        session, now = connection.session, self.clock()
        connection.busy = True
        try:
            work = session.taking_in(message, now)
            while connection in self.connections:
                try:
                    next(work)
                except StopIteration as done:
                    responses = done.value
                    break
                connection.memory.hold(session.held_bytes)
                yield
            else:
                # A newer stream of the process has replaced this one, and its snapshot has what this message says.
                return
            if not -STEP_BYTES < session.held_bytes - connection.memory.bytes < STEP_BYTES:
                connection.memory.hold(session.held_bytes)
            if self.recordings:
                self.recordings.note_heard(session, message, now)
            if responses:
                connection.say(responses, now)
            if connection.waiting:
                connection.wake()
            if session.nack_error:
                self._policies.restore_last_good(connection)
        finally:
            connection.busy = False
        if connection.later:
            connection.catch_up()

    def record(self, engine_id: str) -> Recording:
        """Begin a recording with records of the open sessions; the caller later discards it from `recordings`."""
        recording, now = Recording(engine_id), self.clock()
        for session in filter(recording.wants, self.connections.sessions):
            for record in records_at_start(session, now):
                recording.add(record.SerializeToString())
        self.recordings.add(recording)
        if self._closed:
            recording.close()
        return recording

    def leave(self, connection: Connection, reason: str) -> None:
        """End a session and count the reason. A large session is closed in turns."""
        work = self._leaving(connection, reason)
        if next(work, DONE) is not DONE:
            self.tasks.start(self._in_turns(connection, work))

    async def _in_turns(self, connection: Connection, work: Iterator[None]) -> None:
        for _ in work:
            await self.turns.next(connection.who)

    def _leaving(self, connection: Connection, reason: str) -> Iterator[None]:
        replaced = connection not in self.connections
        self.connections.disconnect(connection)
        each(self.parts.values(), lambda part: part.left(connection, replaced))
        session, now = connection.session, self.clock()
        self.count_end(reason)
        try:
            for _ in session.closing(now, followed=bool(self.connections.of_process(session.identity))):
                if session.hello.engine_id not in self.departed:
                    self._depart(session, reason, now)
                yield
        except Exception:
            # An error of the control plane, often the one that has ended the stream. The engine has left all the same.
            logger.exception("the session of engine %s could not be closed", session.hello.engine_id)
        connection.wake()
        self.closed_totals.add(session.totals)
        self.connections.counted.discard(connection)
        connection.memory.close()
        self._depart(session, reason, now)
        for gone in (forgotten := self.departed.forget(now)):
            self.shadows.pop(gone, None)
        if forgotten:
            each(self.parts.values(), lambda part: part.forgot(forgotten))

    def _depart(self, session: Session, reason: str, now: datetime) -> None:
        """Keep the engine of a session whose stream has ended, unless a newer stream of the engine is open."""
        if not self.connections.of_engine(session.hello.engine_id):
            session.shadow.new_stream()
            view = self.engine_view(session, connected=False)
            # An agent ends its stream itself only when its engine shuts down without an error.
            view.lost = reason != "agent_closed"
            self.departed.add_engine(view, session.lease_s, now)

    def count_end(self, reason: str) -> None:
        self.stream_ends[reason] = self.stream_ends.get(reason, 0) + 1

    def set_policy(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine, if it is newer than the one that the fleet has."""
        if stored.revision > self.revision:
            self._renew(stored)

    def replace_policy(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine in place of one that the store has lost. All streams end, because a number
        may stand for another revision than before."""
        self._renew(stored)
        self.going_away("the policy store has lost revisions")

    def _renew(self, stored: StoredRevision) -> None:
        each(self.parts.values(), lambda part: part.policy_came(stored))
        self._policies.renew(stored)

    def set_rollout(self, rollout: Rollout | None, candidate: StoredRevision | None) -> None:
        """Bring the candidate to the engines of the active rollout's group; both are None without an active rollout."""
        self._policies.stage(rollout, candidate)

    def going_away(self, reason: str) -> None:
        """Ask every agent to connect to another replica, and end all streams and recordings."""
        for connection in self.connections:
            self.send_away(connection, reason)
        for recording in self.recordings:
            recording.close()

    def close(self, reason: str) -> None:
        """Do what `going_away` does, also to the streams and recordings that calls under way begin later."""
        self._closed = reason
        self.going_away(reason)

    def send_away(self, connection: Connection, reason: str) -> None:
        """Ask an agent to connect to another replica. Its stream ends once the agent has sent what counts as brought;
        AgentService bounds how long that takes."""
        message = agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway(reason=reason))
        connection.say([message], self.clock())
        connection.closing = "going_away"

    @property
    def revision(self) -> int:
        """The revision of the policy in force; 0 before the first policy."""
        return self.policy.revision if self.policy is not None else 0

    @property
    def policy(self) -> StoredRevision | None:
        """The revision that engines outside a rollout's group are given; None before there is one."""
        return self._policies.newest

    @property
    def policies(self) -> list[Policy]:
        """The policy in force, and the candidate of the active rollout."""
        return self._policies.policies

    def counted_sessions(self) -> list[Session]:
        """Return all sessions, also those that a newer stream has replaced, until they end."""
        return [connection.session for connection in self.connections.counted]

    async def totals(self) -> Totals:
        """Return the counters summed over all sessions since the server started; let the event loop do other work in
        between."""
        total = Totals()
        total.add(self.closed_totals)
        async for session in in_turns(self.counted_sessions()):
            total.add(session.totals)
        return total

    def engine_view(self, session: Session, connected: bool) -> fleet_pb2.Engine:
        """Return the session's engine as a message. connected: whether the engine's stream is open."""
        view = engine_view(session, connected)
        each(self._show_engine, lambda part: part.show_engine(view, session))
        return view

    def _froze(self) -> None:
        each(self.parts.values(), lambda part: part.froze())

    def part(self, kind: type[AnyFleetPart]) -> AnyFleetPart:
        """Return the part of this class. Raises LookupError if the fleet has none."""
        for part in self.parts.values():
            if isinstance(part, kind):
                return part
        raise LookupError(f"the fleet has no {kind.__name__}")
