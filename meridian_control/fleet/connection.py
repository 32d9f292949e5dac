"""Connects each engine's session with its stream, by a bounded queue of responses that wait to be sent.

All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meridian_control.fleet.memory import Account, Memory
from meridian_control.fleet.recording import Recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from datetime import datetime

    from meridian.v1 import agent_pb2, fleet_pb2

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.session import Session
    from meridian_control.fleet.turns import Turns
    from meridian_control.journal.records import Decision

# Number and bytes of waiting responses at which the stream of a slow engine is closed; its agent then reconnects with a
# snapshot.
QUEUE_MESSAGES, QUEUE_BYTES = 1024, 8 << 20


class Responses(asyncio.Queue["agent_pb2.ConnectResponse | None"]):
    """The responses that wait, which are bounded by number and bytes."""

    waiting_bytes = 0

    def full(self) -> bool:
        return self.waiting_bytes >= QUEUE_BYTES or self.qsize() >= QUEUE_MESSAGES

    def _put(self, item: agent_pb2.ConnectResponse | None) -> None:
        self.waiting_bytes += item.ByteSize() if item is not None else 0
        super()._put(item)

    def _get(self) -> agent_pb2.ConnectResponse | None:
        item: agent_pb2.ConnectResponse | None = super()._get()
        self.waiting_bytes -= item.ByteSize() if item is not None else 0
        return item


@dataclass(eq=False, slots=True)
class Connection:
    """A session and the queue of responses for its agent; None in the queue closes the stream."""

    session: Session
    outgoing: Responses = field(default_factory=lambda: Responses(QUEUE_MESSAGES))
    overflowed: bool = False
    # Reason the control plane gives for ending the stream; empty while the stream is open.
    closing: str = ""
    # Error of the control plane that ends the stream; None while there is none.
    failure: Exception | None = None
    # The newest revision whose refusal has led to a look for the last good one; 0 before the first refusal.
    restored_after: int = 0
    # Whether a message of the agent, or another event, is being taken in; the events that wait until that is done.
    busy: bool = False
    later: deque[Callable[[], None]] = field(default_factory=deque)
    # Name of the caller that has opened the stream; callers share the event loop. What the session takes of memory.
    who: str = ""
    memory: Account = field(default_factory=lambda: Account(Memory(), ""))
    # The recordings of the replica, which get every message to the agent.
    recordings: Recordings = field(default_factory=Recordings)
    # Set after every message of the agent, one for each call that waits for the outcome of a decision.
    waiting: set[asyncio.Event] = field(default_factory=set)

    def when_free(self, event: Callable[[], None]) -> None:
        """Call `event` now, or once what is being taken in is done: events reach a session one after another. An event
        that waits when the stream ends is dropped. An exception of an event is an error of the control plane: it ends
        this engine's stream, whose agent comes back with a snapshot, and the other engines are served."""
        if self.busy:
            self.later.append(event)
        else:
            self._reach(event)

    def _reach(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as error:
            error.add_note(f"engine {self.session.hello.engine_id}")
            self.fail(error)

    def catch_up(self) -> None:
        """Call the events that have waited."""
        while self.later and not self.busy:
            self._reach(self.later.popleft())

    async def free(self, turns: Turns) -> None:
        """Wait until nothing is being taken in."""
        while self.busy:
            await turns.next(self.who)

    async def take_in(self, work: Sliced[None], turns: Turns) -> None:
        """Do the work of an event on the session in turns, once what is being taken in is done."""
        await self.free(turns)
        self.busy = True
        try:
            for _ in work:
                await turns.next(self.who)
        finally:
            self.busy = False
        self.catch_up()

    def close(self, reason: str) -> None:
        """End the stream after the waiting responses have been sent."""
        self.closing = reason
        self.put([None])

    def fail(self, failure: Exception) -> None:
        """End the stream with an error of the control plane, after the waiting responses have been sent."""
        self.failure = failure
        self.close("internal")

    def wake(self) -> None:
        """Let the calls that wait for an outcome look again."""
        for event in self.waiting:
            event.set()

    async def wait_for_outcome(self, decision: Decision, wait_s: float) -> None:
        """Wait until a decision of the session has its outcome, for at most `wait_s` seconds."""
        event = asyncio.Event()
        self.waiting.add(event)
        try:
            async with asyncio.timeout(wait_s):
                while not decision.outcome:
                    await event.wait()
                    event.clear()
        except TimeoutError:
            pass
        finally:
            self.waiting.discard(event)

    def say(self, responses: list[agent_pb2.ConnectResponse], now: datetime) -> None:
        """Queue responses to the agent, and record them."""
        if self.recordings:
            self.recordings.note_said(self.session, responses, now)
        self.put(responses)

    def note(self, make: Callable[..., fleet_pb2.TraceRecord], *args: object) -> None:
        """Record an event of the session. make: makes the record from the session and the arguments."""
        self.recordings.note(self.session, make, *args)

    def put(self, responses: Iterable[agent_pb2.ConnectResponse | None]) -> None:
        for response in responses:
            try:
                self.outgoing.put_nowait(response)
            except asyncio.QueueFull:
                self.overflowed = True


class Connections(dict[Connection, None]):
    """The open connections, the newest last, except those that a newer stream of the same process has replaced.

    counted: the open connections and the replaced ones, until they end, so that sums of counters never fall.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_engine: dict[str, dict[Connection, None]] = {}
        self.counted: set[Connection] = set()

    def connect(self, connection: Connection) -> None:
        self[connection] = None
        self._by_engine.setdefault(connection.session.hello.engine_id, {})[connection] = None
        self.counted.add(connection)

    def disconnect(self, connection: Connection) -> None:
        """Remove a connection, which still counts."""
        engine_id = connection.session.hello.engine_id
        self.pop(connection, None)
        others = self._by_engine.get(engine_id, {})
        others.pop(connection, None)
        if not others:
            self._by_engine.pop(engine_id, None)

    @property
    def sessions(self) -> list[Session]:
        return [connection.session for connection in self]

    def of_engine(self, engine_id: str) -> Collection[Connection]:
        """Return the connections of all processes that have this engine id, the newest last: after an engine's restart
        its old stream may still be open."""
        return self._by_engine.get(engine_id, ())

    def of_process(self, identity: tuple[str, str]) -> list[Connection]:
        """Return the connections of an engine's process. identity: engine id and incarnation."""
        return [c for c in self.of_engine(identity[0]) if c.session.identity == identity]

    def namesake(self, session: Session) -> str:
        """Return the incarnation of another process that has a stream under the session's engine id; empty for none."""
        others = (c.session.hello.incarnation for c in self.of_engine(session.hello.engine_id))
        return next((other for other in others if other != session.hello.incarnation), "")

    def sharing_name(self) -> int:
        """Return the number of connected engines that have the name of another connected engine."""
        named = [{c.session.hello.incarnation for c in same} for same in self._by_engine.values()]
        return sum(len(incarnations) for incarnations in named if len(incarnations) > 1)
