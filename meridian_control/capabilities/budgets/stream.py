"""Shortens the requests of one engine by the stages of the thinking budgets that they match, and lets `Charges` count
their thinking tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.budgets.charges import NOTHING_CARRIED, Carried, Charges
from meridian_control.capabilities.budgets.shown import BudgetDetail
from meridian_control.common.slices import SLICE_ROWS, at_once
from meridian_control.engine.part import Part
from meridian_control.engine.shortening import UNSHORTENED, matching

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from meridian.v1 import agent_pb2

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import Stream
    from meridian_control.engine.shortening import Stages
    from meridian_control.journal.records import Shortening
    from meridian_control.policy.model import Policy, Who
    from meridian_control.policy.shortening_schema import BudgetPolicy


class EngineBudgets(Part):
    """The thinking budgets of one engine's requests.

    `charges` counts the requests' thinking tokens. `stages` has the stages of budgets by the budget's name; a missing
    budget is unshortened. carried: the tokens that an earlier session of the engine has counted.
    """

    section = "budget"

    def __init__(self, stream: Stream, carried: Carried = NOTHING_CARRIED) -> None:
        self._stream, self._table = stream, stream.table
        stream.policies.shorteners.append(self)
        self.charges = Charges(stream.table, carried)
        self.entries: tuple[BudgetPolicy, ...] = ()
        # Index of each entry by its name.
        self._index: dict[str, int] = {}
        self.stages: Mapping[str, int] = {}

    # ------------------------------------------------------------------------------------------------- counted tokens

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        self.charges.begin_policy(has_budgets=bool(policy.budget))
        self.entries, self._index = policy.budget, {budget.name: index for index, budget in enumerate(policy.budget)}

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> Sliced[None]:
        self.charges.begin_snapshot(snapshot.reported_session_id)
        for count, ended in enumerate(snapshot.ended, 1):
            self.charges.add_ended(ended)
            if not count % SLICE_ROWS:
                yield

    def opened(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.charges.open(slot)

    def snapshot_ends(self, now: datetime) -> None:
        self.charges.end_snapshot()

    def closed(self, rows: Sequence[agent_pb2.RequestClosed], governed: bool) -> None:
        for closed in rows:
            self.charges.settle(closed.slot)

    # --------------------------------------------------------------------------------------------------------- stages

    def set_stages(self, stages: Mapping[str, int]) -> Sliced[None]:
        """Set the stages of budgets; the next report's decisions read them."""
        changed = {name for name in stages.keys() | self.stages.keys() if stages.get(name) != self.stages.get(name)}
        self.stages = stages
        slots = [slot for slot in self._table.slots().tolist() if not changed.isdisjoint(self.charges.names(slot))]
        if slots:
            yield from self._stream.shorten_again(slots)

    def assign(self, slot: int, opened: OpenedRequest, who: Who, again: bool) -> tuple[BudgetPolicy, ...]:
        budgets = matching(self.entries, who)
        # The engine that continues a request generates the request's first token once more.
        self.charges.assign(slot, tuple([budget.name for budget in budgets]), counts=not opened.remote_decode)
        return budgets

    def stages_of(self, slot: int) -> Stages:
        in_stages = ((self._index[name], self.stages.get(name, UNSHORTENED)) for name in self.charges.names(slot))
        return tuple([(index, stage) for index, stage in in_stages if stage > UNSHORTENED])

    def has_shadow(self, slot: int) -> bool:
        return any(self.entries[self._index[name]].shadow for name in self.charges.names(slot))

    def detail(self, by: Shortening) -> BudgetDetail:
        return BudgetDetail(by.name, by.stage)

    # ----------------------------------------------------------------------------------------------------- recordings

    def records(self) -> Iterable[fleet_pb2.TraceRecord]:
        return [self.record()] if self.stages else []

    def record(self) -> fleet_pb2.TraceRecord:
        """Return a record of the stages."""
        record = fleet_pb2.TraceRecord()
        for name, stage in self.stages.items():
            record.budget_stages.stages[name] = stage  # type: ignore[assignment]
        record.budget_stages.SetInParent()
        return record

    def recorded(self, record: fleet_pb2.TraceRecord) -> None:
        if record.HasField("budget_stages"):
            at_once(self.set_stages(dict(record.budget_stages.stages)))
