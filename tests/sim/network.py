"""The network and its two ends: the agent's real link without its thread, and the server's side with a real Fleet.

Each stream is two queues with delays. Everything moves in `tick`s, at the virtual time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.link import control_stream as link_module
from meridian_agent.link.control_stream import GOODBYE_S, ControlStream
from meridian_agent.link.record_queue import RecordQueue
from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.common.errors import MeridianError
from meridian_control.common.slices import at_once
from meridian_control.engine.freeze_state import Freeze
from meridian_control.fleet.connection import Connection
from meridian_control.fleet.fleet import Fleet
from meridian_control.policy.store import StoredRevision
from meridian_control.server.agent_service import LEAVES_S
from tests.sim.clock import Timeline
from tests.sim.invariants import Invariants

# Time after which a side that hears nothing gives up the connection.
KEEPALIVE_S = 45.0
# Responses in flight at which the server's side waits.
WINDOW = 32
# In place of a message, the end of the agent's side of a stream.
END = agent_pb2.ConnectRequest()


class Stream:
    """One call of Connect. Messages wait in `up` and `down` until they are due."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.up: deque[tuple[float, agent_pb2.ConnectRequest]] = deque()
        self.down: deque[tuple[float, agent_pb2.ConnectResponse]] = deque()
        self.connection: Connection | None = None
        # Time at which the server ends the stream of an agent that it has sent away.
        self.leaves_by_s = math.inf
        # Time at which each side learns that the stream is over; None while the stream is open.
        self.agent_learns_s: float | None = None
        self.server_learns_s: float | None = None
        # Whether messages get lost without either side being told.
        self.dead = False
        self.counters: dict[str, float] = {}

    def cancel(self) -> None:
        """End the stream from the agent's side, which knows it at once."""
        self.break_off(0.0, None)

    def break_off(self, agent_s: float | None, server_s: float | None) -> None:
        """End the stream; each side learns of it after its time, or after a message's delay if its time is None."""
        network, now = self._network, self._network.timeline.now_s
        latest = KEEPALIVE_S if self.dead else network.delay_s()
        for name, after_s in (("agent_learns_s", agent_s), ("server_learns_s", server_s)):
            learns = now + (latest if after_s is None else after_s)
            known = getattr(self, name)
            setattr(self, name, learns if known is None else min(known, learns))

    def send(self, way: deque[tuple[float, Any]], message: Any) -> None:
        if self.dead:
            return
        due = self._network.timeline.now_s + self._network.delay_s()
        way.append((max(due, way[-1][0]) if way else due, message))

    def arrived(self, way: deque[tuple[float, Any]]) -> Any:
        """Return the next message that is due, or None."""
        if self.dead or not way or way[0][0] > self._network.timeline.now_s:
            return None
        return way.popleft()[1]


class SteppedRing(RecordQueue[Any]):
    """The link's ring in a simulation in which no thread waits."""

    def _sleep(self, seconds: float) -> None:
        """Return at once, because no thread waits in the simulation."""

    def fall_asleep(self, wanted: int, patient: int) -> None:
        """Be as a ring whose reader sleeps in `get`."""
        self._wanted, self._patient = wanted, patient

    empty = property(lambda self: not self._items)


