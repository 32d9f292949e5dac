"""Finds the policy that holds for each live request of one engine: the policy in force with the matching overrides,
shortened by the entries of `Shortener`s in their stages, or unshortened if a `Holdout` holds the request out.

The table's column `group` holds indices into this module's list of policies. The module does not know how a policy
reaches the engine. The code does no I/O and reads no clock; each object belongs to one session.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.shortening import Held, Staged, shortened
from meridian_control.journal.records import Behind
from meridian_control.policy import effects
from meridian_control.policy.model import Policy, Who

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2
    from numpy.typing import NDArray

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.engine.shadow_comparison import Comparison
    from meridian_control.engine.shortening import Holdout, Shortener, Stages
    from meridian_control.journal.records import Shortening
    from meridian_control.policy.shortening_schema import StagedEntry

# Number of policies above which policies that no live request uses are dropped.
ROOM = 64
# Number of kinds of requests whose overridden policies are remembered.
KINDS = 1024

# An explanation of the policy has this source for values that differ because the request is held out.
CONTROL_GROUP = "control_group"

Among: TypeAlias = "NDArray[np.bool_] | None"


class EffectivePolicies:
    """The policies of one engine's requests. `policy` is None and `revision` 0 until a policy is in force.

    shorteners: what shortens single requests, in the order in which it is asked; a part adds itself when the stream
    begins. holdout: what leaves requests unshortened, None if nothing does; a part sets it then, too.
    """

    def __init__(self, table: RequestTable, hello: agent_pb2.Hello, shadow: Comparison) -> None:
        self._table, self._shadow = table, shadow
        # The facts about the engine that overrides match on.
        self._engine = Who(engine_labels=dict(hello.labels), fingerprint=hello.model_fingerprint)
        self.shorteners: list[Shortener] = []
        # The shorteners for which the policy in force has an entry.
        self._active: list[Shortener] = []
        self.holdout: Holdout | None = None
        self.policy: Policy | None = None
        self.revision = 0
        self._held: list[Held] = []
        self._room = ROOM
        # The policy in force with the matching overrides, by the facts of a request that they match on: with many
        # overrides it takes long to find.
        self._overridden: dict[tuple[str, str, str, str], Policy] = {}
        # The object behind the newest decision of this revision that depends on no entry.
        self._newest_behind: Behind | None = None

    # ------------------------------------------------------------------------------------------------------ assigning

    def apply(self, revision: int, policy: Policy) -> Sliced[None]:
        """Put a policy in force and find the policy of each live request under it."""
        self.policy, self.revision = policy, revision
        self._held, self._overridden = [Held(policy, None, policy, policy, policy)], {}
        self._newest_behind = None
        self._active = [shortener for shortener in self.shorteners if shortener.entries]
        self._table.set_window(policy.entropy.rpdi_window_tokens)
        self._table.put(slice(None), group=0)
        for count, (slot, opened) in enumerate(self._table.requests(), 1):
            self.assign(slot, opened, again=True)
            if not count % SLICE_ROWS:
                yield

    def assign(self, slot: int, opened: OpenedRequest, *, again: bool = False) -> None:
        """Find the policy that holds for a request, which the table has already opened. again: whether the request was
        there under the previous policy."""
        if self.policy is None:
            return
        own = self.policy
        entries: list[StagedEntry] = []
        if own.override or self._active:
            who = self.who(opened)
            entries = [entry for shortener in self._active for entry in shortener.assign(slot, opened, who, again)]
            own = self._overridden_for(own, who)
        is_held_out = self.holdout is not None and self.holdout.assign(slot, opened, own, entries, again)
        if own is not self.policy or is_held_out or self._active:
            self._shorten([slot], own, self._stages_of(slot))

    def _overridden_for(self, policy: Policy, who: Who) -> Policy:
        """Return the policy in force with the overrides that match a request."""
        kind = who.model, who.tenant, who.slo_class, who.effort
        if (own := self._overridden.get(kind)) is None:
            if len(self._overridden) >= KINDS:
                # Clients choose some of these facts.
                self._overridden = {}
            own = self._overridden[kind] = policy.of(who)
        return own

    def _stages_of(self, slot: int) -> tuple[Stages, ...]:
        """Return, for each active shortener, the entries that put the request in a slot into a stage."""
        return tuple([shortener.stages_of(slot) for shortener in self._active])

    def shorten_again(self, slots: list[int]) -> Sliced[None]:
        """Find the policy of live requests whose entries have changed their stages."""
        # Requests with the same policy and the same entries go on having the same policy.
        alike: dict[tuple[int, bool, tuple[Stages, ...]], list[int]] = {}
        for count, slot in enumerate(slots, 1):
            group = int(self._table.group[slot]), bool(self._table.control[slot])
            alike.setdefault((*group, self._stages_of(slot)), []).append(slot)
            if not count % (4 * SLICE_ROWS):
                yield
        chosen = [(self._held[group], stages, same) for (group, _, stages), same in alike.items()]
        done = 0
        for before, stages, same_slots in chosen:
            for begin in range(0, len(same_slots), SLICE_ROWS):
                self._shorten(part := same_slots[begin : begin + SLICE_ROWS], before.own, stages, before)
                if (done := done + len(part)) >= SLICE_ROWS:
                    done = 0
                    yield

    def _shorten(self, slots: list[int], own: Policy, stages: tuple[Stages, ...], before: Held | None = None) -> None:
        """Find the policy of requests that have the same policy without entries, and the same entries in the same
        stages. All are held out, or none is. before: the policy before a change of stage, None for a request that is
        assigned."""
        by_shortener = [
            [Staged(shortener.section, shortener.entries[index], stage) for index, stage in mine]
            for shortener, mine in zip(self._active, stages, strict=True)
        ]
        staged = list(chain.from_iterable(by_shortener))
        policy, by = shortened(own, staged)
        if bool(self._table.control[slots[0]]) and self.holdout is not None:
            capping = own.model_copy(update={"scheduler": self.holdout.unshortened_cap(own.scheduler)})
            group = self._index_of(Held(self.holdout.unshortened(policy), by, own, policy, capping))
            self.holdout.exposed(slots, self._held[group], staged, before)
        else:
            group = 0 if policy is self.policy else self._index_of(Held(policy, by, own, policy, own))
        self._table.put(slots, group=group)
        for shortener, mine in zip(self._active, by_shortener, strict=True):
            would: Policy | None = None
            has_shadow = own.scheduler.enabled and any(entry.shadow for entry in shortener.entries)
            for slot in slots:
                cap = None
                if has_shadow and shortener.has_shadow(slot):
                    would = would or shortened(own, mine, shadow=True)[0]
                    cap = self._cap_under(would, slot, own)
                self._shadow.shortened(shortener.section, slot, int(self._table.think_tokens[slot]), cap)

    def _cap_under(self, would: Policy, slot: int, own: Policy) -> int | None:
        """Return the cap that a policy shortened by entries in shadow would give a request."""
        opened = self._table.info[slot]
        if opened is None:
            return None
        return effects.cap(would.scheduler, opened, bool(self._table.extended[slot]), own.scheduler)

    def _index_of(self, held: Held) -> int:
        """Return the index of a policy, which is added to the list if it is new."""
        for index, known in enumerate(self._held):
            # Most policies of the list differ in their entries, and to compare whole policies takes long.
            if known.by == held.by and known == held:
                return index
        if len(self._held) >= self._room:
            self._forget_unused()
        self._held.append(held)
        return len(self._held) - 1

    def _forget_unused(self) -> None:
        """Drop policies that no live request uses. Clients choose which overrides match, so the list could grow."""
        table = self._table
        used = sorted({0, *table.group[table.live].tolist()})
        table.put(slice(None), group=np.where(table.live, np.searchsorted(used, table.group), 0))
        self._held = [self._held[index] for index in used]
        self._room = max(ROOM, 2 * len(used))

    def who(self, opened: OpenedRequest) -> Who:
        """Return the facts about a request that overrides match on."""
        return self._engine.of(opened)

    # -------------------------------------------------------------------------------------------------------- reading

    def knows_effort(self, opened: OpenedRequest) -> bool:
        """Whether the policy knows a request's effort; True if no policy is in force."""
        return self.policy is None or self.policy.knows_effort(self.who(opened))

    def held(self, slot: int) -> Held:
        """Return the policy that holds for the request in a slot, with what led to it; a policy must be in force."""
        held = self._held
        return held[0] if len(held) == 1 else held[int(self._table.group[slot])]

    def of(self, slot: int) -> Policy:
        """Return the policy that holds for the request in a slot; a policy must be in force."""
        return self.held(slot).policy

    def compared(self, slot: int) -> Policy:
        """Return the policy whose sections in shadow are compared with the real end of a request's thinking. Soft close
        and caps of held-out requests are not, because only their section is in shadow, and only there."""
        held = self.held(slot)
        if not held.is_held_out:
            return held.policy
        return held.policy.model_copy(update={"scheduler": held.treated.scheduler})

    def compared_rules(self, policy: Policy) -> object:
        """Return the parts of a policy that decide what is compared in shadow; equal parts compare equal."""
        # A capability of one's own has its entries in an extension.
        entries = [getattr(policy, shortener.section, None) for shortener in self.shorteners]
        return policy.scheduler, policy.entropy, policy.loop, policy.override, policy.extension, *entries

    def ema_alpha(self, slots: NDArray[np.int64]) -> NDArray[np.float64] | float:
        """Return the weight of a new EAT sample for each of these slots, or one for all."""
        alphas = [held.policy.entropy.ema_alpha for held in self._held]
        return alphas[0] if len(alphas) == 1 else np.array(alphas).take(self._table.group[slots])

    def shortening(self, slot: int) -> Shortening | None:
        """Return the entry that sets the cap of the request in a slot, None if none does."""
        by = self.held(slot).by
        return by.cap if by is not None else None

    def changed(self, slot: int) -> dict[str, tuple[object, str]]:
        """Return the values that hold for the request in a slot in place of those of its policy with the overrides, by
        dotted path, each with what changes it: the control group, or an entry."""
        held, opened = self.held(slot), self._table.info[slot]
        own, policy, by = held.own, held.policy, held.by
        cap, soft, shadow = "scheduler.max_think_tokens", "scheduler.soft_think_tokens", "entropy.shadow"
        if held.is_held_out:
            values = {cap: held.capping.scheduler.max_think_tokens, soft: 0, shadow: True, "loop.shadow": True}
            entries = ((shortener.section, len(shortener.entries)) for shortener in self._active)
            values |= {f"{section}[{index}].shadow": True for section, count in entries for index in range(count)}
            return {path: (value, CONTROL_GROUP) for path, value in values.items()}
        if by is None or opened is None:
            return {}
        # The request's own floor lifts the cap that an entry lowers.
        limit = min(own.scheduler.max_think_tokens, max(policy.scheduler.max_think_tokens, opened.min_think_tokens))
        changes = (
            (cap, limit, by.cap),
            (soft, policy.scheduler.soft_think_tokens, by.soft),
            (shadow, policy.entropy.shadow, by.rules),
        )
        return {path: (value, f"{entry.section} {entry.name}") for path, value, entry in changes}

    def behind(self, slot: int, reason: str) -> Behind:
        """Return the policy that holds for the request in a slot, and the entry that has changed what a decision with
        this reason depends on."""
        held = self.held(slot)
        policy, entries, is_default = held.policy, held.by, False
        is_spared = held.is_held_out and _is_in_force(held.treated, reason)
        if reason == "hard_cap":
            policy, entries = held.capping, None
            is_default = policy.scheduler.max_think_tokens > held.own.scheduler.max_think_tokens
        if entries is None:
            # Most decisions share one object, because most requests have the same policy.
            behind = self._newest_behind
            if behind is None or behind.policy is not policy or behind.is_spared != is_spared:
                behind = Behind(self.revision, policy, None, None, self._engine, is_spared, is_default)
                self._newest_behind = behind
            return behind
        by = entries.soft if reason == "soft_close" else entries.rules if reason in ENTROPY_REASONS else entries.cap
        (detail,) = (shortener.detail(by) for shortener in self._active if shortener.section == by.section)
        return Behind(self.revision, policy, by, detail, self._engine, is_spared)

    def in_use(self) -> list[tuple[Policy, Among]]:
        """Return each policy in use with a mask of the requests for which it holds, [slots]; None stands for all."""
        if len(self._held) == 1:
            return [(self._held[0].policy, None)]
        live, group = self._table.live, self._table.group
        used = np.bincount(group, weights=live).nonzero()[0].tolist()
        return [(self._held[index].policy, live & (group == index)) for index in used]


def _is_in_force(policy: Policy, reason: str) -> bool:
    """Return whether a rule of the policy ends thinking; False for what is no rule."""
    if reason in (*ENTROPY_REASONS, "soft_close", "loop"):
        return not effects.in_shadow(policy, reason)
    return reason in policy.extensions_on(shadow=False)
