"""Holds all engines of this replica: their connections, the policies that they should have, and their counters.

The fleet owns the set of connections. All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control import __version__
from meridian_control.capabilities.budgets.fleet_budgets import FleetBudgets
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.budgets.tenant_usage import TenantUsage
from meridian_control.capabilities.control_group.experiments import Experiments
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.handover.results import Handovers
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.common.errors import MeridianError, NotFound, TooMany
from meridian_control.common.slices import at_once
from meridian_control.engine.session import Session
from meridian_control.engine.totals import Totals
from meridian_control.fleet import store_reads
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.departed import Departed
from meridian_control.fleet.handover_pool import HandoverPool
from meridian_control.fleet.in_turns import in_parts, in_turns
from meridian_control.fleet.loop_delay import LoopDelay
from meridian_control.fleet.memory import STEP_BYTES, Account, Memory
from meridian_control.fleet.policy_delivery import ENGINES_AT_ONCE, PolicyDelivery
from meridian_control.fleet.pressure_log import log_changes
from meridian_control.fleet.recording import (
    Recording,
    Recordings,
    down_record,
    end_record,
    hello_record,
    part_record,
    policy_record,
    records_at_start,
    up_record,
)
from meridian_control.fleet.savings import mark_withdrawn
from meridian_control.fleet.status_messages import (
    agent_state,
    each_request_view,
    engine_view,
    request_view,
    request_views,
    subject_among,
)
from meridian_control.fleet.store_reads import read_stored
from meridian_control.fleet.turns import Turns
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from meridian_control.journal.request_ids import is_called

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
    from datetime import datetime

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.freeze_state import Freeze
    from meridian_control.engine.operator_ends import OperatorEnd
    from meridian_control.engine.part import Capability, PartMaker
    from meridian_control.engine.shadow_comparison import Comparison
    from meridian_control.fleet.memory import MemoryLimits
    from meridian_control.policy.diff import Subject
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
DONE = object()


class Fleet:
    """The engines of this replica.

    `clock` gives UTC, and is not set back or forward while the process runs. `revision` reads a policy revision from
    the store, and raises NotFound, StoreUnavailable or StoredPolicyUnreadable. `decisions` is the log that keeps
    decisions. `heartbeat_s`: as in Welcome. `memory` bounds what the sessions take.
    `capabilities` decide in their order.
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
        self.turns, self.memory, self.loop_delay = Turns(), Memory(memory), LoopDelay()
        self.capabilities = capabilities
        self._revision = revision
        # Tasks that wait for the store. No task is cancelled, because a cancelled database driver leaks its connection.
        self._waiting: set[asyncio.Task[None]] = set()
        self.decisions = decisions or DecisionLog()
        # Comparisons of rules in shadow, by engine id; each outlives the engine's streams.
        self.shadows: dict[str, Comparison] = {}
        # Counts of treated requests and of the control group, over all engines.
        self.experiments = Experiments()
        self.handovers, self.pool = Handovers(), HandoverPool()
        self.budgets, self.tenants = FleetBudgets(), TenantUsage()
        self.connections: set[Connection] = set()
        # The same connections by engine id.
        self._by_engine: dict[str, set[Connection]] = {}
        # Connections whose counters are summed. Connections that a newer stream has replaced stay until they end, so
        # that counters never fall.
        self._counted: set[Connection] = set()
        self.recordings = Recordings()
        self.departed = Departed()
        self.closed_totals = Totals()
        self.stream_ends: dict[str, int] = {}
        self._policies = PolicyDelivery(self.connections, self._give_policy_when_free)
        self._freezes: tuple[Freeze, ...] = ()
        # Timer that runs when the next freeze ends.
        self._thawing: asyncio.TimerHandle | None = None

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
        others = {c.session.hello.incarnation for c in self._by_engine.get(hello.engine_id, ())} - {hello.incarnation}
        if len(others) >= INCARNATIONS:
            raise TooMany(f'{INCARNATIONS} processes of engine "{hello.engine_id}" have streams', RETRY_S)
        session_id = uuid.uuid4().hex
        journal = Journal(self.decisions, hello.engine_id, hello.incarnation, session_id, now)
        same = (hello.engine_id, hello.incarnation)
        # An agent has one stream, so an older stream has ended although its end was not noticed yet.
        replaced = self._streams_of(same)
        charges = {c.session.session_id: c.session.part(EngineBudgets).charges for c in replaced}
        carried = self.budgets.carried(same, charges)
        shared: dict[str, PartMaker] = {
            "budgets": lambda stream: EngineBudgets(stream, carried),
            "control_group": lambda stream: ControlGroup(stream, self.experiments),
            "handover": lambda stream: EngineHandovers(stream, self.handovers),
        }
        makers = [shared.get(one.name, one.stream) for one in self.capabilities]
        parts = [make for make in makers if make is not None]
        session = Session(session_id, hello, now, journal, self.shadows.get(hello.engine_id), parts=parts)
        self.shadows[hello.engine_id] = session.shadow
        connection = Connection(session, who=who, memory=Account(self.memory, who))
        self.note(session, hello_record(session, now))
        if self.budgets.stages:
            at_once(session.part(EngineBudgets).set_stages(self.budgets.stages))
            self.note(session, part_record(session, now, session.part(EngineBudgets).record()))
        welcome = agent_pb2.Welcome(
            session_id=session_id,
            server_version=__version__,
            reads_byte_columns=True,
            other_incarnation=self.namesake(session),
            reads_snapshot_parts=True,
            heartbeat_ms=self._heartbeat_ms,
        )
        self._say(connection, [agent_pb2.ConnectResponse(welcome=welcome)], now)
        freezes = self._freezes_of(session)
        if freezes or session.frozen:
            self._say(connection, session.on_freezes(freezes, now), now)
        wanted = self._policies.wanted(session)
        if wanted is not None and hello.revision > wanted.revision and refresh is not None:
            self._start(self._catch_up(connection, refresh))
        elif wanted is not None:
            self._give_policy(connection, wanted)
        for older in replaced:
            self._disconnect(older)
            older.close("replaced")
        self.connections.add(connection)
        self._by_engine.setdefault(hello.engine_id, set()).add(connection)
        self._counted.add(connection)
        self.departed.remove(hello.engine_id)
        return connection

    def _streams_of(self, identity: tuple[str, str]) -> list[Connection]:
        """Return the connections of an engine's process. identity: engine id and incarnation."""
        return [c for c in self._by_engine.get(identity[0], ()) if c.session.identity == identity]

    def namesake(self, session: Session) -> str:
        """Return the incarnation of another process that has a stream under the session's engine id; empty for none."""
        others = (c.session.hello.incarnation for c in self._by_engine.get(session.hello.engine_id, ()))
        return next((other for other in others if other != session.hello.incarnation), "")

    def sharing_name(self) -> int:
        """Return the number of connected engines that have the name of another connected engine."""
        named = [{c.session.hello.incarnation for c in found} for found in self._by_engine.values()]
        return sum(len(incarnations) for incarnations in named if len(incarnations) > 1)

    def _disconnect(self, connection: Connection) -> None:
        engine_id = connection.session.hello.engine_id
        self.connections.discard(connection)
        others = self._by_engine.get(engine_id, set())
        others.discard(connection)
        if not others:
            self._by_engine.pop(engine_id, None)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def settle(self) -> None:
        """Wait for the tasks that wait for the store; once all connections are gone, each ends with its next answer."""
        await asyncio.gather(*self._waiting, return_exceptions=True)

    async def _catch_up(self, connection: Connection, refresh: Callable[[], Awaitable[None]]) -> None:
        """Give an engine that has a newer policy than this replica knows the newest policy of the store.

        While the store does not answer, the engine keeps its policy.
        """
        while connection in self.connections:
            try:
                await refresh()
                break
            except MeridianError as error:
                engine_id = connection.session.hello.engine_id
                logger.warning("engine %s has a newer policy than this replica: %s", engine_id, error)
                await asyncio.sleep(store_reads.RETRY_S)
        wanted = self._policies.wanted(connection.session)
        if wanted is not None and connection in self.connections and not connection.session.revision:
            self._give_policy_when_free(connection, wanted)

    def receive(self, connection: Connection, message: agent_pb2.ConnectRequest) -> None:
        """Take in a message of an agent and queue the responses.

        Raises InvalidRequest for a message that breaks the contract, and MemoryExceeded for one that would take too
        much memory; recordings leave such a message out.
        """
        at_once(self.receiving(connection, message))

    def receiving(self, connection: Connection, message: agent_pb2.ConnectRequest) -> Sliced[None]:
        """Do what `receive` does, in slices."""
        session, now = connection.session, self.clock()
        connection.busy = True
        try:
            work = session.taking_in(message, now)
            while True:
                try:
                    next(work)
                except StopIteration as done:
                    responses = done.value
                    break
                connection.memory.hold(session.held_bytes)
                yield
            if not -STEP_BYTES < session.held_bytes - connection.memory.bytes < STEP_BYTES:
                connection.memory.hold(session.held_bytes)
            if session.part(EnginePressure).entries:
                log_changes(session)
            if self.recordings and (recordings := self._recording(session)):
                self.recordings.add_record(recordings, up_record(session, now, message))
            if responses:
                self._say(connection, responses, now)
            if connection.waiting:
                connection.wake()
            if session.nack_error:
                self._restore_last_good(connection)
        finally:
            connection.busy = False
        if connection.later:
            connection.catch_up()

    async def free(self, engine_id: str) -> None:
        """Wait until no stream of an engine takes anything in."""
        for connection in list(self._by_engine.get(engine_id, ())):
            await connection.free(self.turns)

    def end_thinking(self, engine_id: str, request_id: str, reason: str) -> tuple[Connection, OperatorEnd]:
        """End the thinking of a live request because an operator asks for it; return its engine's connection too. The
        engine's streams must be free.

        Raises NotFound if no live request of the engine has this id.
        """
        mine = self._by_engine.get(engine_id, set())
        for connection in sorted(mine, key=lambda c: c.session.connected_at, reverse=True):
            session, now = connection.session, self.clock()
            if (ended := session.on_end_thinking(request_id, reason, now)) is not None:
                self.note(session, end_record(session, now, request_id))
                self._say(connection, ended.responses, now)
                return connection, ended
        raise NotFound(f'no live request "{request_id}" on engine "{engine_id}"')

    def _restore_last_good(self, connection: Connection) -> None:
        """Start to read the policy that is in force on the engine, if the engine refuses the newest revision."""
        wanted = connection.session.last_good_wanted
        if wanted and connection.restoring is None and self._revision is not None:
            connection.restoring = self._start(self._give_last_good(connection, wanted, self._revision))

    async def _give_last_good(
        self, connection: Connection, revision: int, read: Callable[[int], Awaitable[StoredRevision]]
    ) -> None:
        session = connection.session
        stored = await read_stored(read, revision, lambda: connection in self.connections)
        await connection.free(self.turns)
        if stored is not None and session.last_good_wanted == revision and connection in self.connections:
            now = self.clock()
            self.note(session, policy_record(session, now, revision, stored.policy))
            self._say(connection, session.on_last_good(revision, stored.policy), now)

    def _give_policy_when_free(self, connection: Connection, stored: StoredRevision) -> None:
        connection.when_free(lambda: self._give_policy(connection, stored))

    def _give_policy(self, connection: Connection, stored: StoredRevision) -> None:
        session, now = connection.session, self.clock()
        self.note(session, policy_record(session, now, stored.revision, stored.policy))
        self._say(connection, session.on_policy(stored.revision, stored.policy), now)
        self._restore_last_good(connection)

    def note(self, session: Session, record: fleet_pb2.TraceRecord) -> None:
        """Add a record to the recordings of a session."""
        if recordings := self._recording(session):
            self.recordings.add_record(recordings, record)

    def _say(self, connection: Connection, responses: list[agent_pb2.ConnectResponse], now: datetime) -> None:
        if self.recordings and (recordings := self._recording(connection.session)):
            for response in responses:
                self.recordings.add_record(recordings, down_record(connection.session, now, response))
        connection.put(responses)

    def _recording(self, session: Session) -> list[Recording]:
        return [recording for recording in self.recordings if recording.wants(session)] if self.recordings else []

    def record(self, engine_id: str) -> Recording:
        """Begin a recording with records of the open sessions; the caller later discards it from `recordings`."""
        recording, now = Recording(engine_id), self.clock()
        for session in (c.session for c in self.connections if recording.wants(c.session)):
            for record in records_at_start(session, now):
                recording.add(record.SerializeToString())
        self.recordings.add(recording)
        return recording

    def leave(self, connection: Connection, reason: str) -> None:
        """End a session and count the reason. A large session is closed in turns."""
        work = self._leaving(connection, reason)
        if next(work, DONE) is not DONE:
            self._start(self._in_turns(connection, work))

    async def _in_turns(self, connection: Connection, work: Iterator[None]) -> None:
        for _ in work:
            await self.turns.next(connection.who)

    def _leaving(self, connection: Connection, reason: str) -> Iterator[None]:
        charges = connection.session.part(EngineBudgets).charges
        if connection in self.connections:
            self.budgets.carry(connection.session.identity, connection.session.session_id, charges)
        self.tenants.take([charges])
        self._disconnect(connection)
        session, now = connection.session, self.clock()
        self.count_end(reason)
        try:
            yield from session.closing(now, followed=bool(self._streams_of(session.identity)))
        except Exception:
            # An error of the control plane, often the one that has ended the stream. The engine has left all the same.
            logger.exception("the session of engine %s could not be closed", session.hello.engine_id)
        connection.wake()
        self.closed_totals.add(session.totals)
        self._counted.discard(connection)
        connection.memory.close()
        engine_id = session.hello.engine_id
        # An engine with a newer stream is still connected, so the state that is kept for the engine must stay.
        if engine_id not in self._by_engine:
            session.shadow.new_stream()
            view = engine_view(session, connected=False)
            # A stream that the agent itself has ended tells that the engine shuts down.
            view.lost = reason != "agent_closed"
            self.departed.add(view, session.lease_s, now)
        for gone in (forgotten := self.departed.forget(now)):
            self.shadows.pop(gone, None)
        self.handovers.forget(forgotten)
        self.budgets.forget(forgotten)
        # A look at all sessions for each engine of a thousand that leave would take minutes.
        if self.pool.is_used:
            self.share_pool()

    def share_pool(self) -> None:
        """Give each session the engines to which its requests may be handed over, if these engines have changed."""
        now = self.clock()
        self.handovers.expire(now)
        connections = {id(c.session): c for c in self.connections}
        for session, engines in self.pool.changed([c.session for c in self.connections], now):
            connections[id(session)].when_free(partial(self._give_pool, session, engines))

    def _give_pool(self, session: Session, engines: list[fleet_pb2.AnsweringEngine]) -> None:
        handovers = session.part(EngineHandovers)
        handovers.pool = tuple(engines)
        self.note(session, part_record(session, self.clock(), handovers.record()))

    def count_end(self, reason: str) -> None:
        self.stream_ends[reason] = self.stream_ends.get(reason, 0) + 1

    def set_policy(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine, if it is newer than the one that the fleet has."""
        if stored.revision > self.revision:
            self.experiments.of(stored.revision, stored.policy)
            self._policies.renew(stored)

    def set_rollout(self, rollout: Rollout | None, candidate: StoredRevision | None) -> None:
        """Bring the candidate to the engines of the active rollout's group; both are None without an active rollout."""
        self._policies.stage(rollout, candidate)

    def set_freezes(self, freezes: tuple[Freeze, ...]) -> None:
        """Send each engine its freezes if they have changed, now and when the next freeze ends."""
        self._freezes, now = freezes, self.clock()
        if self._thawing is not None:
            self._thawing.cancel()
            self._thawing = None
        self._freeze_some(list(self.connections), freezes)
        if left := [freeze.remaining(now) for freeze in freezes if freeze.end_time > now]:
            delay_s = min(left).total_seconds()
            self._thawing = asyncio.get_running_loop().call_later(delay_s, self.set_freezes, freezes)

    def _freeze_some(self, waiting: list[Connection], freezes: tuple[Freeze, ...]) -> None:
        """Send engines their freezes, a few in each round of the event loop, unless there are newer freezes."""
        if freezes is not self._freezes:
            return
        for connection in waiting[:ENGINES_AT_ONCE]:
            connection.when_free(partial(self._give_freezes, connection))
        if rest := waiting[ENGINES_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._freeze_some, rest, freezes)
        else:
            self.share_pool()

    def _give_freezes(self, connection: Connection) -> None:
        session, now = connection.session, self.clock()
        found = self._freezes_of(session)
        if connection in self.connections and found != session.freezing.freezes:
            self._say(connection, session.on_freezes(found, now), now)

    @property
    def freezes(self) -> tuple[Freeze, ...]:
        """The freezes in force, newest first."""
        now = self.clock()
        return tuple(freeze for freeze in self._freezes if freeze.end_time > now)

    def _freezes_of(self, session: Session) -> tuple[Freeze, ...]:
        hello = session.hello
        return tuple(f for f in self.freezes if f.match.matches(hello.engine_id, hello.model, hello.labels))

    def going_away(self, reason: str) -> None:
        """Ask every agent to connect to another replica, and end all streams and recordings."""
        message = agent_pb2.ConnectResponse(going_away=agent_pb2.GoingAway(reason=reason))
        for connection in self.connections:
            self._say(connection, [message], self.clock())
            connection.close("going_away")
        for recording in self.recordings:
            recording.close()

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
        return [connection.session for connection in self._counted]

    def totals(self) -> Totals:
        """Return the counters summed over all sessions since the server started."""
        total = Totals()
        total.add(self.closed_totals)
        for connection in self._counted:
            total.add(connection.session.totals)
        return total

    async def engines_in_turns(self) -> list[fleet_pb2.Engine]:
        """Return all engines as `engines` does, and let the event loop do other work in between."""
        views = {c: engine_view(c.session, connected=True) async for c in in_turns(list(self.connections))}
        return self.engines(views)

    def engines(self, views: Mapping[Connection, fleet_pb2.Engine] | None = None) -> list[fleet_pb2.Engine]:
        """Return all engines, those that left included. views: messages of connections that need no new message."""
        views = views or {}
        live = [views[c] if c in views else engine_view(c.session, connected=True) for c in self.connections]
        ids = {e.engine_id for e in live}
        now = self.clock()
        gone = [engine for engine in self.departed.views(now) if engine.engine_id not in ids]
        mark_withdrawn(live, self.policy)
        return sorted([*live, *gone], key=lambda e: (e.engine_id, e.incarnation))

    def agent_states(self) -> list[tuple[str, agent_pb2.AgentState.ValueType]]:
        """Return the id and the agent's state of each engine, in the order of `engines`, without their messages."""
        sessions = [c.session for c in self.connections]
        live = [(s.hello.engine_id, s.hello.incarnation, agent_state(s)) for s in sessions]
        away = [e for e in self.departed.views(self.clock()) if e.engine_id not in self._by_engine]
        gone = [(e.engine_id, e.incarnation, e.agent_state) for e in away]
        return [(engine_id, state) for engine_id, _, state in sorted([*live, *gone], key=lambda row: row[:2])]

    async def requests_in_turns(self, engine_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the live requests of one engine, or of all for an empty id, sorted; let the event loop do other work
        in between."""
        found: list[tuple[tuple[str, str], fleet_pb2.LiveRequest]] = []
        for connection in [c for c in self.connections if engine_id in ("", c.session.hello.engine_id)]:
            async for some in in_parts(each_request_view(connection.session)):
                found += [((request.engine_id, request.request_id), request) for request in some]
        found.sort(key=itemgetter(0))
        return [request for _, request in found]

    def requests(self, engine_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the same at once."""
        sessions = [c.session for c in self.connections if engine_id in ("", c.session.hello.engine_id)]
        found = [request for session in sessions for request in request_views(session)]
        return sorted(found, key=lambda r: (r.engine_id, r.request_id))

    def requests_called(self, engine_id: str, request_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the live requests that have an id or have it as the client's part of theirs, of one engine or of all
        for an empty `engine_id`."""
        found = []
        for connection in self._by_engine.get(engine_id, ()) if engine_id else self.connections:
            session = connection.session
            slots = [slot for slot, info in session.table.requests() if is_called(info.request_id, request_id)]
            found += [request_view(session, slot) for slot in slots]
        return found

    def subject(self, engine_id: str, request_id: str) -> Subject:
        """Return the engine or live request for which a policy is explained.

        An empty `engine_id` stands for any engine. Raises NotFound if this replica does not know the engine or request.
        """
        sessions = [c.session for c in self.connections if engine_id in ("", c.session.hello.engine_id)]
        if engine_id and not sessions:
            raise NotFound(f'no engine "{engine_id}" is connected')
        return subject_among(sessions, engine_id, request_id)