class SteppedLink(ControlStream):
    """The real link, whose `tick` does the work of its thread."""

    def __init__(self, network: Network, *args: Any, **named: Any) -> None:
        named |= {"clock": network.timeline.time, "jitter": network.rng.random}
        super().__init__(*args, **named)
        self._network = network
        self.stream: Stream | None = None
        self.session_id = ""
        self.stalled_until_s = self.mute_until_s = self._retry_s = 0.0
        self._heard = False
        self._first_waits_s: float | None = None
        self._messages: Any = None
        # Time at which the link ends a stream that it is asked to leave.
        self._leaves_by_s = math.inf
        network.links.append(self)

    def start(self) -> None:
        """Start no thread."""

    def quiet(self) -> bool:
        """Return whether no message waits to be sent."""
        stream = self.stream
        return (
            stream is not None
            and self.lease.connected
            and not (self.outbox.ring.qsize() or self._holds() or stream.up or stream.down)
        )

    def _holds(self) -> bool:
        return self._messages is not None and self._messages.gi_frame.f_locals.get("held") is not None

    def tick(self) -> None:
        now = self._network.timeline.now_s
        if now < self.stalled_until_s or self._stop.is_set():
            return
        assert not self._is_held(), "the engine's thread keeps the mailbox's lock"
        try:
            self._network.on_link(self._do, now)
        except (RuntimeError, MemoryError) as error:
            if "injected" not in str(error):
                raise
            # `_stream` and `_run` also end the stream and let go of the lock, whatever has failed.
            if self.stream is not None:
                self.stream.cancel()
                self._end()
            self.mailbox.let_go()
        assert not self._is_held(), "the link's thread keeps the mailbox's lock"

    def _is_held(self) -> bool:
        """Return False: both threads are the same thread here, which may take the lock again."""
        return bool(self.mailbox._lock._is_owned())  # type: ignore[attr-defined]

    def _do(self, now: float) -> None:
        if self.stream is None:
            if now >= self._retry_s:
                self._connect()
            return
        while self.stream.agent_learns_s is None or self.stream.agent_learns_s > now:
            if (response := self.stream.arrived(self.stream.down)) is None:
                break
            self._heard = True
            if response.HasField("welcome"):
                self.session_id = response.welcome.session_id
            self._receive(response)
        if now >= self._leaves_by_s:
            self.stream.cancel()
        if self.stream.agent_learns_s is not None and self.stream.agent_learns_s <= now:
            self._end()
            return
        self._say(now)
        ring: Any = self.outbox.ring
        ring.fall_asleep(*self.outbox._wanted())

    def _cancel_later(self, call: Any) -> None:
        self._leaves_by_s = min(self._leaves_by_s, self._network.timeline.now_s + GOODBYE_S)

    def _connect(self) -> None:
        # As at the beginning of `_stream`.
        self.outbox.new_ring()
        ring: Any = SteppedRing()
        self.outbox.ring = ring
        self._heard, self._leaves_by_s = False, math.inf
        self.stream = self._network.connect()
        if self.stream is None:
            self._end()
            return
        self._call = self.stream  # type: ignore[assignment]
        if (lasts_s := self._lasts_s()) is not None:
            self.stream.break_off(lasts_s, lasts_s + self._network.delay_s())
        self._messages = self.outbox.messages(ring, self._hello)
        self.stream.send(self.stream.up, next(self._messages))

    def _end(self) -> None:
        """End the stream as `_stream` and a round of `_run` do."""
        self.stream = self._messages = None
        self._attempt = 0 if self._heard else self._attempt + 1
        low, high = link_module.BACKOFF_S
        wait_s = min(high, low * 2 ** min(self._attempt, 10)) * (0.5 + self._jitter())
        self._retry_s = self._network.timeline.now_s + wait_s
        self._lost()

    def _say(self, now: float) -> None:
        """Send the records that are due; a record waits for others of its interval, but not for long."""
        assert self.stream is not None
        if now < self.mute_until_s or self._messages is None:
            return
        if self.outbox.has_left(self.outbox.ring) and not self._holds():
            self._end_side()
            return
        if not self.outbox.ring.qsize() and not self._holds():
            self._first_waits_s = None
            return
        if self._first_waits_s is None:
            self._first_waits_s = now
        ring = self.outbox.ring
        # A message that is no record was put on the ring by `put`, which wakes the sender.
        wakes = any(isinstance(item, agent_pb2.ConnectRequest) for item in ring._items)
        is_short = not (wakes or ring.suffices(*self.outbox._wanted()))
        if is_short and now - self._first_waits_s < self.lease.merge_s:
            return
        self._first_waits_s = None
        while self.outbox.ring.qsize() or self._holds():
            if (message := next(self._messages, None)) is None:
                self._end_side()
                return
            self.stream.send(self.stream.up, message)

    def _end_side(self) -> None:
        """End the agent's side of the stream, whose responses still arrive."""
        assert self.stream is not None
        self.stream.send(self.stream.up, END)
        self._messages = None


