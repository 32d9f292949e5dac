"""Knows which policy each engine should have, and sends changed policies to a few engines at a time.

The module owns the newest revision, the active rollout and the timer that sends them. All code runs on the server's
event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meridian_control.rollout.transitions import revision_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from meridian_control.engine.session import Session
    from meridian_control.fleet.connection import Connection
    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.state import Rollout

# A changed policy is sent after QUIET_S seconds without a newer change, at most MAX_WAIT_S after the first change.
QUIET_S, MAX_WAIT_S = 0.1, 2.0
# The event loop sends a changed policy to this many engines before it takes in reports that have arrived meanwhile.
ENGINES_AT_ONCE = 16


class PolicyDelivery:
    """The policies of one replica's engines. connections: the fleet's own set. give: sends a revision to an engine."""

    def __init__(self, connections: Collection[Connection], give: Callable[[Connection, StoredRevision], None]) -> None:
        self._connections, self._give = connections, give
        # The policy of engines outside a rollout's group; None before there is one.
        self.newest: StoredRevision | None = None
        # The active rollout and its candidate.
        self._staged: tuple[Rollout, StoredRevision] | None = None
        # Timer that sends changed policies to engines, and the latest time at which it runs, in the event loop's time.
        self._timer: asyncio.TimerHandle | None = None
        self._send_by = 0.0

    def renew(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine: to connecting engines at once, to others after QUIET_S without a change."""
        self.newest = stored
        self._send_soon()

    def stage(self, rollout: Rollout | None, candidate: StoredRevision | None) -> None:
        """Bring the candidate to the engines of the active rollout's group; both are None without an active rollout."""
        self._staged = (rollout, candidate) if rollout is not None and candidate is not None else None
        self._send_soon()

    def wanted(self, session: Session) -> StoredRevision | None:
        """Return the policy that an engine should have."""
        stored, hello = self.newest, session.hello
        if self._staged is None or stored is None:
            return stored
        rollout, candidate = self._staged
        has = session.revision or hello.revision
        mine = revision_of(rollout, hello.engine_id, hello.labels, has) == candidate.revision
        # If a policy newer than the candidate is in force, the rollout has ended although this replica does not know it
        # yet.
        return candidate if mine and candidate.revision > stored.revision else stored

    @property
    def policies(self) -> list[Policy]:
        """The policies that engines may be given: the newest one, and the candidate of the active rollout."""
        candidate = [self._staged[1].policy] if self._staged is not None else []
        return [self.newest.policy, *candidate] if self.newest is not None else candidate

    def _send_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._send_by = loop.time() + MAX_WAIT_S
        else:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + QUIET_S, self._send_by), self.send)

    def send(self) -> None:
        """Send each engine the policy that it should have, unless the engine was sent it before."""
        self._timer = None
        self._send_to(list(self._connections))

    def _send_to(self, waiting: list[Connection]) -> None:
        for connection in waiting[:ENGINES_AT_ONCE]:
            session, wanted = connection.session, self.wanted(connection.session)
            # The fleet catches up for an engine that has a newer policy than this replica knows.
            ahead = wanted is not None and not session.revision and session.hello.revision > wanted.revision
            # Engines that connected after the change were already sent the policy, and may have refused it.
            is_due = wanted is not None and wanted.revision > session.revision and not ahead
            if wanted is not None and is_due and connection in self._connections:
                self._give(connection, wanted)
        if rest := waiting[ENGINES_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._send_to, rest)
