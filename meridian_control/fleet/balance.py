"""Sends engines to other replicas while this replica has more than its share of them.

Streams last, so the engines of a replica that was added, or started again, would stay where they are. An engine that is
sent away chooses a replica at random and may come back; it then stays, because it may know no other replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set
    from datetime import datetime

    from meridian_control.fleet.fleet import Fleet

logger = logging.getLogger(__name__)

# Seconds between two looks.
LOOK_S = 60.0
# A replica has too many engines if it has over MORE engines more than SHARE times the mean of all replicas. Engines
# that choose their replicas at random spread about as far.
SHARE, MORE = 1.25, 4
# Largest share of a replica's engines that one look sends away: each sends a snapshot to its new replica.
AT_ONCE = 0.1
# Time for which an engine stays that was sent away.
STAYS = timedelta(minutes=30)
# Once so many engines were sent away within that time, no other is sent if this share of them came back: their agents
# know no other replica, or reach none.
IN_VAIN, CAME_BACK = 8, 0.9


class Balance:
    """Keeps the engines of `fleet`, a replica's, near the mean of all replicas.

    others: returns the numbers of engines of the other live replicas; None for one whose number is not known.
    """

    def __init__(self, fleet: Fleet, others: Callable[[], Sequence[int | None]]) -> None:
        self._fleet, self._others = fleet, others
        # The time at which each engine process was sent away, the earliest first, by engine id and incarnation.
        self._sent: dict[tuple[str, str], datetime] = {}
        # True while nearly all of these are back, which is logged once.
        self._in_vain = False

    async def run(self) -> None:
        """Look every LOOK_S seconds until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Send engines away if there are too many; those with the fewest requests first."""
        fleet, now = self._fleet, self._fleet.clock()
        while self._sent and now - next(iter(self._sent.values())) >= STAYS:
            del self._sent[next(iter(self._sent))]
        others, own = [count for count in self._others() if count is not None], len(fleet.connections)
        mean = (own + sum(others)) / (1 + len(others))
        if own <= SHARE * mean + MORE:
            return
        open_streams = [connection for connection in fleet.connections if not connection.closing]
        if self._sends_in_vain({connection.session.identity for connection in open_streams}):
            return
        may_go = [connection for connection in open_streams if connection.session.identity not in self._sent]
        may_go.sort(key=lambda connection: (connection.session.table.slots().size, random.random()))
        going = may_go[: math.ceil(AT_ONCE * own)]
        for connection in going:
            self._sent[connection.session.identity] = now
            fleet.send_away(connection, "another replica has fewer engines")
        if going:
            logger.info("%d of %d engines are sent to other replicas: the mean is %.1f", len(going), own, mean)

    def _sends_in_vain(self, here: Set[tuple[str, str]]) -> bool:
        """Return whether nearly all engines that were sent away are here again."""
        back, sent, was = len(self._sent.keys() & here), len(self._sent), self._in_vain
        self._in_vain = sent >= IN_VAIN and back >= CAME_BACK * sent
        if self._in_vain and not was:
            text = "%d of %d engines that were sent away came back: do agents reach other replicas?"
            logger.warning(text, back, sent)
        return self._in_vain
