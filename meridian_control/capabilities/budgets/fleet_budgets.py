"""The thinking budgets as one replica knows them: their usage over all replicas, and their stages.

The module owns the tokens that the replica has counted but not stored yet. A crash of the replica loses these tokens,
so they are stored every second. Times are passed in. All code runs on the control plane's event loop.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.budgets.charges import NOTHING_CARRIED
from meridian_control.capabilities.budgets.token_bucket import Account, Usage, charged, full, left, left_ratio
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED, matching
from meridian_control.policy import formats as forms
from meridian_control.policy import model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from meridian.v1 import policy_pb2

    from meridian_control.capabilities.budgets.charges import Carried, Charges
    from meridian_control.capabilities.budgets.store import BudgetStore
    from meridian_control.policy.shortening_schema import BudgetPolicy


# Bound for the bytes of what is kept of engines whose stream has ended, and about the bytes of a request beside its id.
# An engine of which nothing is kept says in its snapshot itself what was counted.
CARRIED_BYTES, ENTRY_BYTES = 16 << 20, 256
# Share of the budget that is left at which each stage begins.
BEGINS = {SOFT_CLOSE: 0.50, LOWER_CAP: 0.25, FLOOR: 0.10}
# A stage ends only once this share more is left than at its beginning, so that stages do not change back and forth.
HYSTERESIS = 0.05


class FleetBudgets:
    """`budgets` has the budgets by name, `stages` the stages of those that shorten thinking, `counted` the thinking
    tokens on this replica's engines since it started. `share_time` is the time of the newest exchange with the store,
    None before the first."""

    def __init__(self) -> None:
        self.budgets: dict[str, BudgetPolicy] = {}
        self.stages: dict[str, int] = {}
        self.counted: Counter[str] = Counter()
        self.share_time: datetime | None = None
        # The accounts as they were last read, and moved on since by this replica's usage; both by this replica's clock.
        self._seen: dict[str, Account] = {}
        self._alone: dict[str, Account] = {}
        # Tokens that are not stored yet, and those of them that `_alone` has not got yet.
        self._unsaved: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        # By engine id, the incarnation and the counted tokens of its live requests when its stream ended, and about the
        # bytes of all that; oldest first.
        self._carried: dict[str, tuple[str, Carried, int]] = {}

    def add_tokens(self, tokens: Mapping[str, int]) -> None:
        """Add thinking tokens of this replica's engines, by the budget's name."""
        self.counted.update(tokens)
        self._unsaved.update(tokens)
        self._new.update(tokens)

    def collect(self, charges: Charges) -> None:
        """Add what a session has counted since the last call."""
        self.add_tokens(charges.take_tokens())
        for user, tokens in charges.take_unmatched().items():
            budgets = matching(self.budgets.values(), model.Who(*user))
            self.add_tokens(dict.fromkeys((budget.name for budget in budgets), tokens))

    def carry(self, engine: tuple[str, str], session_id: str, charges: Charges) -> None:
        """Keep what a session that ends has counted, for the next one of the engine. engine: id and incarnation."""
        carried = charges.hand_on(session_id)
        self.collect(charges)
        self.forget([engine[0]])
        carried_bytes = sum(len(name) for name, _ in carried.tokens) + ENTRY_BYTES * len(carried.tokens)
        self._carried[engine[0]] = engine[1], carried, carried_bytes
        while sum(held_bytes for _, _, held_bytes in self._carried.values()) > CARRIED_BYTES:
            self.forget([next(iter(self._carried))])

    def carried(self, engine: tuple[str, str], replaced: Mapping[str, Charges]) -> Carried:
        """Return what the engine's previous session on this replica has counted; nothing if it is not known.

        replaced: the charges of sessions whose end was not noticed yet, by session id.
        """
        for session_id, charges in replaced.items():
            self.carry(engine, session_id, charges)
        incarnation, carried, _ = self._carried.get(engine[0], ("", NOTHING_CARRIED, 0))
        self.forget([engine[0]])
        return carried if incarnation == engine[1] else NOTHING_CARRIED

    def forget(self, engine_ids: Iterable[str]) -> None:
        """Drop what is kept of engines that did not come back."""
        for engine_id in engine_ids:
            self._carried.pop(engine_id, None)

    def set_budgets(self, policies: Iterable[model.Policy]) -> None:
        """Set the budgets of several policies; the first policy that has a budget sets its values."""
        by_name: dict[str, BudgetPolicy] = {}
        for policy in policies:
            by_name = {budget.name: budget for budget in policy.budget} | by_name
        self.budgets = by_name

    async def share(self, store: BudgetStore, now: datetime) -> None:
        """Add this replica's tokens to the store, and read the usage of all replicas. Raises StoreUnavailable; then the
        tokens are kept for the next time, and the replica goes on alone."""
        for name, budget in self.budgets.items():
            self._alone[name] = self._account(budget, now)
            self._seen.setdefault(name, full(now))
        self._new.clear()
        # Tokens of budgets that no policy has any more are dropped. A budget that comes meanwhile is not among these.
        ended = self._unsaved.keys() - self.budgets.keys()
        sent = {n: Usage(self._unsaved[n], self._seen[n], self._alone[n]) for n in self.budgets if self._unsaved[n]}
        stored = await store.charge(sent, self.budgets)
        # The store's clock may differ from this replica's.
        read = {name: account._replace(updated_at=now) for name, account in stored.items()}
        self._seen = {name: read.get(name, full(now)) for name in self.budgets}
        self._alone = dict(self._seen)
        self.share_time = now
        self._unsaved.subtract({name: usage.tokens for name, usage in sent.items()})
        self._unsaved = Counter({name: tokens for name, tokens in self._unsaved.items() if name not in ended})

    def find_stages(self, now: datetime) -> None:
        """Find the stage of each budget, also from tokens that are not stored yet."""
        stages = {
            name: stage_of(self.left_ratio(budget, now), self.stages.get(name, UNSHORTENED))
            for name, budget in self.budgets.items()
        }
        self.stages = {name: stage for name, stage in stages.items() if stage > UNSHORTENED}

    def left_ratio(self, budget: BudgetPolicy, now: datetime) -> float:
        """Return what is left of a budget, as a share of what it can save up, negative if thinking has exceeded it."""
        return left_ratio(self._account(budget, now), budget, now)

    @property
    def unsaved_tokens(self) -> int:
        """Thinking tokens that a crash of this replica would lose, summed over all budgets."""
        return self._unsaved.total()

    @property
    def unsaved(self) -> dict[str, int]:
        """The thinking tokens that a crash of this replica would lose, by the budget's name."""
        return {name: tokens for name, tokens in self._unsaved.items() if tokens}

    def messages(self, policies: Iterable[model.Policy], now: datetime) -> list[fleet_pb2.Budget]:
        """Return the budgets of several policies in their order, each as the first policy that has it sets it."""
        by_name: dict[str, fleet_pb2.Budget] = {}
        for policy in policies:
            entries = forms.to_proto(model.Policy(budget=policy.budget)).budget
            for budget, entry in zip(policy.budget, entries, strict=True):
                by_name.setdefault(budget.name, self._message(budget, entry, now))
        return list(by_name.values())

    def _message(self, budget: BudgetPolicy, entry: policy_pb2.BudgetPolicy, now: datetime) -> fleet_pb2.Budget:
        account = self._account(budget, now)
        minute, day = left(account, budget, now)
        return fleet_pb2.Budget(
            policy=entry,
            stage=self.stages.get(budget.name, UNSHORTENED),  # type: ignore[arg-type]
            used_tokens=account.used_tokens,
            minute_left_tokens=minute,
            day_left_tokens=day,
            left_ratio=self.left_ratio(budget, now),
            unsaved_tokens=self._unsaved[budget.name],
        )

    def _account(self, budget: BudgetPolicy, now: datetime) -> Account:
        return charged(self._alone.get(budget.name), self._new[budget.name], budget, now)


def stage_of(share: float, before: int = UNSHORTENED) -> int:
    """Return the stage of a budget of which the share `share` is left; before: its stage so far."""
    in_force = (stage for stage, begin in BEGINS.items() if share <= begin + (HYSTERESIS if before >= stage else 0.0))
    return max(in_force, default=UNSHORTENED)
