"""Tracks which replicas of the control plane live and which replica leads, in rows of PostgreSQL.

The module owns the tables `replicas` and `leader`. Every HEARTBEAT_S seconds each replica renews its row of `replicas`,
and the leader also renews the row of `leader`. The module does not know what a leader does, nor how replicas call each
other. The module is used only with a store that several replicas share, and runs on the control plane's event loop.

The replica that renews the row of `leader` leads for LEASE_S seconds by the database's clock. By its own clock the
replica leads for MARGIN_S less, counted from before the renewal was sent. A process could be suspended after `leads`
has returned true and write later, when another replica leads. The driver of rollouts therefore begins each write with
`fence`, which fails once another replica has led. The harm guard needs no fence: an abort because of harm holds whoever
leads, and its revision names the policy that it replaces by etag. `token` is a counter that grows whenever another
replica takes the lead.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from sqlalchemy import text

from meridian_control.common.complaints import Complaints
from meridian_control.common.errors import NotLeading, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection

    from meridian_control.storage.database import Database

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# Seconds without a heartbeat after which a replica counts as dead, and without a renewal after which a lease ends.
LEASE_S = 5.0
# Seconds between the moment a leader stops leading and the moment another replica may lead.
MARGIN_S = 1.0
# Seconds for which the rows of dead replicas are kept.
FORGET_S = 60.0

_LIVE = text("""INSERT INTO replicas (replica_id, address, heartbeat_at, engines)
    VALUES (:replica_id, :address, now(), :engines) ON CONFLICT (replica_id) DO UPDATE
    SET address = excluded.address, heartbeat_at = excluded.heartbeat_at, engines = excluded.engines""")
# The database's clock may be set back. A heartbeat in the future then does not count, nor a lease that ends later than
# one that is renewed now: a replica that lives renews both within a second, and a dead one must not hold them.
# Whether no other replica leads. Only then is `leader` written, because each attempt locks its row for all replicas.
_VACANT = text("""SELECT NOT EXISTS
    (SELECT FROM leader WHERE replica_id <> :replica_id AND expires_at >= now()
        AND expires_at <= clock_timestamp() + make_interval(secs => :lease_s))""")
_LEAD = text("""INSERT INTO leader (number, replica_id, token, expires_at)
    VALUES (1, :replica_id, 1, now() + make_interval(secs => :lease_s))
    ON CONFLICT (number) DO UPDATE SET replica_id = excluded.replica_id, expires_at = excluded.expires_at,
        token = leader.token + CASE WHEN leader.replica_id = excluded.replica_id THEN 0 ELSE 1 END
    WHERE leader.replica_id = excluded.replica_id OR leader.expires_at < now()
        OR leader.expires_at > clock_timestamp() + make_interval(secs => :lease_s)
    RETURNING token""")
# The other replicas that are not forgotten, with the newest heartbeat first, and whether each of them lives.
_OTHERS = text("""SELECT replica_id, address, heartbeat_at > now() - make_interval(secs => :lease_s), engines
    FROM replicas WHERE replica_id <> :replica_id AND heartbeat_at >= now() - make_interval(secs => :forget_s)
        AND heartbeat_at <= clock_timestamp() ORDER BY heartbeat_at DESC""")
# SKIP LOCKED leaves out locked rows, so that replicas that come back at the same time do not deadlock.
_BURY = text("""DELETE FROM replicas WHERE replica_id IN (SELECT replica_id FROM replicas
    WHERE heartbeat_at < now() - make_interval(secs => :forget_s) FOR UPDATE SKIP LOCKED)""")
_FENCE = text("SELECT token FROM leader WHERE replica_id = :replica_id AND token = :token FOR SHARE")
_LEAVE = text("DELETE FROM replicas WHERE replica_id = :replica_id")
_RESIGN = text("UPDATE leader SET expires_at = now() - interval '1 second' WHERE replica_id = :replica_id")


@dataclass(frozen=True)
class Replica:
    """A replica of the control plane. `address` is the host:port at which the other replicas reach the replica."""

    replica_id: str
    address: str


class Replicas:
    """Tracks this replica and the other live replicas. `engines` returns the number of this replica's engines, and
    `clock` monotonic seconds."""

    def __init__(
        self,
        database: Database,
        me: Replica,
        clock: Callable[[], float] = time.monotonic,
        *,
        engines: Callable[[], int] = lambda: 0,
    ) -> None:
        self.me, self._engines = me, engines
        # The other live replicas, ordered by id, as last read from the database. Of several with one address the one
        # with the newest heartbeat has it; a replica that was killed may have been started again there.
        self.others: tuple[Replica, ...] = ()
        # The numbers of engines of `others`; None for a replica of a version that does not write it.
        self.engines_of_others: tuple[int | None, ...] = ()
        # Ids of all other replicas that are not forgotten yet: one that hangs may still have engines. One that is dead
        # has ended if another one lives at its address, because two processes cannot listen there.
        self.silent: tuple[str, ...] = ()
        self._database, self._clock = database, clock
        self._token: int | None = None
        self._leads_until = 0.0

    def leads(self) -> bool:
        """Return whether this replica leads now, without asking the database."""
        return self._token is not None and self._clock() < self._leads_until

    async def beat(self) -> None:
        """Renew this replica's row, read the other live replicas, and lead if no other replica does.

        Raises StoreUnavailable.
        """
        began = self._clock()
        # Without the database nobody knows which of the others still live.
        self.engines_of_others = ()
        row = {**vars(self.me), "lease_s": LEASE_S, "forget_s": FORGET_S, "engines": self._engines()}
        async with self._database.writing(tell=False) as connection:
            await connection.execute(_LIVE, row)
            token = await connection.scalar(_LEAD, row) if await connection.scalar(_VACANT, row) else None
            if token is not None:
                await connection.execute(_BURY, row)
            rows = list(await connection.execute(_OTHERS, row))
        at = {self.me.address: self.me.replica_id}
        reached = [
            Replica(name, address) for name, address, lives, _ in rows if lives and at.setdefault(address, name) == name
        ]
        others = tuple(sorted(reached, key=attrgetter("replica_id")))
        ids, taken = {other.replica_id for other in others}, {self.me.address, *(other.address for other in others)}
        silent = {name for name, address, lives, _ in rows if lives or address not in taken}
        self.silent = tuple(sorted(silent - ids))
        if token != self._token and token is not None:
            logger.info("replica %s leads, token %d", self.me.replica_id, token)
        self._token, self._leads_until = token, began + LEASE_S - MARGIN_S
        for what, changed in (("appeared", {*others} - {*self.others}), ("is gone", {*self.others} - {*others})):
            for other in changed:
                logger.info("replica %s at %s %s", other.replica_id, other.address, what)
        engines = {name: count for name, _, _, count in rows}
        self.others, self.engines_of_others = others, tuple(engines[other.replica_id] for other in others)

    async def run(self) -> None:
        """Call `beat` every HEARTBEAT_S seconds until cancelled."""
        complaints = Complaints(logger, "this replica cannot announce itself to the other replicas: %s")
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.beat()
                complaints.over()
            except StoreUnavailable as error:
                complaints.log(error)

    async def fence(self, connection: AsyncConnection) -> None:
        """Keep the lead until the connection's transaction ends. Raises NotLeading if another replica has led
        meanwhile."""
        row = {"replica_id": self.me.replica_id, "token": self._token}
        if self._token is None or await connection.scalar(_FENCE, row) is None:
            self._token = None
            raise NotLeading(f"replica {self.me.replica_id} no longer leads")

    async def leave(self) -> None:
        """Remove this replica's row and give up the lead, so that another replica can lead at once.

        Raises StoreUnavailable.
        """
        self._token = None
        async with self._database.writing(tell=False) as connection:
            await connection.execute(_LEAVE, vars(self.me))
            await connection.execute(_RESIGN, vars(self.me))


def new_id() -> str:
    """Return a new replica id for this process: the host name and random digits."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def own_host() -> str:
    """Return this host's address for other hosts, from the routing table. The function sends no packet."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
