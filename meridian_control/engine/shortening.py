"""What shortens the thinking of single requests in stages (`Shortener`), and what leaves requests unshortened
(`Holdout`); and the policy that holds for a request once its entries have shortened it.

A capability implements a Protocol and adds its part to `EffectivePolicies`. Several entries that match a request all
shorten it, so that no rise of a stage lets it think longer; of each limit the strictest one is named. The functions
are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from meridian.v1 import fleet_pb2

from meridian_control.journal.records import Shortening
from meridian_control.policy.model import AnyStagedEntry, Policy, Who, matches_globs
from meridian_control.policy.shortening_schema import floors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.journal.records import Detail
    from meridian_control.policy.schema import SchedulerPolicy
    from meridian_control.policy.shortening_schema import StagedEntry

UNSHORTENED = fleet_pb2.BUDGET_STAGE_UNSHORTENED
SOFT_CLOSE, LOWER_CAP = fleet_pb2.BUDGET_STAGE_SOFT_CLOSE, fleet_pb2.BUDGET_STAGE_LOWER_CAP
FLOOR = fleet_pb2.BUDGET_STAGE_FLOOR

# Entries of a section that put a request into a stage above unshortened: the index of each in the section, and the
# stage. Requests are compared by these numbers, because entries would take long to hash.
Stages: TypeAlias = tuple[tuple[int, int], ...]


class Staged(NamedTuple):
    """An entry of a section of the policy, with the stage, above unshortened, in which it puts a request."""

    section: str
    entry: StagedEntry
    stage: int


class Limits(NamedTuple):
    """The values of the scheduler section that an entry lowers."""

    soft_think_tokens: int
    max_think_tokens: int


class ShortenedBy(NamedTuple):
    """The entries that shorten a request: the one that sets its cap, the one that lets soft close begin, and the one
    that puts the entropy rules in force, or the one that sets its cap if none does."""

    cap: Shortening
    soft: Shortening
    rules: Shortening


class Held(NamedTuple):
    """A policy that holds for requests.

    by: the entries that shorten it, None if none does. own: the policy without these entries. treated: for held-out
    requests the policy that would hold for them otherwise, for others the policy itself. capping: the policy whose cap
    holds if no entry lowers it, `own` unless the requests are held out.
    """

    policy: Policy
    by: ShortenedBy | None
    own: Policy
    treated: Policy
    capping: Policy

    @property
    def is_held_out(self) -> bool:
        return self.treated is not self.policy


class Shortener(Protocol):
    """A section of the policy whose entries shorten the requests that they match, on one engine.

    section: the section's name. entries: those of the policy in force. When it puts a live request into another stage,
    it calls `Stream.shorten_again`. All methods are called by `EffectivePolicies`.
    """

    section: str

    @property
    def entries(self) -> Sequence[StagedEntry]: ...

    def assign(self, slot: int, opened: OpenedRequest, who: Who, again: bool) -> Sequence[StagedEntry]:
        """Find the entries that match a request, keep them, and return them. again: whether the request was in the slot
        under the previous policy, too."""
        ...

    def stages_of(self, slot: int) -> Stages:
        """Return the entries that put the request in a slot into a stage, those in shadow included, in their order."""
        ...

    def has_shadow(self, slot: int) -> bool:
        """Return whether an entry in shadow matches the request in a slot."""
        ...

    def detail(self, by: Shortening) -> Detail:
        """Return what the decision log shows of an entry of this section that stands behind a decision."""
        ...


class Holdout(Protocol):
    """Leaves some of an engine's requests unshortened, so that the others can be compared with them.

    `EffectivePolicies` calls `assign`, `exposed` and the two functions of policies, `Stream` calls `would_end`, and the
    ledger `carried_out`. A held-out request has its mark in the table's column `control`.
    """

    def assign(
        self, slot: int, opened: OpenedRequest, own: Policy, entries: Sequence[StagedEntry], again: bool
    ) -> bool:
        """Decide whether a request is held out, and return it. own: the policy that would hold for it, without entries.
        entries: the entries that match it. again: whether the request was in the slot under the
        previous policy, too."""
        ...

    def unshortened(self, policy: Policy) -> Policy:
        """Return the policy that holds for a held-out request. policy: the one that would hold otherwise."""
        ...

    def unshortened_cap(self, scheduler: SchedulerPolicy) -> SchedulerPolicy:
        """Return the section with the cap that really holds for a held-out request."""
        ...

    def exposed(self, slots: Sequence[int], held: Held, staged: Sequence[Staged], before: Held | None) -> None:
        """Note what would shorten held-out requests from now on. before: what held for them before a change of stage,
        None for requests that are assigned."""
        ...

    def would_end(self, slot: int, reason: str, think_tokens: int, *, reported: bool) -> None:
        """Note that a rule has fired for a held-out request. reported: whether a report has just led to it."""
        ...

    def carried_out(self, slot: int, reason: str, think_tokens: int) -> None:
        """Note where the engine would have carried out a rule's end for a held-out request."""
        ...


