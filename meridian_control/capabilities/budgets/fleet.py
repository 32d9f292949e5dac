"""Exchanges the usage of thinking budgets with the store, and gives each session the stages of the budgets.

The module owns how often usage is stored. All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.budgets import shown
from meridian_control.capabilities.budgets.charges import TenantUsage
from meridian_control.capabilities.budgets.fleet_budgets import FleetBudgets
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.common.complaints import Complaints
from meridian_control.common.enum_names import stage_name
from meridian_control.common.errors import StoreUnavailable
from meridian_control.common.metric_entry import counter, gauge
from meridian_control.common.slices import at_once
from meridian_control.engine.shortening import UNSHORTENED
from meridian_control.fleet.part import Attention, FleetPart, Shown
from meridian_control.fleet.trace_records import part_record
from meridian_control.fleet.turns import in_turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from meridian_control.capabilities.budgets.store import BudgetStore
    from meridian_control.engine.part import Stream
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.part import Beside, Metric
    from meridian_control.policy.model import Policy

logger = logging.getLogger(__name__)

# Seconds for which a replica waits, at its end, for a database that does not answer.
END_S = 2.0
BUDGET = ("budget",)

ENTRIES = (
    counter(
        "meridian_budget_think_tokens_total",
        BUDGET,
        "Thinking tokens that this replica has counted for the budget; the sum over replicas is that of the fleet.",
        "Compare its rate with the budget's `tokens_per_minute`.",
    ),
    gauge(
        "meridian_budget_left_ratio",
        BUDGET,
        "What is left of the budget's scarcer limit, as a share of what it can save up; below 0 it is exceeded.",
        "Below 0.5: thinking is shortened, unless the budget is in shadow.",
    ),
    gauge(
        "meridian_budget_stage",
        BUDGET,
        "Stage of the budget: 1 unshortened, 2 soft_close, 3 lower_cap, 4 floor.",
        "4 for long: raise the budget, or find the client that uses it up.",
    ),
    gauge(
        "meridian_budget_unsaved_tokens",
        (),
        "Thinking tokens, summed over all budgets, that this replica has counted since it last reached the store.",
        "Grows: see the alert MeridianBudgetsUnsaved.",
    ),
    counter(
        "meridian_tenant_think_tokens_total",
        ("tenant", "model"),
        "Thinking tokens that this replica has counted for the tenant; pairs after the first 1000 under `(other)`.",
        "Bill by it. `(other)` grows: let a gateway name the tenants (`MERIDIAN_TENANT_FROM`).",
    ),
)


class BudgetSharing(FleetPart):
    """The thinking budgets of one replica. `tick` exchanges their usage with the store; a replica that crashes loses
    the usage since its newest exchange."""

    failure = "the usage of thinking budgets is not exchanged"

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.budgets, self.tenants = fleet, FleetBudgets(), TenantUsage()
        self._store: BudgetStore | None = None
        self._exchanging = Complaints(logger, "the usage of thinking budgets is kept in memory: %s")
        self._sharing = asyncio.Lock()

    def attach(self, beside: Beside) -> None:
        # `meridianctl` replays recordings with the capabilities, and needs no database.
        from meridian_control.capabilities.budgets.store import BudgetStore

        self._store = BudgetStore(beside.database, self.fleet.clock)

    # ------------------------------------------------------------------------------------------------------- the store

    async def begin(self) -> None:
        await self.tick()

    async def tick(self) -> None:
        """Store the usage of this replica's engines, read that of all replicas, and set the stages of all sessions.

        While the store is unreachable, the stages follow from what was last read and from this replica's usage.
        """
        async with self._sharing:
            await self._share()

    async def end(self) -> None:
        """Store the usage after the streams have ended, and log what is lost because the store does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.tick()
        for name, tokens in sorted(self.budgets.unsaved.items()):
            logger.warning("thinking budget %s loses %d tokens, which this replica could not store", name, tokens)

    async def _share(self) -> None:
        fleet, budgets = self.fleet, self.budgets
        budgets.set_budgets(policies := self._policies())
        # Clients choose the names of tenants, so sessions must not keep them for long.
        async for session in in_turns(fleet.counted_sessions()):
            charges = session.part(EngineBudgets).charges
            self.tenants.take_charges(charges)
            budgets.collect(charges)
        # Some of the tokens may count for budgets of a policy that has come meanwhile.
        budgets.set_budgets([*self._policies(), *policies])
        if budgets.budgets or budgets.stages or budgets.unsaved_tokens:
            await self._exchange()
            before = budgets.stages
            budgets.find_stages(fleet.clock())
            self._log_changes(before)
        for connection in list(fleet.connections):
            part = connection.session.part(EngineBudgets)
            if part.stages != budgets.stages:
                await connection.take_in(part.set_stages(budgets.stages), fleet.turns)
                connection.note(part_record, fleet.clock(), part.record())
                # The streams go on while the requests of many engines are shortened.
                await asyncio.sleep(0)

    async def _exchange(self) -> None:
        if self._store is None:
            return
        try:
            await self.budgets.share(self._store, self.fleet.clock())
            self._exchanging.over()
        except StoreUnavailable as error:
            self._exchanging.log(error)

    def _log_changes(self, before: Mapping[str, int]) -> None:
        budgets, now = self.budgets, self.fleet.clock()
        for name, budget in budgets.budgets.items():
            if (stage := budgets.stages.get(name, UNSHORTENED)) != before.get(name, UNSHORTENED):
                change = stage_name(stage), 100 * budgets.left_ratio(budget, now), " (shadow)" * budget.shadow
                logger.info("thinking budget %s is in stage %s, %.0f %% left%s", name, *change)

    def _policies(self) -> list[Policy]:
        """Return the policy in force first, then a rollout's candidate, then the earlier policies of sessions."""
        by_id = {id(policy): policy for policy in self.fleet.policies}
        by_id |= {id(s.policy): s.policy for s in self.fleet.counted_sessions() if s.policy is not None}
        return list(by_id.values())

    # ----------------------------------------------------------------------------------------------------- the engines

    def stream(self, stream: Stream) -> EngineBudgets:
        replaced = {
            connection.session.session_id: connection.session.part(EngineBudgets).charges
            for connection in self.fleet.connections.of_process(stream.identity)
        }
        return EngineBudgets(stream, self.budgets.carried(stream.identity, replaced))

    def joined(self, connection: Connection) -> None:
        if self.budgets.stages:
            part = connection.session.part(EngineBudgets)
            at_once(part.set_stages(self.budgets.stages))
            connection.note(part_record, self.fleet.clock(), part.record())

    def left(self, connection: Connection, replaced: bool) -> None:
        session, charges = connection.session, connection.session.part(EngineBudgets).charges
        if not replaced:
            self.budgets.carry(session.identity, session.session_id, charges)
        self.tenants.take_charges(charges)

    def forgot(self, engine_ids: list[str]) -> None:
        self.budgets.forget(engine_ids)

    # ---------------------------------------------------------------------------------------- messages, page, metrics

    def calls(self) -> Mapping[str, Callable[[Any], Awaitable[Any]]]:
        return {"ListBudgets": self.listed}

    async def listed(self, request: fleet_pb2.ListBudgetsRequest) -> fleet_pb2.ListBudgetsResponse:
        """Return the thinking budgets of the policy in force, and those that only the candidate of the active rollout
        has. Every replica knows the usage of all replicas."""
        fleet, response = self.fleet, fleet_pb2.ListBudgetsResponse()
        response.budgets.extend(self.budgets.messages(fleet.policies, fleet.clock()))
        if self.budgets.share_time is not None:
            response.share_time.FromDatetime(self.budgets.share_time)
        return response

    async def before_metrics(self) -> None:
        async for session in in_turns(self.fleet.counted_sessions()):
            self.tenants.take_charges(session.part(EngineBudgets).charges)

    def metrics(self, totals: Totals) -> Iterator[Metric]:
        budgets, now = self.budgets, self.fleet.clock()
        known = budgets.budgets
        yield "meridian_budget_think_tokens_total", [((name,), budgets.counted[name]) for name in known]
        yield "meridian_budget_left_ratio", [((name,), budgets.left_ratio(b, now)) for name, b in known.items()]
        yield "meridian_budget_stage", [((name,), budgets.stages.get(name, UNSHORTENED)) for name in known]
        yield "meridian_budget_unsaved_tokens", [((), budgets.unsaved_tokens)]
        yield "meridian_tenant_think_tokens_total", self.tenants.counted.items()

    async def show(self) -> Shown:
        response = await self.listed(fleet_pb2.ListBudgetsRequest())
        budgets, tenants = list(map(shown.row, response.budgets)), shown.tenant_rows(self.tenants.counted)
        attention = tuple(Attention(level, text, "budgets") for level, text in shown.attention(response.budgets))
        return Shown({}, {"budgets": budgets, "tenants": tenants}, attention=attention)
