"""Exchanges the usage of thinking budgets with the store, and gives each session the stages of the budgets.

The module owns how often usage is stored. All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.common.enum_names import stage_name
from meridian_control.common.errors import StoreUnavailable
from meridian_control.engine.shortening import UNSHORTENED
from meridian_control.fleet.in_turns import in_turns
from meridian_control.fleet.recording import part_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meridian_control.capabilities.budgets.store import BudgetStore
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.policy.model import Policy

logger = logging.getLogger(__name__)

# Seconds between two exchanges with the store. A replica that crashes loses the usage since its newest exchange.
SHARE_S = 1.0


class BudgetSharing:
    def __init__(self, fleet: Fleet, store: BudgetStore) -> None:
        self._fleet, self._store = fleet, store
        self._heard = True
        self._sharing = asyncio.Lock()
        self._newest: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Call `share` every SHARE_S seconds until cancelled.

        A call in progress is never cancelled, because it would then be unknown whether the store has its tokens.
        """
        while True:
            self._newest = asyncio.create_task(self.share())
            await asyncio.shield(self._newest)
            await asyncio.sleep(SHARE_S)

    async def share(self) -> None:
        """Store the usage of this replica's engines, read that of all replicas, and set the stages of all sessions.

        While the store is unreachable, the stages follow from what was last read and from this replica's usage.
        """
        async with self._sharing:
            await self._share()

    def log_unsaved(self) -> None:
        """Log the usage that is not stored, because it is lost when the replica ends."""
        for name, tokens in sorted(self._fleet.budgets.unsaved.items()):
            logger.warning("thinking budget %s loses %d tokens, which this replica could not store", name, tokens)

    async def _share(self) -> None:
        fleet, budgets = self._fleet, self._fleet.budgets
        budgets.set_budgets(self._policies())
        sessions = fleet.counted_sessions()
        # Clients choose the names of tenants, so sessions must not keep them for long.
        async for session in in_turns(sessions):
            charges = session.part(EngineBudgets).charges
            fleet.tenants.take([charges])
            budgets.collect(charges)
        if budgets.budgets or budgets.stages or budgets.unsaved_tokens:
            await self._exchange()
            before = budgets.stages
            budgets.find_stages(fleet.clock())
            self._log_changes(before)
        for connection in list(fleet.connections):
            part = connection.session.part(EngineBudgets)
            if part.stages != budgets.stages:
                await connection.take_in(part.set_stages(budgets.stages), fleet.turns)
                fleet.note(connection.session, part_record(connection.session, fleet.clock(), part.record()))
                # The streams go on while the requests of many engines are shortened.
                await asyncio.sleep(0)

    def _log_changes(self, before: Mapping[str, int]) -> None:
        budgets, now = self._fleet.budgets, self._fleet.clock()
        for name, budget in budgets.budgets.items():
            if (stage := budgets.stages.get(name, UNSHORTENED)) != before.get(name, UNSHORTENED):
                told = stage_name(stage), 100 * budgets.left_ratio(budget, now), " (shadow)" * budget.shadow
                logger.info("thinking budget %s is in stage %s, %.0f %% left%s", name, *told)

    async def _exchange(self) -> None:
        try:
            await self._fleet.budgets.share(self._store, self._fleet.clock())
            self._heard = True
        except StoreUnavailable as error:
            if self._heard:
                logger.warning("the usage of thinking budgets is kept in memory: %s", error)
            self._heard = False

    def _policies(self) -> list[Policy]:
        """Return the policy in force first, then a rollout's candidate, then the earlier policies of sessions."""
        found = {id(policy): policy for policy in self._fleet.policies}
        found |= {id(s.policy): s.policy for s in self._fleet.counted_sessions() if s.policy is not None}
        return list(found.values())
