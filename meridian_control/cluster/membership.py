"""Tells which replicas of the control plane live, and which one leads: rows in PostgreSQL, renewed every HEARTBEAT_S.

Owns the tables `replicas` and `leader`. Knows nothing of what a leader does or of how replicas talk to each other. Only
for stores that several replicas share. Runs on the control plane's event loop.

Whoever renews the row of `leader` leads for LEASE_S by the database's clock, and by its own for a little less, counted
from before the renewal was sent. A process that is stopped between asking `leads` and writing would still be wrong, so
a leader's write begins with `fence`, which fails once somebody else has led. `token` counts the leaders.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import text

from meridian_control.common.errors import NotLeading, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection

    from meridian_control.storage.database import Database

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# A replica is dead, and a lease over, when nothing was heard for so long.
LEASE_S = 5.0
# A leader stops so long before another may begin.
MARGIN_S = 1.0
# Rows of the dead stay for so long.
FORGET_S = 60.0

_LIVE = text("""INSERT INTO replicas (replica_id, address, heartbeat_at) VALUES (:replica_id, :address, now())
    ON CONFLICT (replica_id) DO UPDATE SET address = excluded.address, heartbeat_at = excluded.heartbeat_at""")
_LEAD = text("""INSERT INTO leader (number, replica_id, token, expires_at)
    VALUES (1, :replica_id, 1, now() + make_interval(secs => :lease_s))
    ON CONFLICT (number) DO UPDATE SET replica_id = excluded.replica_id, expires_at = excluded.expires_at,
        token = leader.token + CASE WHEN leader.replica_id = excluded.replica_id THEN 0 ELSE 1 END
    WHERE leader.replica_id = excluded.replica_id OR leader.expires_at < now()
    RETURNING token""")
_OTHERS = text("""SELECT replica_id, address FROM replicas
    WHERE replica_id <> :replica_id AND heartbeat_at > now() - make_interval(secs => :lease_s) ORDER BY replica_id""")
# Locked rows are left out: replicas that come back at the same time do not wait for each other in a circle.
_BURY = text("""DELETE FROM replicas WHERE replica_id IN (SELECT replica_id FROM replicas
    WHERE heartbeat_at < now() - make_interval(secs => :forget_s) FOR UPDATE SKIP LOCKED)""")
_FENCE = text("SELECT token FROM leader WHERE replica_id = :replica_id AND token = :token FOR SHARE")
_LEAVE = text("DELETE FROM replicas WHERE replica_id = :replica_id")
_RESIGN = text("UPDATE leader SET expires_at = now() - interval '1 second' WHERE replica_id = :replica_id")


@dataclass(frozen=True)
class Replica:
    """`address` is where the others reach it, host:port."""

    replica_id: str
    address: str


class Replicas:
    """This replica among the others. `clock` gives monotonic seconds."""

    def __init__(self, database: Database, me: Replica, clock: Callable[[], float] = time.monotonic) -> None:
        self.me = me
        # The other live ones, by id; as last seen while the database is away.
        self.others: tuple[Replica, ...] = ()
        self._database, self._clock = database, clock
        self._token: int | None = None
        self._leads_until = 0.0

    def leads(self) -> bool:
        """Whether this replica leads now. Local and cheap."""
        return self._token is not None and self._clock() < self._leads_until

    async def beat(self) -> None:
        """Say that this replica lives, see who else does, and lead if nobody does. Raises StoreUnavailable."""
        began = self._clock()
        row = {**vars(self.me), "lease_s": LEASE_S, "forget_s": FORGET_S}
        async with self._database.writing(tell=False) as connection:
            await connection.execute(_LIVE, row)
            await connection.execute(_BURY, row)
            token = await connection.scalar(_LEAD, row)
            others = tuple(Replica(*found) for found in await connection.execute(_OTHERS, row))
        if token != self._token and token is not None:
            logger.info("replica %s leads, token %d", self.me.replica_id, token)
        self._token, self._leads_until = token, began + LEASE_S - MARGIN_S
        for what, changed in (("appeared", {*others} - {*self.others}), ("is gone", {*self.others} - {*others})):
            for other in changed:
                logger.info("replica %s at %s %s", other.replica_id, other.address, what)
        self.others = others

    async def run(self) -> None:
        """Beat until cancelled."""
        heard = True
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.beat()
                heard = True
            except StoreUnavailable as error:
                if heard:
                    logger.warning("%s: other replicas do not hear of this one", error)
                heard = False

    async def fence(self, connection: AsyncConnection) -> None:
        """Hold the lead until the connection's transaction ends. Raises NotLeading where another has led since."""
        row = {"replica_id": self.me.replica_id, "token": self._token}
        if self._token is None or await connection.scalar(_FENCE, row) is None:
            self._token = None
            raise NotLeading(f"replica {self.me.replica_id} does not lead any more")

    async def leave(self) -> None:
        """Let the others know at once. Raises StoreUnavailable."""
        self._token = None
        async with self._database.writing(tell=False) as connection:
            await connection.execute(_LEAVE, vars(self.me))
            await connection.execute(_RESIGN, vars(self.me))


def new_id() -> str:
    """An id of this process: the host's name, as people know it, and something of its own."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def own_host() -> str:
    """The address that this host has for others, as its routes say; nothing is sent."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
