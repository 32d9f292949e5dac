"""Drives the active rollout on one replica, and hands its state to the fleet of every replica.

The driver decides when to sample the fleet and when to store the state; `transitions` decides how the rollout proceeds.
All code runs on the control plane's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Protocol

from meridian_control.common.complaints import Complaints
from meridian_control.common.errors import NotFound, StoredPolicyUnreadable, StoreUnavailable
from meridian_control.rollout.sampler import Sampler
from meridian_control.rollout.transitions import tick

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from meridian.v1 import fleet_pb2

    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.state import Rollout
    from meridian_control.rollout.store import RolloutStore
    from meridian_control.storage.database import Fence

logger = logging.getLogger(__name__)

TICK_S = 1.0
# While no rollout is active, one of so many ticks reads the store, and also the first tick after a call of `look` or a
# failure. `look` is called when a rollout begins, so the ticks only find a rollout that `look` could not read.
IDLE_TICKS = 10
# Seconds between two writes of the measurements, which other replicas show, or use when they take over the driving.
STORE_S = 5.0
# Largest number of seconds between two samples that count towards the bake time of a step.
MAX_ELAPSED_S = 5.0
# Seconds after which every engine that is alive has connected to this replica, or again to another; a lease may be far
# longer.
RETURN_S = 60.0


class Governed(Protocol):
    """The calls of the fleet that rollouts need."""

    @property
    def policy(self) -> StoredRevision | None:
        """The policy in force; None before the first one."""

    def set_policy(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine."""

    def replace_policy(self, stored: StoredRevision) -> None:
        """Bring a revision to every engine in place of one that the store has lost."""

    def set_rollout(self, rollout: Rollout | None, candidate: StoredRevision | None) -> None:
        """Bring the candidate to the engines of the active rollout's group; both are None without an active rollout."""


