"""Drives the active rollout on one replica, and tells every replica's fleet of it.

Owns when the fleet is looked at and when the state is stored; what happens is decided in `rollout`. Runs on the control
plane's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from meridian_control.common.errors import MeridianError, StoredPolicyUnreadable, StoreUnavailable
from meridian_control.rollout.sampler import Sampler
from meridian_control.rollout.transitions import tick

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from meridian.v1 import fleet_pb2

    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.state import Rollout
    from meridian_control.rollout.store import Fence, RolloutStore

logger = logging.getLogger(__name__)

TICK_S = 1.0
# Measurements are stored this often, for whoever shows them, or drives on.
STORE_S = 5.0
# Time without a look at the fleet counts for a step up to here.
MAX_ELAPSED_S = 5.0


class Governed(Protocol):
    """The fleet, as far as rollouts know it."""

    def set_policy(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine."""

    def set_rollout(self, rollout: Rollout | None, candidate: StoredRevision | None) -> None:
        """Bring the candidate to the engines of an active rollout's group; None for no rollout."""


class Rollouts:
    """One replica's part in rollouts.

    `engines` shows the whole fleet, `leads` says whether this replica drives; both may be asked at any time. `fence`
    holds the lead until a transaction ends, and raises where another replica has it. `clock` gives aware time.
    """

    def __init__(
        self,
        store: RolloutStore,
        fleet: Governed,
        clock: Callable[[], datetime],
        engines: Callable[[], list[fleet_pb2.Engine]],
        leads: Callable[[], bool] = lambda: True,
        *,
        fence: Fence | None = None,
    ) -> None:
        self.store, self._fleet, self._clock = store, fleet, clock
        self._engines, self._leads, self._fence = engines, leads, fence
        self._one_at_a_time = asyncio.Lock()
        # The version that the fleet was told of; None for no active rollout.
        self._told: tuple[int, int] | None = None
        # The newest at that time, active or not.
        self._newest: Rollout | None = None
        # As it is driven here, since when, and when it was stored; what was measured since is in it only.
        self._driven: Rollout | None = None
        self._looked_at = self._stored_at = clock()
        self._sampler = Sampler()

    async def look(self) -> None:
        """Bring to this replica's engines what the store says. Raises StoreUnavailable, StoredPolicyUnreadable."""
        async with self._one_at_a_time:
            rollout = await self.store.active()
            self._newest = rollout
            if rollout is None:
                # One that is over, and that a newer version stored so that it cannot be read, is no reason to stop.
                with suppress(StoreUnavailable):
                    self._newest = await self.store.newest()
            policies = self.store.policies
            candidate = await policies.get(rollout.candidate_revision) if rollout is not None else None
            current = await policies.current()
            self._fleet.set_rollout(rollout, candidate)
            if current is not None:
                self._fleet.set_policy(current)
            self._told = _version(rollout)

    @property
    def newest(self) -> Rollout | None:
        """The newest rollout; where it is driven here, with what was measured last. None before there is one."""
        driven, newest = self._driven, self._newest
        return driven if driven and newest and newest.active and driven.rollout_id == newest.rollout_id else newest

    async def follow(self) -> None:
        """Look whenever another replica may have changed something, until cancelled; at once over on SQLite."""

        async def look() -> None:
            try:
                await self.look()
            except StoredPolicyUnreadable as error:
                # A newer version wrote it; this replica's engines keep what they have.
                logger.error("%s", error)

        await self.store.database.follow(look)

    async def drive(self) -> None:
        """Until cancelled."""
        complaint = ""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
                complaint = ""
            except MeridianError as error:
                if complaint != str(error):
                    complaint = str(error)
                    logger.warning("rollouts stand still: %s", complaint)

    async def tick(self) -> None:
        """Look at the fleet and do what follows. Raises what `fence` does, StoreUnavailable, StoredPolicyUnreadable."""
        if not self._leads():
            self._driven = None
            return
        stored = await self.store.active()
        if _version(stored) != self._told:
            await self.look()
        if stored is None:
            self._driven = None
            return
        now = self._clock()
        if self._driven is None or self._driven.rollout_id != stored.rollout_id:
            self._begin(stored, now)
        elif self._driven.version != stored.version:
            # Somebody steered it.
            self._driven = stored
        assert self._driven is not None
        await self._advance(self._driven, now)

    def _begin(self, stored: Rollout, now: datetime) -> None:
        logger.info("driving rollout %d, %s in step %d", stored.rollout_id, stored.state.word, stored.step)
        self._driven, self._sampler = stored, Sampler()
        self._looked_at = self._stored_at = now

    async def _advance(self, before: Rollout, now: datetime) -> None:
        lease_s = (await self.store.policies.get(before.candidate_revision)).policy.fallback.lease_ms / 1000
        sample = self._sampler.sample(self._engines(), before, lease_s, now)
        elapsed_s = min((now - self._looked_at).total_seconds(), MAX_ELAPSED_S)
        self._looked_at = now
        after = tick(before, sample, elapsed_s, now)
        self._driven = after
        due = (now - self._stored_at).total_seconds() >= STORE_S
        if after.changes == before.changes and not (due and after != before):
            return
        self._stored_at = now
        # None: somebody steered it meanwhile, and the next look begins with what they made of it.
        self._driven = saved = await self.store.save(after, self._fence)
        if saved is not None and saved.changes != before.changes:
            event = saved.events[-1]
            level = logging.WARNING if event.event in ("halted", "rolled_back") else logging.INFO
            logger.log(level, "rollout %d: %s in step %d %s", saved.rollout_id, event.event, event.step, event.reason)
            await self.look()


def _version(rollout: Rollout | None) -> tuple[int, int] | None:
    """The part of a rollout that the fleet has to know; measurements are not part of it."""
    return (rollout.rollout_id, rollout.changes) if rollout is not None else None