class Server:
    """A control plane that can be gone, hang, and start again with nothing but its policy and its freezes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.fleet: Fleet | None = None
        self.streams: list[Stream] = []
        self.hung_until_s = 0.0
        self.newest: StoredRevision | None = None
        self.freezes: tuple[Freeze, ...] = ()
        self.recordings: list[Any] = []

    def start(self) -> None:
        self.fleet = Fleet(self._network.timeline.utc_now, capabilities=CAPABILITIES)
        if self._network.records:
            self.recordings.append(self.fleet.record(""))
        if self.newest is not None:
            self.fleet.set_policy(self.newest)
        self.fleet.freezes.renew(self.freezes)

    def kill(self, tells_agents: bool) -> None:
        """End the process with all its state."""
        for stream in self.streams:
            stream.dead = stream.dead or not tells_agents
            stream.break_off(None, 0.0)
            stream.connection = None
        self.streams, self.fleet = [], None

    def put_in_force(self, policy: StoredRevision) -> None:
        self.newest = policy
        if self.fleet is not None:
            self.fleet.set_policy(policy)

    def set_freezes(self, freezes: tuple[Freeze, ...]) -> None:
        self.freezes = freezes
        if self.fleet is not None:
            self.fleet.freezes.renew(freezes)

    def tick(self) -> None:
        now = self._network.timeline.now_s
        if self.fleet is None or now < self.hung_until_s:
            return
        for stream in list(self.streams):
            while stream in self.streams and (message := stream.arrived(stream.up)) is not None:
                if message is not END:
                    self._receive(self.fleet, stream, message)
                elif stream.connection is not None:
                    stream.connection.put([None])
                self._drain(self.fleet, stream)
            if stream in self.streams and stream.server_learns_s is not None and stream.server_learns_s <= now:
                self._leave(self.fleet, stream, "disconnected")
            if stream in self.streams and stream.leaves_by_s <= now:
                self._leave(self.fleet, stream, "going_away")
        for stream in list(self.streams):
            self._drain(self.fleet, stream)

    def _receive(self, fleet: Fleet, stream: Stream, message: agent_pb2.ConnectRequest) -> None:
        session = stream.connection.session if stream.connection is not None else None
        self._network.invariants.heard(session, stream.counters, message)
        try:
            if stream.connection is None:
                assert message.HasField("hello"), "a stream begins with hello"
                stream.connection = fleet.join(message.hello)
            else:
                at_once(fleet.receiving(stream.connection, message))
                self._network.invariants.knows(stream.connection.session)
        except MeridianError as error:
            raise AssertionError(f"the control plane refuses what an agent says: {error}") from error

    def _drain(self, fleet: Fleet, stream: Stream) -> None:
        connection = stream.connection
        while connection is not None and not connection.outgoing.empty() and len(stream.down) < WINDOW:
            response = connection.outgoing.get_nowait()
            if response is None:
                self._leave(fleet, stream, connection.closing)
                return
            if response.HasField("going_away"):
                stream.leaves_by_s = min(stream.leaves_by_s, self._network.timeline.now_s + LEAVES_S)
            stream.send(stream.down, response)
        if connection is not None and connection.overflowed:
            self._leave(fleet, stream, "overflow")

    def _leave(self, fleet: Fleet, stream: Stream, reason: str) -> None:
        self.streams.remove(stream)
        if stream.connection is not None:
            fleet.leave(stream.connection, reason)
            self._network.invariants.left(stream.connection.session)
        stream.break_off(None, 0.0)


class Network:
    """The network's delays, and the connections that it allows."""

    def __init__(self, timeline: Timeline, rng: random.Random, invariants: Invariants, records: bool) -> None:
        self.timeline, self.rng, self.invariants, self.records = timeline, rng, invariants, records
        self.links: list[SteppedLink] = []
        self.latency_ms = 1.0
        self.server = Server(self)
        # Runs the work of each link's thread.
        self.on_link: Callable[..., None] = lambda work, *args: work(*args)

    def delay_s(self) -> float:
        if self.latency_ms == 0:
            return 0.0
        return self.rng.expovariate(1 / self.latency_ms) / 1e3

    def connect(self) -> Stream | None:
        """Return a new stream, or None if the control plane does not listen."""
        if self.server.fleet is None:
            return None
        stream = Stream(self)
        self.server.streams.append(stream)
        return stream

    def tick(self) -> None:
        self.server.tick()
        for link in self.links:
            link.tick()
        self.server.tick()
