"""Decides how far a thinking budget shortens thinking, from what is left of it, and gives a request the values of its
stage. All functions are pure.

As a budget is used up, its stage rises from unshortened to soft_close, lower_cap and floor, and it falls again as the
budget is refilled. Pressure uses the same stages. Several entries that match a request all shorten it, so that no rise
of a stage lets it think longer; the strictest one is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import fleet_pb2

from meridian_control.policy.model import AnyShortener, Policy, Who, matches_globs
from meridian_control.policy.shortening_kinds import Kind
from meridian_control.policy.shortening_schema import BudgetPolicy, PressurePolicy, floors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meridian_control.policy.schema import SchedulerPolicy
    from meridian_control.policy.shortening_schema import Shortener

UNSHORTENED = fleet_pb2.BUDGET_STAGE_UNSHORTENED
SOFT_CLOSE, LOWER_CAP = fleet_pb2.BUDGET_STAGE_SOFT_CLOSE, fleet_pb2.BUDGET_STAGE_LOWER_CAP
FLOOR = fleet_pb2.BUDGET_STAGE_FLOOR
# Share of the budget that is left at which each stage begins.
BEGINS = {SOFT_CLOSE: 0.50, LOWER_CAP: 0.25, FLOOR: 0.10}
# A stage ends only once this share more is left than at its beginning, so that stages do not change back and forth.
HYSTERESIS = 0.05


class Shortening(NamedTuple):
    """The entry that shortens a request: its section, budget or pressure, and its name. Beside it the request's stage,
    and the request's policy without the entry."""

    section: str
    name: str
    stage: int
    without: Policy

    @property
    def kind(self) -> Kind:
        return Kind(self.section, self.name)


class ShortenedBy(NamedTuple):
    """The entries that shorten a request: the one that sets its cap, the one that lets soft close begin, and the one
    that puts the entropy rules in force, or the strictest one if none does."""

    cap: Shortening
    soft: Shortening
    rules: Shortening


def stage_of(left_ratio: float, before: int = UNSHORTENED) -> int:
    """Return the stage of a budget of which the share `left_ratio` is left; before: its stage so far."""
    in_force = (
        stage for stage, share in BEGINS.items() if left_ratio <= share + (HYSTERESIS if before >= stage else 0.0)
    )
    return max(in_force, default=UNSHORTENED)


def matching(entries: Iterable[AnyShortener], who: Who) -> tuple[AnyShortener, ...]:
    """Return the budgets, or pressure entries, that match a request."""
    return tuple(entry for entry in entries if matches_globs(entry, who))


def in_stages(budgets: Iterable[BudgetPolicy], stages: Mapping[str, int]) -> list[tuple[Shortener, int]]:
    """Return the budgets that shorten thinking, each with its stage. stages: by the budget's name; a missing budget is
    unshortened."""
    found = ((budget, stages.get(budget.name, UNSHORTENED)) for budget in budgets)
    return [(budget, stage) for budget, stage in found if stage > UNSHORTENED]


def shortened(
    own: Policy, entries: Iterable[tuple[Shortener, int]], *, shadow: bool = False
) -> tuple[Policy, ShortenedBy | None]:
    """Return the policy that holds for a request once its entries have shortened it, and the entries that did.

    own: the request's policy without them. entries: those that match the request, each with its stage. shadow: whether
    to ask the entries in shadow, which shorten nothing, instead of those in force. The result is None if the request's
    own values are as strict.
    """
    found = [(entry, stage) for entry, stage in entries if entry.shadow is shadow]
    if not found:
        return own, None
    scheduler, entropy = own.scheduler, own.entropy
    for one in found:
        scheduler = _shortened(scheduler, *one)
    ruling = [one for one in found if isinstance(one[0], PressurePolicy) and one[0].entropy_in_force]
    if ruling:
        entropy = entropy.model_copy(update={"shadow": False})
    if (scheduler, entropy) == (own.scheduler, own.entropy):
        return own, None
    held = own.model_copy(update={"scheduler": scheduler, "entropy": entropy})
    found.sort(key=_strictness, reverse=True)
    softest = min(found, key=lambda one: _shortened(own.scheduler, *one).soft_think_tokens)
    strictest = max(ruling or found, key=_strictness)
    return held, ShortenedBy(*(_shortening(*one, own) for one in (found[0], softest, strictest)))


def _shortening(entry: Shortener, stage: int, own: Policy) -> Shortening:
    return Shortening("budget" if isinstance(entry, BudgetPolicy) else "pressure", entry.name, stage, own)


def _strictness(found: tuple[Shortener, int]) -> tuple[int, int]:
    entry, stage = found
    return stage, -(entry.soft_think_tokens if stage == SOFT_CLOSE else entry.max_think_tokens)


def _shortened(scheduler: SchedulerPolicy, entry: Shortener, stage: int) -> SchedulerPolicy:
    """Return the scheduler values in a stage; no value falls below the floors of the entry and of the section, nor
    rises, also from stage to stage."""
    floor, soft_floor = (max(own, scheduler.min_think_tokens) for own in floors_of(entry))
    cap, soft = scheduler.max_think_tokens, entry.soft_think_tokens
    if stage >= LOWER_CAP:
        cap = min(cap, max(floor, entry.max_think_tokens if stage == LOWER_CAP else floor))
        soft = min(soft, cap // 2)
    soft = max(soft_floor, soft)
    if scheduler.soft_think_tokens:
        soft = min(scheduler.soft_think_tokens, soft)
    return scheduler.model_copy(update={"soft_think_tokens": soft, "max_think_tokens": cap})