class Rollouts:
    """Drives rollouts on one replica if this replica leads.

    `engines` returns the engines of the whole fleet, None while a replica has not said its own yet. `leads` returns
    whether this replica leads. `fence` keeps the lead until a transaction ends, and raises if another replica leads.
    `clock` gives aware time, also for the events that others add.
    """

    def __init__(
        self,
        store: RolloutStore,
        fleet: Governed,
        clock: Callable[[], datetime],
        engines: Callable[[], Awaitable[list[fleet_pb2.Engine] | None]],
        leads: Callable[[], bool] = lambda: True,
        *,
        fence: Fence | None = None,
    ) -> None:
        self.store, self._fleet, self.clock = store, fleet, clock
        self.engines, self._leads, self.fence = engines, leads, fence
        self._one_at_a_time = asyncio.Lock()
        # Version of the rollout that was handed to the fleet; None if no rollout was active.
        self._told: tuple[int, int] | None = None
        # The candidate of the active rollout; and the lease of the newest candidate.
        self._candidate: StoredRevision | None = None
        self._lease_s = 0.0
        # The newest rollout in the store at that time, active or not.
        self._newest: Rollout | None = None
        # The rollout that this replica drives, including measurements and a change of state that are not stored yet;
        # the times of its newest sample and of its newest write to the store.
        self._driven: Rollout | None = None
        self._looked_at = self._stored_at = clock()
        # Seconds for which this replica has watched a rollout that had already begun; infinite if it watched from the
        # beginning.
        self._watched_s = inf
        self._sampler = Sampler()
        # The number of ticks since one has read the store; -1 if the next tick is to read it.
        self._idle_ticks = -1

    async def look(self) -> None:
        """Hand the store's active rollout and policy to this replica's fleet.

        Raises StoreUnavailable, StoredPolicyUnreadable, and NotFound if the store loses a revision meanwhile.
        """
        policies, self._idle_ticks = self.store.policies, -1
        async with self._one_at_a_time:
            # The policy comes first, because a rollout that only a newer version of the control plane can read is an
            # error. To read a stored policy takes time, so only a new one is read.
            known, revision = self._fleet.policy, await policies.number()
            if revision > (known.revision if known is not None else 0):
                self._fleet.set_policy(await policies.get(revision))
            elif known is not None and revision and not await policies.holds(known):
                await self._follow_back(known, revision)
            rollout = await self.store.active()
            self._newest = rollout
            if rollout is None:
                self._candidate = None
                # A finished rollout that only a newer version can read must not be an error.
                with suppress(StoreUnavailable):
                    self._newest = await self.store.newest()
            elif self._candidate is None or self._candidate.revision != rollout.candidate_revision:
                self._candidate = await policies.get(rollout.candidate_revision)
                self._lease_s = self._candidate.policy.fallback.lease_ms / 1000
            self._fleet.set_rollout(rollout, self._candidate)
            self._told = _version(rollout)

    async def take_up(self) -> None:
        """Call `look` after a change was stored. If the store cannot be read, the next tick calls `look` again."""
        try:
            await self.look()
        except (StoreUnavailable, StoredPolicyUnreadable, NotFound) as error:
            logger.warning("the change of a rollout is stored and waits: %s", error)

    async def _follow_back(self, known: StoredRevision, revision: int) -> None:
        """Follow a store that has lost the policy in force, once somebody has stored another one since: its number says
        nothing then. Until that the policy stays in force, because the loss is no change that somebody wants."""
        stored = await self.store.policies.get(revision)
        if stored.created_at > known.created_at and self._fleet.policy is known:
            logger.warning("the store has lost revision %d; revision %d replaces it", known.revision, revision)
            self._candidate = None
            self._fleet.replace_policy(stored)

    @property
    def newest(self) -> Rollout | None:
        """The newest rollout, with the latest measurements if this replica drives it; None before the first rollout."""
        driven, newest = self._driven, self._newest
        return driven if driven and newest and newest.active and driven.rollout_id == newest.rollout_id else newest

    async def follow(self) -> None:
        """Call `look` when another replica may have changed the store, until cancelled; return at once on SQLite."""
        complaints = Complaints(logger, level=logging.ERROR)

        async def look() -> None:
            try:
                await self.look()
                complaints.over()
            except (StoredPolicyUnreadable, NotFound) as error:
                # A newer version of the control plane stored the policy, or the store has lost it between two reads;
                # this replica's engines keep their policies.
                complaints.log(error)

        await self.store.database.follow(look)

    async def drive(self) -> None:
        """Call `tick` every TICK_S seconds, until cancelled."""
        complaints = Complaints(logger, "rollouts do not proceed: %s")
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if await self.tick():
                    complaints.over()
            except Exception as error:
                # What other replicas answer must not end this one, whatever is wrong with it.
                complaints.log(error)

    async def tick(self) -> bool:
        """Sample the fleet and advance the active rollout, if this replica leads. Return whether the store was read.

        Raises StoreUnavailable, StoredPolicyUnreadable, and the errors of `fence`.
        """
        idle_ticks = (self._idle_ticks + 1) % IDLE_TICKS
        if not self._leads() or (self._told is None and idle_ticks):
            self._idle_ticks, self._driven = idle_ticks, None
            return False
        # A change may be stored while the store is read, and `look` then asks for another reading.
        self._idle_ticks = 0
        try:
            stored = await self.store.active()
        except StoreUnavailable:
            self._idle_ticks = -1
            raise
        if _version(stored) != self._told:
            await self.look()
        if stored is None:
            self._driven = None
            return True
        engines, now = await self.engines(), self.clock()
        if self._driven is None or self._driven.rollout_id != stored.rollout_id:
            self._begin(stored, now)
        elif self._driven.version != stored.version:
            # A caller paused, resumed or aborted the rollout.
            self._driven = stored
        assert self._driven is not None
        if engines is None:
            self._looked_at = now
        else:
            await self._advance(self._driven, stored, engines, now)
        return True

    def _begin(self, stored: Rollout, now: datetime) -> None:
        logger.info("driving rollout %d, %s in step %d", stored.rollout_id, stored.state.word, stored.step)
        self._driven, self._sampler = stored, Sampler()
        self._looked_at = self._stored_at = now
        is_new = stored.changes == 1 and not stored.baked_s
        self._watched_s = inf if is_new else 0.0

    async def _advance(self, before: Rollout, stored: Rollout, engines: list[fleet_pb2.Engine], now: datetime) -> None:
        # The wall clock may be set back or forward.
        elapsed_s = min(max(0.0, (now - self._looked_at).total_seconds()), MAX_ELAPSED_S)
        self._watched_s += elapsed_s
        sample = self._sampler.sample(engines, before, self._lease_s, now, elapsed_s)
        sample = replace(sample, returning=self._watched_s < min(self._lease_s, RETURN_S))
        self._looked_at, self._stored_at = now, min(self._stored_at, now)
        # A change of state that could not be stored is stored before the rollout goes on.
        after = tick(before, sample, elapsed_s, now) if before.changes == stored.changes else before
        self._driven = after
        due = (now - self._stored_at).total_seconds() >= STORE_S
        if after.changes == stored.changes and not (due and after != stored):
            return
        self._stored_at = now
        saved = await self.store.save(after, self.fence)
        # `save` returns None if a caller changed the rollout meanwhile; the next tick goes on with the stored one.
        self._driven = saved or before
        if saved is not None and saved.changes != stored.changes:
            event = saved.events[-1]
            level = logging.WARNING if event.event in ("halted", "rolled_back") else logging.INFO
            why = f": {event.reason}" * bool(event.reason)
            logger.log(level, "rollout %d: %s in step %d%s", saved.rollout_id, event.event, event.step, why)
            await self.look()


def _version(rollout: Rollout | None) -> tuple[int, int] | None:
    """Return what identifies the state of a rollout for the fleet; measurements do not change this version."""
    return (rollout.rollout_id, rollout.changes) if rollout is not None else None
