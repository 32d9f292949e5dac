"""Knows which policy each engine should have, and sends changed policies to a few engines at a time.

The module owns the newest revision, the active rollout and the timer that sends them. It also catches up: for an engine
that has a newer policy than this replica knows, and for one that refuses the newest revision. All code runs on the
server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from meridian_control.common.complaints import Complaints
from meridian_control.common.errors import MeridianError, StoreUnavailable
from meridian_control.fleet.catching_up import RETRY_S, CatchingUp
from meridian_control.fleet.trace_records import policy_record
from meridian_control.fleet.turns import ENGINES_AT_ONCE
from meridian_control.rollout.transitions import revision_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from datetime import datetime

    from meridian_control.engine.session import Session
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.turns import Tasks, Turns
    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.state import Rollout

    # Reads a revision from the store. Raises NotFound, StoreUnavailable or StoredPolicyUnreadable.
    Read = Callable[[int], Awaitable[StoredRevision]]

logger = logging.getLogger(__name__)

# A changed policy is sent after QUIET_S seconds without a newer change, at most MAX_WAIT_S after the first change.
QUIET_S, MAX_WAIT_S = 0.1, 2.0


class PolicyDelivery:
    """The policies of one replica's engines. connections: the fleet's own set. read: reads a revision from the store,
    None without a store. turns and tasks: the fleet's own."""

    def __init__(
        self,
        connections: Collection[Connection],
        clock: Callable[[], datetime],
        turns: Turns,
        tasks: Tasks,
        read: Read | None,
    ) -> None:
        self._connections, self._clock, self._turns, self._tasks = connections, clock, turns, tasks
        self._read = read
        # The policy of engines outside a rollout's group; None before there is one.
        self.newest: StoredRevision | None = None
        # The active rollout and its candidate.
        self._staged: tuple[Rollout, StoredRevision] | None = None
        # Timer that sends changed policies to engines, and the latest time at which it runs, in the event loop's time.
        self._timer: asyncio.TimerHandle | None = None
        self._send_by = 0.0
        complaints = Complaints(logger, "engine %s has a newer policy than this replica: %s")
        self._behind = CatchingUp(connections, tasks, self._give_again, complaints)

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
            # `begin` catches up for an engine that has a newer policy than this replica knows.
            ahead = wanted is not None and not session.revision and session.hello.revision > wanted.revision
            # Engines that connected after the change were already sent the policy, and may have refused it.
            is_due = wanted is not None and wanted.revision > session.revision and not ahead
            if wanted is not None and is_due and connection in self._connections:
                connection.when_free(partial(self.give, connection, wanted))
        if rest := waiting[ENGINES_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._send_to, rest)

    def give(self, connection: Connection, stored: StoredRevision) -> None:
        session, now = connection.session, self._clock()
        connection.note(policy_record, now, stored.revision, stored.policy)
        connection.say(session.on_policy(stored.revision, stored.policy), now)
        self.restore_last_good(connection)

    def begin(self, connection: Connection, refresh: Callable[[], Awaitable[None]] | None) -> None:
        """Send an engine that connects the policy that it should have. refresh: brings the newest
        state of the store to the fleet, see `Fleet.join`."""
        wanted = self.wanted(connection.session)
        if wanted is not None and connection.session.hello.revision > wanted.revision and refresh is not None:
            self._behind.wait(connection, refresh)
        elif wanted is not None:
            self.give(connection, wanted)

    def _give_again(self, connection: Connection) -> None:
        """Give an engine that had a newer policy than this replica knew the newest policy of the store."""
        wanted = self.wanted(connection.session)
        if wanted is not None and not connection.session.revision:
            self.give(connection, wanted)

    def restore_last_good(self, connection: Connection) -> None:
        """Start to read the policy that is in force on the engine, if the engine refuses the newest revision."""
        wanted, refused = connection.session.last_good_wanted, connection.session.revision
        if wanted and connection.restored_after != refused and self._read is not None:
            connection.restored_after = refused
            self._tasks.start(self._give_last_good(connection, wanted, self._read))

    async def _give_last_good(self, connection: Connection, revision: int, read: Read) -> None:
        session = connection.session
        stored = await _read_stored(read, revision, lambda: connection in self._connections)
        await connection.free(self._turns)
        if stored is not None and session.last_good_wanted == revision and connection in self._connections:
            now = self._clock()
            connection.note(policy_record, now, revision, stored.policy)
            connection.say(session.on_last_good(revision, stored.policy), now)


async def _read_stored(read: Read, revision: int, wanted: Callable[[], bool]) -> StoredRevision | None:
    """Return a revision; None once it is no longer wanted, or if it cannot be read."""
    while wanted():
        try:
            return await read(revision)
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)
        except MeridianError as error:
            logger.warning("revision %d, which is in force on an engine, cannot be read: %s", revision, error)
            return None
    return None