def matching(entries: Iterable[AnyStagedEntry], who: Who) -> tuple[AnyStagedEntry, ...]:
    """Return the entries that match a request."""
    return tuple(entry for entry in entries if matches_globs(entry, who))


def shortened(own: Policy, staged: Iterable[Staged], *, shadow: bool = False) -> tuple[Policy, ShortenedBy | None]:
    """Return the policy that holds for a request once its entries have shortened it, and the entries that did.

    own: the request's policy without them. staged: those that match the request. shadow: whether to ask the entries in
    shadow, which shorten nothing, instead of those in force. The result is None if the request's own values are as
    strict.
    """
    chosen = [staged_entry for staged_entry in staged if staged_entry.entry.shadow is shadow]
    if not chosen:
        return own, None
    scheduler, entropy = own.scheduler, own.entropy
    own_limits = Limits(scheduler.soft_think_tokens, scheduler.max_think_tokens)
    # Of entries that are equally strict, the one in the highest stage is named.
    chosen.sort(key=lambda staged_entry: staged_entry.stage, reverse=True)
    alone = [(_shortened(own_limits, scheduler.min_think_tokens, entry), entry) for entry in chosen]
    softest = min(alone, key=lambda one: one[0].soft_think_tokens)
    lowest = min(alone, key=lambda one: one[0].max_think_tokens)
    limits = Limits(softest[0].soft_think_tokens, lowest[0].max_think_tokens)
    ruling = [staged_entry for staged_entry in chosen if getattr(staged_entry.entry, "entropy_in_force", False)]
    puts_in_force = bool(ruling) and entropy.shadow
    if limits == own_limits and not puts_in_force:
        return own, None
    if puts_in_force:
        entropy = entropy.model_copy(update={"shadow": False})
    scheduler = scheduler.model_copy(update=limits._asdict())
    held = own.model_copy(update={"scheduler": scheduler, "entropy": entropy})
    return held, ShortenedBy(
        *(
            Shortening(staged_entry.section, staged_entry.entry.name, staged_entry.stage, own)
            for staged_entry in (lowest[1], softest[1], ruling[0] if ruling else lowest[1])
        )
    )


def _shortened(limits: Limits, least: int, staged: Staged) -> Limits:
    """Return the limits in a stage. No limit falls below the floor of the entry nor below `least`, the floor of the
    section; and none rises, also from stage to stage."""
    entry, stage = staged.entry, staged.stage
    floor, soft_floor = (max(own, least) for own in floors_of(entry))
    cap, soft = limits.max_think_tokens, entry.soft_think_tokens
    if stage >= LOWER_CAP:
        cap = min(cap, max(floor, entry.max_think_tokens if stage == LOWER_CAP else floor))
        soft = min(soft, cap // 2)
    soft = max(soft_floor, soft)
    if limits.soft_think_tokens:
        soft = min(limits.soft_think_tokens, soft)
    return Limits(soft, cap)
