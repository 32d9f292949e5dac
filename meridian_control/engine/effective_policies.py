"""Finds the policy that holds for each live request of one engine: the policy in force with the matching overrides,
shortened by the request's budgets and pressure entries, or unshortened for the control group.

The table's column `group` holds indices into this module's list of policies. The module does not know how a policy
reaches the engine. The code does no I/O and reads no clock; each object belongs to one session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.budgets.stages import ShortenedBy, Shortening, in_stages, matching, shortened
from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.common.masks import any_in
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.control_requests import ControlRequests
from meridian_control.journal.records import Behind
from meridian_control.policy import effects
from meridian_control.policy.drift_schema import SIGNALS
from meridian_control.policy.model import Policy, Who
from meridian_control.policy.shortening_kinds import (
    CAP,
    DEFAULT_CAP,
    ENTROPY,
    LOOP,
    SOFT_CLOSE,
    Kind,
    acts_on_thinking,
    kinds_for_request,
    may_shorten,
)
from meridian_control.policy.shortening_schema import BudgetPolicy
from meridian_control.table.control_group import (
    compared_signals,
    held_out,
    sampled_from,
    unshortened,
    unshortened_cap,
)
from meridian_control.table.moments import sentence_ends
from meridian_control.table.table_columns import FORCED_END, NO_CAP
from meridian_control.table.token_rows import differs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from meridian_control.budgets.charges import Charges
    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.experiments import Experiment, Experiments
    from meridian_control.engine.shadow_comparison import Comparison
    from meridian_control.journal.journal import Journal
    from meridian_control.policy.shortening_schema import PressurePolicy, Shortener
    from meridian_control.pressure.engine_pressure import EnginePressure
    from meridian_control.table.request_table import RequestTable

# Bit of each signal in the table's column `awaited_signals`; and of each signal that is read at sentence ends, the
# column with its values at the newest ones.
BITS = {signal: 1 << number for number, signal in enumerate(SIGNALS)}
AT_SENTENCE_ENDS = {"rank": "boundary_ranks", "margin": "boundary_margins", "rpdi": "boundary_rpdi"}
BITS_AT_SENTENCE_ENDS = sum(BITS[signal] for signal in AT_SENTENCE_ENDS)
# Number of policies above which policies that no live request uses are dropped.
ROOM = 64
# Reasons of decisions about a cap or near it.
CAP_REASONS = ("hard_cap", "empty_answer")

Among: TypeAlias = "NDArray[np.bool_] | None"


class Held(NamedTuple):
    """A policy that holds for requests.

    by: the entries that shorten it, None if none does. own: the policy without these entries. treated: for the control
    group the policy that would hold for the requests if they were treated, otherwise the policy itself.
    """

    policy: Policy
    by: ShortenedBy | None
    own: Policy
    treated: Policy

    @property
    def is_control(self) -> bool:
        return self.treated is not self.policy

    def kind_of_cap(self, opened: OpenedRequest, extended: bool) -> tuple[int, Kind | None]:
        """Return the cap of a treated request, and the kind of shortening that sets it; None if it is the client's own
        cap, or one of the policy that is no lower than the default."""
        scheduler, own = self.treated.scheduler, self.own.scheduler
        cap = effects.cap(scheduler, opened, extended, own if self.by is not None else None)
        if self.by is not None and cap < effects.cap(own, opened, extended):
            return cap, self.by.cap.kind
        if own.max_think_tokens >= DEFAULT_CAP or (
            opened.max_think_tokens is not None and cap == opened.max_think_tokens
        ):
            return cap, None
        return cap, CAP

    def kind_of_rule(self, reason: str) -> Kind | None:
        """Return the kind of shortening to which a rule belongs that is in force for treated requests; None if the rule
        is in shadow for them, or is not part of the policy."""
        policy, by = self.treated, self.by
        if reason in ENTROPY_REASONS:
            shadow = policy.entropy.shadow or (reason == "give_up" and policy.entropy.give_up_shadow)
            return None if shadow else ENTROPY
        if reason == "soft_close" and not policy.scheduler.shadow:
            own = self.own.scheduler.soft_think_tokens
            by_entry = by is not None and (not own or policy.scheduler.soft_think_tokens < own)
            return by.soft.kind if by is not None and by_entry else SOFT_CLOSE
        if reason == "loop" and not policy.loop.shadow:
            return LOOP
        return None


class EffectivePolicies:
    """The policies of one engine's requests. `policy` is None and `revision` 0 until a policy is in force.

    control: the live requests of the control group. ended_by: by slot, the kind of shortening that ended the thinking
    of a treated request first.
    """

    def __init__(
        self,
        table: RequestTable,
        hello: agent_pb2.Hello,
        experiments: Experiments,
        charges: Charges,
        journal: Journal | None,
        *,
        shadow: Comparison,
        pressure: EnginePressure,
    ) -> None:
        self._shadow, self._pressure = shadow, pressure
        self._table, self._labels, self._charges = table, dict(hello.labels), charges
        self._experiments, self._journal = experiments, journal
        self._experiment: Experiment | None = None
        self.policy: Policy | None = None
        self.revision = 0
        self._held: list[Held] = []
        self._room = ROOM
        self.control = ControlRequests(table)
        self.ended_by: dict[int, Kind] = {}
        # The object behind the newest decision of this revision that depends on no entry.
        self._newest_behind: Behind | None = None
        # The stages of budgets by the budget's name; a missing budget is unshortened.
        self.stages: Mapping[str, int] = {}

    def apply(self, revision: int, policy: Policy, now_ms: float) -> Sliced[None]:
        """Put a policy in force and find the policy of each live request under it. now_ms: on the session's clock."""
        self._pressure.apply(policy.pressure, now_ms)
        if self.policy is not None:
            self._charges.settle_all()
        self.policy, self.revision, self._charges.has_policy = policy, revision, True
        self._held = [Held(policy, None, policy, policy)]
        self._newest_behind = None
        before, self._experiment = self._experiment, self._experiments.of(revision, policy)
        self._table.set_window(policy.entropy.rpdi_window_tokens)
        self._table.set_groups(0)
        for count, (slot, opened) in enumerate(self._table.requests(), 1):
            self.assign(slot, opened, again=True, same_rules=self._experiment is before)
            if not count % SLICE_ROWS:
                yield
        self._pressure.restart(now_ms)

    def forget_requests(self) -> None:
        """Drop what is kept of all requests, because a snapshot replaces them."""
        self.control.clear()
        self.ended_by.clear()

    def restart_pressure(self, now_ms: float) -> None:
        """Begin the windows of pressure anew, because a snapshot has replaced all requests."""
        self._pressure.restart(now_ms)

    def assign(self, slot: int, opened: OpenedRequest, *, again: bool = False, same_rules: bool = False) -> None:
        """Find the policy that holds for a request, which the table has already opened.

        again: whether the request was there under the previous policy. same_rules: whether the policy has the same
        rules as the previous policy, so that a request that counts under them goes on counting.
        """
        if self.policy is None:
            return
        own = self.policy
        if own.override:
            own = own.of(self._who(opened))
        budgets, pressure = self._entries_of(opened)
        # One engine sees the answer of a request that two engines serve, the other one its thinking.
        is_whole = not (opened.remote_decode or opened.handed_over_ref)
        share = own.entropy.holdout_share
        in_force = is_whole and share > 0 and may_shorten(own, (*budgets, *pressure))
        control = in_force and held_out(opened.request_id, share)
        has_tokens = self._table.think_tokens[slot] or self._table.output_tokens[slot]
        begins = not (has_tokens or opened.handed_over_ref)
        self._table.set_arm(slot, control, in_force and (begins or (same_rules and bool(self._table.counted[slot]))))
        self._await_signals(slot, own, opened, begins=begins, same_rules=same_rules)
        if not (again and same_rules):
            self.ended_by.pop(slot, None)
        if control:
            self.control.join(slot, again and same_rules)
            if self._journal is not None:
                self._journal.in_control_group(slot)
        else:
            self.control.leave(slot)
        if own is self.policy and not (control or own.budget or own.pressure or self._charges.names(slot)):
            return
        # The engine that continues a request generates the request's first token once more.
        charged = () if opened.remote_decode else budgets
        self._charges.assign(slot, tuple(budget.name for budget in charged))
        if self.policy.pressure:
            self._pressure.assign(slot, pressure, again)
        self._shorten([slot], own, budgets, self._pressure.stages(slot))

    def _entries_of(self, opened: OpenedRequest) -> tuple[tuple[BudgetPolicy, ...], tuple[PressurePolicy, ...]]:
        """Return the budgets and the pressure entries that match a request."""
        assert self.policy is not None
        if not (self.policy.budget or self.policy.pressure):
            return (), ()
        who = self._who(opened)
        return matching(self.policy.budget, who), matching(self.policy.pressure, who)

    def set_stages(self, stages: Mapping[str, int]) -> Sliced[bool]:
        """Set the stages of budgets; return whether the policy of a live request may have changed."""
        changed = {name for name in stages.keys() | self.stages.keys() if stages.get(name) != self.stages.get(name)}
        self.stages = stages
        if self.policy is None or not self.policy.budget:
            return False
        slots = [s for s in self._table.slots().tolist() if not changed.isdisjoint(self._charges.names(s))]
        yield from self.shorten_again(slots)
        return bool(slots)

    def shorten_again(self, slots: list[int]) -> Sliced[None]:
        """Find the policy of live requests whose budgets or pressure entries have changed their stages."""
        assert self.policy is not None
        # Requests with the same policy and the same entries go on having the same policy.
        alike: dict[tuple[int, bool, tuple[str, ...], tuple[tuple[int, int], ...]], list[int]] = {}
        for count, slot in enumerate(slots, 1):
            policy = int(self._table.group[slot]), bool(self._table.control[slot])
            alike.setdefault((*policy, self._charges.names(slot), self._pressure.stages(slot)), []).append(slot)
            if not count % (4 * SLICE_ROWS):
                yield
        known = {budget.name: budget for budget in self.policy.budget}
        found = [(self._held[group].own, names, levels, own) for (group, _, names, levels), own in alike.items()]
        done = 0
        for own, names, levels, same_slots in found:
            budgets = tuple(known[name] for name in names)
            for begin in range(0, len(same_slots), SLICE_ROWS):
                self._shorten(some := same_slots[begin : begin + SLICE_ROWS], own, budgets, levels)
                if (done := done + len(some)) >= SLICE_ROWS:
                    done = 0
                    yield

    def _shorten(
        self, slots: list[int], own: Policy, budgets: tuple[BudgetPolicy, ...], pressure: tuple[tuple[int, int], ...]
    ) -> None:
        """Find the policy of requests that have the same policy without budgets and pressure, that count towards the
        same budgets, and that pressure puts in the same stages. All are in the control group, or none is."""
        by_section = {"budget": in_stages(budgets, self.stages), "pressure": self._pressure.in_stages(pressure)}
        entries = [*by_section["budget"], *by_section["pressure"]]
        policy, by = shortened(own, entries)
        if bool(self._table.control[slots[0]]):
            group = self._index_of(Held(unshortened(policy), by, own, policy))
            self._expose(slots, self._held[group], entries)
        else:
            group = 0 if policy is self.policy else self._index_of(Held(policy, by, own, policy))
        shadows: dict[str, tuple[Shortener, ...]] = {"budget": budgets, "pressure": self._pressure.entries}
        would = {
            section: shortened(own, by_section[section], shadow=True)[0]
            for section, entries in shadows.items()
            if own.scheduler.enabled and any(entry.shadow for entry in entries)
        }
        for slot in slots:
            self._table.set_group(slot, group)
            think_tokens = int(self._table.think_tokens[slot])
            for section in shadows:
                counts = section == "budget" or self._pressure.has_shadow(slot)
                cap = self._cap_under(would.get(section), slot, own) if counts else None
                self._shadow.shortened(section, slot, think_tokens, cap)

    def _cap_under(self, would: Policy | None, slot: int, own: Policy) -> int | None:
        """Return the cap that a policy shortened by entries in shadow would give a request; None for no policy."""
        opened = self._table.info[slot]
        if would is None or opened is None:
            return None
        return effects.cap(would.scheduler, opened, bool(self._table.extended[slot]), own.scheduler)

    def _expose(self, slots: list[int], held: Held, entries: list[tuple[Shortener, int]]) -> None:
        """Note what would shorten requests of the control group from now on. entries: those that match them, each with
        its stage above unshortened."""
        kinds, acts = set(kinds_for_request(held.own)), acts_on_thinking(held.treated)
        kinds |= {ENTROPY} & kinds_for_request(held.treated)
        kinds |= {
            Kind("budget" if isinstance(entry, BudgetPolicy) else "pressure", entry.name)
            for entry, _ in entries
            if acts and not entry.shadow
        }
        for slot in slots:
            request, opened = self.control.by_slot[slot], self._table.info[slot]
            assert opened is not None
            before = self._held[int(self._table.group[slot])].treated
            if before.entropy.shadow and not held.treated.entropy.shadow:
                # A rule that has fired while it was in shadow for treated requests, too, fires again.
                self._table.ask_again(slot)
            request.kinds |= kinds
            self.control.set_cap(slot, *(held.kind_of_cap(opened, False) if acts else (NO_CAP, None)))

    def control_cap(self, slot: int) -> int:
        """Return the cap that really holds for a request of the control group."""
        opened = self._table.info[slot]
        assert opened is not None
        scheduler = unshortened_cap(self._held[int(self._table.group[slot])].own.scheduler)
        return effects.cap(scheduler, opened, bool(self._table.extended[slot]))

    def kind_of_rule(self, slot: int, reason: str) -> Kind | None:
        """Return the kind of shortening to which a rule belongs that fires for a request, as `Held.kind_of_rule`."""
        return self._held[int(self._table.group[slot])].kind_of_rule(reason)

    def control_end_carried_out(self, slot: int, reason: str, think_tokens: int) -> None:
        """Note where the engine would have carried out an end by a rule for a request of the control group."""
        if (kind := self.kind_of_rule(slot, reason)) is not None:
            self.control.carried_out(slot, kind, think_tokens)

    def thinking_ended(self, slot: int, reason: str) -> None:
        """Note the kind of shortening that has ended the thinking of a treated request first, if one has; and whether a
        request of the control group was cut although nothing should shorten it."""
        table = self._table
        if self.policy is None or not table.holds(slot) or not table.counted[slot]:
            return
        if (request := self.control.by_slot.get(slot)) is not None:
            # The engine's cap holds until the request's own cap arrives, which a very low cap may not wait for.
            request.is_cut |= reason == "hard_cap" and bool(table.think_tokens[slot] < table.max_think_tokens[slot])
            return
        opened, held = table.info[slot], self._held[int(table.group[slot])]
        if reason == "hard_cap" and opened is not None:
            kind = held.kind_of_cap(opened, bool(table.extended[slot]))[1]
        else:
            kind = held.kind_of_rule(reason)
        if kind is not None and table.first_end[slot] == FORCED_END:
            self.ended_by.setdefault(slot, kind)

    def forget(self, slot: int) -> None:
        """Drop what is kept of a request that closes."""
        self.control.leave(slot)
        self.ended_by.pop(slot, None)

    def _index_of(self, held: Held) -> int:
        """Return the index of a policy, which is added to the list if it is new."""
        for index, known in enumerate(self._held):
            if known == held:
                return index
        if len(self._held) >= self._room:
            self._forget_unused()
        self._held.append(held)
        return len(self._held) - 1

    def _await_signals(self, slot: int, own: Policy, opened: OpenedRequest, *, begins: bool, same_rules: bool) -> None:
        """Note the signals of a request that are compared with the calibration once their first values come."""
        assert self.policy is not None
        assert self._experiment is not None
        control, described = bool(self._table.control[slot]), self._experiment.references
        found = compared_signals(self.policy, own, opened.min_think_tokens, described, control=control)
        before = int(self._table.awaited_signals[slot]) if same_rules else 0
        awaited = sum(BITS[signal] for signal in found)
        self._table.await_signals(slot, awaited if begins else awaited & before)

    def count_closed(self, closed: agent_pb2.RequestClosed) -> Iterable[str]:
        """Count a request that closes, which the table still holds, as treated or as control; return the names under
        which the engine counts it."""
        slot = closed.slot
        if self._experiment is None or not self._table.holds(slot):
            return ()
        # An abort without a client that has gone may be a stop string, which does no harm.
        known = closed.reason != agent_pb2.FINISH_REASON_ABORT or closed.client_gone
        reason = closed.reason if known else agent_pb2.FINISH_REASON_UNSPECIFIED
        request, ended_by = self.control.by_slot.get(slot), self.ended_by.get(slot)
        return self._experiment.closed(self._table, slot, reason, request, ended_by, handed_over=closed.handed_over)

    def count_samples(
        self, slots: NDArray[np.int64], think_tokens: NDArray[np.int64], eat_nats: NDArray[np.float64]
    ) -> None:
        """Count, of EAT samples that were measured after `think_tokens`, the first ones that a rule could read,
        [samples] each. NaN is no sample."""
        awaited = (self._table.awaited_signals[slots] & BITS["eat"]) != 0
        if not any_in(awaited):
            return
        for index in (awaited & np.isfinite(eat_nats)).nonzero()[0].tolist():
            if think_tokens[index] >= sampled_from(self.of(slot := int(slots[index]))):
                self._count_first(slot, "eat", float(eat_nats[index]))

    def count_sentence_ends(self) -> None:
        """Count the newest report's values at sentence ends that are the first ones that a rule could read.

        The table must have taken in the report's tokens.
        """
        table = self._table
        if self.policy is None or self._experiment is None or not self._experiment.references:
            return
        at_ends = table.history.rows.slot[table.history.ends.row]
        if not np.count_nonzero(table.awaited_signals[at_ends] & BITS_AT_SENTENCE_ENDS):
            return
        ends = sentence_ends(table)
        passed = ends.think_tokens >= self.policy.scheduler.min_think_tokens
        for signal, name in AT_SENTENCE_ENDS.items():
            values = getattr(ends, name)[:, 0]
            awaited = (ends.awaited_signals & BITS[signal]) != 0
            found = (awaited & passed & np.isfinite(values)).nonzero()[0]
            found = found[differs(ends.slot[found])]
            for slot, value in zip(ends.slot[found].tolist(), values[found].tolist(), strict=True):
                self._count_first(slot, signal, value)

    def _count_first(self, slot: int, signal: str, value: float) -> None:
        assert self._experiment is not None
        self._table.await_signals(slot, int(self._table.awaited_signals[slot]) & ~BITS[signal])
        self._experiment.sampled(signal, value)

    def knows_effort(self, opened: OpenedRequest) -> bool:
        """Whether the policy knows a request's effort; True if no policy is in force."""
        return self.policy is None or self.policy.knows_effort(self._who(opened))

    def _who(self, opened: OpenedRequest) -> Who:
        return Who(opened.model, opened.tenant, opened.slo_class, opened.effort, self._labels)

    def _forget_unused(self) -> None:
        """Drop policies that no live request uses. Clients choose which overrides match, so the list could grow."""
        table = self._table
        used = sorted({0, *table.group[table.live].tolist()})
        table.set_groups(np.where(table.live, np.searchsorted(used, table.group), 0))
        self._held = [self._held[index] for index in used]
        self._room = max(ROOM, 2 * len(used))

    def of(self, slot: int) -> Policy:
        """Return the policy that holds for the request in a slot; a policy must be in force."""
        held = self._held
        return (held[0] if len(held) == 1 else held[int(self._table.group[slot])]).policy

    def compared(self, slot: int) -> Policy:
        """Return the policy whose sections in shadow are compared with the real end of a request's thinking. Soft close
        and caps of the control group are not, because only their section is in shadow, and only there."""
        held = self._held[int(self._table.group[slot])]
        if not held.is_control:
            return held.policy
        return held.policy.model_copy(update={"scheduler": held.treated.scheduler})

    def ema_alpha(self, slots: NDArray[np.int64]) -> NDArray[np.float64] | float:
        """Return the weight of a new EAT sample for each of these slots, or one for all."""
        found = [held.policy.entropy.ema_alpha for held in self._held]
        return found[0] if len(found) == 1 else np.array(found).take(self._table.group[slots])

    def shortening(self, slot: int) -> Shortening | None:
        """Return the entry that sets the cap of the request in a slot, None if none does."""
        by = self._held[int(self._table.group[slot])].by
        return by.cap if by is not None else None

    def behind(self, slot: int, reason: str) -> Behind:
        """Return the policy that holds for the request in a slot, and the entry that has changed what a decision with
        this reason depends on."""
        group = int(self._table.group[slot])
        if self._held[group].is_control and reason in CAP_REASONS:
            own = self._held[group].own
            return Behind(
                self.revision, own.model_copy(update={"scheduler": unshortened_cap(own.scheduler)}), None, None
            )
        if (found := self._held[group].by) is None:
            # Most decisions share one object, because most requests have the same policy.
            behind, policy = self._newest_behind, self._held[group].policy
            if behind is None or behind.policy is not policy:
                self._newest_behind = behind = Behind(self.revision, policy, None, None)
            return behind
        by = found.soft if reason == "soft_close" else found.rules if reason in ENTROPY_REASONS else found.cap
        change = self._pressure.newest_change(by.name) if by is not None and by.section == "pressure" else None
        return Behind(self.revision, self._held[group].policy, by, change)

    def in_use(self) -> list[tuple[Policy, Among]]:
        """Return each policy in use with a mask of the requests for which it holds, [slots]; None stands for all."""
        if len(self._held) == 1:
            return [(self._held[0].policy, None)]
        live, group = self._table.live, self._table.group
        groups = ((held.policy, live & (group == index)) for index, held in enumerate(self._held))
        return [(policy, among) for policy, among in groups if any_in(among)]
