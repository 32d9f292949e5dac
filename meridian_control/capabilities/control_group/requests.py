"""Keeps, for each live request of the control group of one engine, where shortening would have ended its thinking, and
the trial answers of its probes from there on.

Nothing shortens these requests, so their answers show what an earlier end would have changed. The module asks for the
probes that the judgement needs and judges nothing itself. It does no I/O and reads no clock; each object belongs to one
session. Control groups are small, so the state is kept by request and not in columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from meridian_control.common.table_columns import NO_CAP
from meridian_control.engine.request_table import THINK
from meridian_control.policy.effects import EXTENSION_LEAD_TOKENS
from meridian_control.policy.schema import EntropyPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_control.engine.part import ProbeResult
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.model import Policy
    from meridian_control.policy.shortening_kinds import Kind

# From the place of the end on, a request is probed every eighth of its thinking, so that the answer that stays is
# known, but not more often than each MIN_GAP_TOKENS, and no less often than by the policy's or the default interval.
GAP_SHARE, MIN_GAP_TOKENS = 8, 8
MAX_GAP_TOKENS: int = EntropyPolicy.model_fields["eat_probe_interval_tokens"].default
# The answer that stayed is known if no more than this many gaps lie between the newest probe and the end of thinking,
# and that at the place of the end if no more lie between a probe and the place.
MISSING_GAPS = 2
# Trial answers tell answers apart if at least this share of the requests has another one than the request before, as
# with yes and no where one of them is right in nine cases of ten. It is judged on at least MIN_COMPARED requests.
MIN_DIFFERENT, MIN_COMPARED = 0.15, 20
# A cap is known before it is reached. From so many tokens before it on, a request is probed each NEAR_GAP_TOKENS,
# because a probe that is asked for at the cap is measured some tokens later, where the answer may already be right.
NEAR_CAP_TOKENS, NEAR_GAP_TOKENS = 24, 4


class Probe(NamedTuple):
    """A measured probe: its number among those of its request, its place in thinking tokens, whether the answer would
    have been empty there, and whether it is that of the request that was probed before."""

    number: int
    think_tokens: int
    is_empty: bool
    is_alike: bool


@dataclass(slots=True)
class ControlRequest:
    """A request of the control group.

    kinds: what could have shortened the request at some time. cap, cap_kind: the cap that would hold, and what sets it.
    extended: both once an empty answer has extended the cap. extends: whether the first probe near the cap found one,
    None before that probe. stopped_by: the kind that would have ended its thinking first, None for none so far;
    gives_up: whether that was the give-up rule. from_tokens: thinking tokens at the place of that end as the control
    plane decided it; stop_tokens: as the engine would have carried it out, -1 until that is known. newest: the newest
    probe, with its number of equal trial answers in a row, same_answer. at_stop: the probe nearest to the place.
    is_cut: whether the thinking was shortened although it should not have been.
    """

    kinds: set[Kind] = field(default_factory=set)
    cap: int = NO_CAP
    cap_kind: Kind | None = None
    extended: tuple[int, Kind | None] = (NO_CAP, None)
    extends: bool | None = None
    stopped_by: Kind | None = None
    gives_up: bool = False
    from_tokens: int = 0
    stop_tokens: int = -1
    newest: Probe | None = None
    same_answer: int = 0
    at_stop: Probe | None = None
    is_cut: bool = False

    @property
    def stopped(self) -> bool:
        return self.stop_tokens >= 0

    def ends_at_cap(self, think_tokens: int, thinks: bool) -> None:
        """Note the thinking tokens so far, which may have passed the cap. thinks: whether the request still thinks."""
        if self.cap_kind is None or self.cap < 0:
            return
        passed = think_tokens > self.cap or (thinks and think_tokens == self.cap)
        if passed and self.stopped_by is None:
            self._stop(self.cap_kind, self.cap)
            self.stop_tokens = self.cap

    def set_cap(
        self, own: tuple[int, Kind | None], extended: tuple[int, Kind | None], think_tokens: int, thinks: bool
    ) -> None:
        """Note the cap that would hold from now on, and the kind that sets it, None if it really holds. extended: both
        if an empty answer extends the cap."""
        self.ends_at_cap(think_tokens, thinks)
        if not self.extends and own[0] != self.cap:
            # As for a treated request, the first probe near the new cap decides.
            self.extends = None
        self.extended = extended
        cap, kind = self.cap, self.cap_kind = extended if self.extends else own
        if kind is not None and self.stopped_by is None and thinks and think_tokens > cap:
            # A treated request that has thought longer than its new cap ends its thinking at once.
            self._stop(kind, think_tokens)
            self.stop_tokens = think_tokens

    def ends_by_rule(self, kind: Kind, think_tokens: int, gives_up: bool) -> bool:
        """Note that a rule fires; return whether it is the first that would have ended the thinking."""
        if self.stopped_by is not None or (self.cap_kind is not None and 0 <= self.cap <= think_tokens):
            return False
        self._stop(kind, think_tokens)
        self.gives_up = gives_up
        return True

    def ends_at_newest_probe(self) -> None:
        """Note that the rule which ends the thinking has fired on the newest probe."""
        if (newest := self.newest) is not None:
            self.at_stop, self.from_tokens = newest, newest.think_tokens

    def _stop(self, kind: Kind, think_tokens: int) -> None:
        self.stopped_by, self.from_tokens = kind, think_tokens
        if self.newest is not None and abs(self.newest.think_tokens - think_tokens) <= _near(think_tokens):
            self.at_stop = self.newest

    def probed(self, result: ProbeResult) -> None:
        """Note a measured probe."""
        number = self.newest.number + 1 if self.newest is not None else 0
        # Agents of 0.3 do not say whether it is another answer.
        is_alike = result.is_other is False
        self.newest = Probe(number, result.think_tokens, result.is_empty, is_alike)
        self.same_answer = result.same_answer
        if self._may_extend(result.think_tokens) and result.think_tokens <= self.cap:
            self.extends = result.is_empty
            if self.extends:
                self.cap, self.cap_kind = self.extended
        if self.stopped_by is None:
            return
        at = self.at_stop
        if at is None or self._distance(self.newest) < self._distance(at):
            self.at_stop = self.newest

    def _may_extend(self, think_tokens: int) -> bool:
        """Whether a probe after so many thinking tokens tells if an empty answer extends the cap."""
        extensible = self.extends is None and self.extended[0] > self.cap
        return extensible and think_tokens >= max(1, self.cap - EXTENSION_LEAD_TOKENS)

    def _distance(self, probe: Probe) -> int:
        return abs(probe.think_tokens - self.from_tokens)

    def wants_probe(self, think_tokens: int, interval_tokens: int) -> bool:
        """Whether a probe is due, so that the trial answer at the end, and the one that stays, are known."""
        if self.gives_up:
            return False
        newest_tokens = self.newest.think_tokens if self.newest is not None else -think_tokens
        since = think_tokens - newest_tokens
        if self.stopped_by is None:
            near = think_tokens >= self.cap - NEAR_CAP_TOKENS or self._may_extend(think_tokens)
            return self.cap_kind is not None and near and think_tokens > 0 and since >= NEAR_GAP_TOKENS
        return newest_tokens < self.from_tokens or since >= gap_tokens(think_tokens, interval_tokens)

    def is_judged(self, think_tokens: int) -> bool:
        """Whether the trial answers at the place of the end and at the end of the thinking are known."""
        if self.at_stop is None or self.newest is None or self.is_cut:
            return False
        # Agents of the first version do not count the probes with the same answer.
        return self.same_answer > 0 and shows_end(self.newest.think_tokens, think_tokens)

    @property
    def is_harmed(self) -> bool:
        """Whether the trial answer at the place of the end was empty, or has not stayed; it must be known."""
        assert self.at_stop is not None
        assert self.newest is not None
        return self.at_stop.is_empty or self.newest.number - self.at_stop.number >= self.same_answer


def gap_tokens(think_tokens: int, interval_tokens: int) -> int:
    return min(interval_tokens, MAX_GAP_TOKENS, max(MIN_GAP_TOKENS, think_tokens // GAP_SHARE))


def shows_end(newest_tokens: int, think_tokens: int) -> bool:
    """Whether the newest probe, after `newest_tokens` thinking tokens, shows the answer that stayed when the thinking
    ended after `think_tokens`."""
    return think_tokens <= newest_tokens + _near(think_tokens)


def _near(think_tokens: int) -> int:
    """Return within how many tokens of a place a probe tells the answer there."""
    return MISSING_GAPS * gap_tokens(think_tokens, MAX_GAP_TOKENS)


def answers_alike(differing: int, compared: int) -> bool:
    """Whether trial answers do not tell answers apart, as if all answers began with a line break or the same word.

    compared: requests whose newest trial answer was compared with that of the request before. differing: those that
    have another one.
    """
    return compared >= MIN_COMPARED and differing < MIN_DIFFERENT * compared


class ControlRequests:
    """The live requests of the control group, by slot."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.by_slot: dict[int, ControlRequest] = {}

    def join(self, slot: int, again: bool) -> ControlRequest:
        """Return the state of a request of the control group. again: whether it goes on as it was."""
        kept = self.by_slot.get(slot) if again else None
        self.by_slot[slot] = request = kept or ControlRequest()
        return request

    def leave(self, slot: int) -> None:
        self.by_slot.pop(slot, None)

    def clear(self) -> None:
        self.by_slot.clear()

    def set_cap(self, slot: int, own: tuple[int, Kind | None], extended: tuple[int, Kind | None]) -> None:
        table = self._table
        self.by_slot[slot].set_cap(own, extended, int(table.think_tokens[slot]), bool(table.phase[slot] == THINK))

    def pass_caps(self) -> None:
        """Note which requests have passed the cap that would hold for them, as of the newest report."""
        table = self._table
        for slot, request in self.by_slot.items():
            request.ends_at_cap(int(table.think_tokens[slot]), bool(table.phase[slot] == THINK))

    def carried_out(self, slot: int, kind: Kind, think_tokens: int) -> None:
        """Note the place at which the engine would have carried out an end that a rule decided."""
        request = self.by_slot.get(slot)
        if request is not None and request.stopped_by == kind and request.stop_tokens < 0:
            request.stop_tokens = think_tokens

    def probes_due(self, policy_of: Callable[[int], Policy]) -> list[int]:
        """Return the slots of requests that a probe is due for. policy_of: gives the policy that holds for a slot."""
        table, due = self._table, []
        for slot, request in self.by_slot.items():
            if table.phase[slot] != THINK or table.probe_open[slot] or table.preempted[slot] or not table.live[slot]:
                continue
            entropy = policy_of(slot).entropy
            if entropy.enabled and request.wants_probe(
                int(table.think_tokens[slot]), entropy.eat_probe_interval_tokens
            ):
                due.append(slot)
        return due
