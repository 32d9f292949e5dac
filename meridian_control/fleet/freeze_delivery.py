"""Sends each engine the freezes that match it, a few engines at a time, now and when a freeze ends.

All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from meridian_control.common.complaints import Complaints
from meridian_control.fleet.catching_up import CatchingUp
from meridian_control.fleet.turns import ENGINES_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from datetime import datetime

    from meridian_control.engine.freeze_state import Freeze
    from meridian_control.engine.session import Session
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.turns import Tasks

logger = logging.getLogger(__name__)


class FreezeDelivery:
    """The freezes of one replica's engines.

    connections and tasks: the fleet's own. when_sent: is called once all engines have been sent changed freezes.
    `look` reads the store's freezes, passes them to `renew` and raises StoreUnavailable; None without a store.
    """

    def __init__(
        self,
        connections: Collection[Connection],
        clock: Callable[[], datetime],
        tasks: Tasks,
        when_sent: Callable[[], None],
    ) -> None:
        self.look: Callable[[], Awaitable[object]] | None = None
        self._connections, self._clock, self._when_sent = connections, clock, when_sent
        self._freezes: tuple[Freeze, ...] = ()
        # Timer that runs when the next freeze ends.
        self._thawing: asyncio.TimerHandle | None = None
        complaints = Complaints(logger, "engine %s stays frozen, by freezes that this replica does not know: %s")
        self._unknown = CatchingUp(connections, tasks, self._give_known, complaints)

    def renew(self, freezes: tuple[Freeze, ...]) -> None:
        """Send each engine its freezes if they have changed, now and when the next freeze ends."""
        self._freezes, now = freezes, self._clock()
        if self._thawing is not None:
            self._thawing.cancel()
            self._thawing = None
        self._send_to(list(self._connections), freezes)
        if left := [freeze.remaining(now) for freeze in freezes if freeze.end_time > now]:
            delay_s = min(left).total_seconds()
            self._thawing = asyncio.get_running_loop().call_later(delay_s, self.renew, freezes)

    def _send_to(self, waiting: list[Connection], freezes: tuple[Freeze, ...]) -> None:
        """Send engines their freezes, a few in each round of the event loop, unless there are newer freezes."""
        if freezes is not self._freezes:
            return
        for connection in waiting[:ENGINES_AT_ONCE]:
            connection.when_free(partial(self._give, connection))
        if rest := waiting[ENGINES_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._send_to, rest, freezes)
        else:
            self._when_sent()

    def _give(self, connection: Connection) -> None:
        session, now = connection.session, self._clock()
        matching = self._of(session)
        if connection in self._connections and matching != session.freezing.freezes:
            connection.say(session.on_freezes(matching, now), now)

    def begin(self, connection: Connection) -> None:
        """Send an engine that connects its freezes. A frozen engine without freezes may be frozen by a freeze that only
        other replicas know yet, so it is thawed by an empty list once the store was read."""
        if self._of(connection.session) or (connection.session.frozen and self.look is None):
            self._give_known(connection)
        elif connection.session.frozen and self.look is not None:
            self._unknown.wait(connection, self.look)

    def _give_known(self, connection: Connection) -> None:
        session, now = connection.session, self._clock()
        if not session.freezing.freezes:
            connection.say(session.on_freezes(self._of(session), now), now)

    @property
    def in_force(self) -> tuple[Freeze, ...]:
        """The freezes in force, newest first."""
        now = self._clock()
        return tuple(freeze for freeze in self._freezes if freeze.end_time > now)

    def _of(self, session: Session) -> tuple[Freeze, ...]:
        hello = session.hello
        return tuple(f for f in self.in_force if f.match.matches(hello.engine_id, hello.model, hello.labels))
