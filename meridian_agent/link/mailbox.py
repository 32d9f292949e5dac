"""Guards the moment in which an engine falls idle or becomes busy, so that exactly one thread answers each message of
the stream.

A busy engine takes messages in itself, at the beginning of its next step. An idle engine makes no step, so the link's
thread answers for it. This module's lock is the only lock that the engine's thread and the link's thread share; neither
thread holds it across I/O.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from meridian_agent.link.inbox import Inbox
    from meridian_agent.link.lease import Lease
    from meridian_agent.link.outbox import RecordRing


@dataclass(slots=True, eq=False)
class Arrived:
    """Settings or a freeze that are not in force yet, and the status message that will confirm them on their stream."""

    status: agent_pb2.ConnectRequest
    ring: RecordRing
    settings: agent_pb2.Settings | None = None
    markers: Any = None


class Mailbox:
    """The mailbox of one engine. keep: receives settings once they are in force; must not wait."""

    def __init__(self, lease: Lease, inbox: Inbox, keep: Callable[[agent_pb2.Settings], None]) -> None:
        self._lease, self._inbox, self._keep = lease, inbox, keep
        # The lock is an RLock because `let_go` needs a lock that knows which thread holds it.
        self._lock = threading.RLock()
        self._waiting: deque[Arrived] = deque()
        # Settings and freezes that a busy engine takes in at the beginning of its next step, oldest first. Code outside
        # of this class only reads the list.
        self.arrived: Collection[Arrived] = self._waiting

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def begin(self) -> None:
        """Let the engine take messages in itself from now on, because a request has arrived."""
        with self._lock:
            self._lease.begins()

    def fall_idle(self, take_in: Callable[[], None]) -> None:
        """Let the link's thread answer messages from now on, because no request is live any more. take_in: takes in the
        messages that wait."""
        with self._lock:
            self._lease.falls_idle()
            take_in()

    def take(self) -> list[Arrived]:
        """Take out the settings and freezes that wait, oldest first."""
        arrived = []
        while self._waiting:
            arrived.append(self._waiting.popleft())
        return arrived

    def step_aside(self) -> None:
        """Leave every message to the link's thread, because the engine calls no hook of the agent any more."""
        self.let_go()
        self._lease.falls_idle()

    def clear(self) -> None:
        """Drop the settings and freezes that wait, because they were sent to the previous agent."""
        self._waiting.clear()

    # -------------------------------------------------------------------------------------- called on both threads

    def confirm(self, arrived: Arrived) -> None:
        """Confirm settings or a freeze on their stream.

        A busy engine calls `confirm` once the settings or the freeze are in force. For an idle engine the link's thread
        calls `confirm` at once, because the engine reads the newest settings from the lease before it does anything
        else.
        """
        if arrived.settings is not None:
            self._lease.hold(arrived.settings, arrived.markers)
            self._keep(arrived.settings)
        arrived.ring.put(arrived.status)

    def let_go(self) -> None:
        """Release the lock if a fault left it locked by this thread, because the other thread would wait for it for
        ever.

        An exception that is raised just as a `with` block ends leaves the lock locked.
        """
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    # ----------------------------------------------------------------------------------------- the link's own thread

    def arrive(self, arrived: Arrived) -> None:
        """Confirm settings or a freeze at once if the engine is idle; a busy engine takes them in at its next step."""
        with self._lock:
            if self._lease.idle:
                self.confirm(arrived)
            else:
                self._waiting.append(arrived)
                self._lease.call_for_attention()

    def deliver(self, directives: agent_pb2.Directives, ring: RecordRing, waits_since: float | None) -> None:
        """Note the answer in the lease, and put directives into the inbox; if the engine is idle, report their outcomes
        on `ring`. waits_since: as in `Lease.heard`."""
        with self._lock:
            self._lease.heard(waits_since)
            if report := self._inbox.settle_if_idle(directives):
                ring.put(agent_pb2.ConnectRequest(step=report))
            self._inbox.put(directives)

    def while_idle(self, tell: Callable[[], None]) -> None:
        """Call `tell` if the engine is idle, and keep it idle meanwhile. tell: must not wait."""
        with self._lock:
            if self._lease.idle:
                tell()

    def lose_stream(self) -> None:
        """Note in the lease that the stream has ended."""
        with self._lock:
            self._lease.lost()
