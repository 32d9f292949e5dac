"""Guards the moment in which an engine falls idle or begins, so that exactly one thread answers what has arrived.

A busy engine takes messages in itself, at the beginning of its next step. An idle engine makes no step, so the link's
thread answers for it. The lock in here is the only one that both threads take; neither holds it across I/O.
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
    """Settings or a freeze on their way into force, and the status that confirms them on their stream."""

    status: agent_pb2.ConnectRequest
    ring: RecordRing
    settings: agent_pb2.Settings | None = None
    markers: Any = None


class Mailbox:
    """The mailbox of one engine. keep: is given settings once they are in force; must not wait."""

    def __init__(self, lease: Lease, inbox: Inbox, keep: Callable[[agent_pb2.Settings], None]) -> None:
        self._lease, self._inbox, self._keep = lease, inbox, keep
        # An RLock, because it knows which thread holds it: see `let_go`.
        self._lock = threading.RLock()
        self._waiting: deque[Arrived] = deque()
        # Settings and freezes that a busy engine takes in at the beginning of its next step, oldest first. Read only.
        self.arrived: Collection[Arrived] = self._waiting

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def begin(self) -> None:
        """A request has come to an idle engine: from now on the engine takes messages in itself."""
        with self._lock:
            self._lease.begins()

    def fall_idle(self, take_in: Callable[[], None]) -> None:
        """The engine has no request any more. take_in: takes in, for the last time, what waits for the engine."""
        with self._lock:
            self._lease.falls_idle()
            take_in()

    def take(self) -> list[Arrived]:
        """Take out the settings and freezes that wait, oldest first."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken

    def step_aside(self) -> None:
        """Leave every message to the link's thread, because the engine calls no hook of the agent any more."""
        self.let_go()
        self._lease.falls_idle()

    def clear(self) -> None:
        """Drop the settings and freezes that wait, because they were sent to an agent that is no more."""
        self._waiting.clear()

    # -------------------------------------------------------------------------------------------- called on either one

    def confirm(self, arrived: Arrived) -> None:
        """Say on its stream that something is in force.

        The engine calls this once that is so. For an idle engine the link's thread does so at once: whatever that
        engine does next, it first looks at the settings that the lease holds.
        """
        if arrived.settings is not None:
            self._lease.hold(arrived.settings, arrived.markers)
            self._keep(arrived.settings)
        arrived.ring.put(arrived.status)

    def let_go(self) -> None:
        """Release the lock if a fault of this thread has kept it, for the other thread would wait for ever.

        An exception that comes just as a `with` block ends leaves the lock held.
        """
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    # ----------------------------------------------------------------------------------------- the link's own thread

    def arrive(self, arrived: Arrived) -> None:
        """Put settings or a freeze in force for an idle engine; a busy one takes them in later."""
        with self._lock:
            if self._lease.idle:
                self.confirm(arrived)
            else:
                self._waiting.append(arrived)

    def deliver(self, directives: agent_pb2.Directives, ring: RecordRing) -> None:
        """Hand directives to the engine; report the outcomes for an idle one on this ring."""
        with self._lock:
            if report := self._inbox.settle_if_idle(directives):
                ring.put(agent_pb2.ConnectRequest(step=report))
            self._inbox.put(directives)

    def lose_stream(self) -> None:
        """The stream is over."""
        with self._lock:
            self._lease.lost()
