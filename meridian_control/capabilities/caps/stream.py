"""Sends each request's cap when the request is new, and again whenever the cap changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.slices import SLICE_ROWS
from meridian_control.common.table_columns import NO_CAP, UNTOLD
from meridian_control.engine.part import Part
from meridian_control.engine.request_table import THINK
from meridian_control.policy import effects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian.v1 import agent_pb2

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.part import ProbeResult, Stream, Turn
    from meridian_control.policy.model import Policy


class Caps(Part):
    """The caps of one engine's requests."""

    def __init__(self, stream: Stream) -> None:
        self._table, self._policies, self._ledger = stream.table, stream.policies, stream.ledger
        self._revises = False
        # Whether the agent may limit requests that were told no cap: after a snapshot those that it lists, and in the
        # first report under new settings those that opened under the earlier ones.
        self._may_limit = False
        # Slots whose cap an empty answer has extended since the last turn.
        self._extended: list[int] = []

    @classmethod
    def of(cls, stream: Stream) -> Caps | None:
        return cls(stream) if stream.ends_thinking else None

    def revise(self) -> None:
        self._revises = self._may_limit = True

    def shortened(self) -> None:
        self._revises = True

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        self._may_limit = True
        self._extended = []

    def probed(self, results: Sequence[ProbeResult]) -> None:
        table = self._table
        for result in results:
            # The cap that the probe was near may have changed since.
            is_near = 0 <= table.max_think_tokens[result.slot] <= result.think_tokens + effects.EXTENSION_LEAD_TOKENS
            if result.reason == "empty_answer" and is_near:
                table.put(result.slot, cap_probed=True)
                if result.is_empty and table.phase[result.slot] == THINK:
                    table.put(result.slot, extended=True)
                    self._extended.append(result.slot)

    def ends(self, turn: Turn) -> Sliced[None] | None:
        table = self._table
        may_limit, self._may_limit = self._may_limit, self._may_limit and not turn.reported
        if not (table.has_new or self._revises or self._extended):
            return None
        due = table.mask(self._extended) | (table.max_think_tokens == UNTOLD) | self._revises
        self._revises, self._extended = False, []
        table.has_new = False
        return self._decide((table.live & due).nonzero()[0].tolist(), turn, may_limit)

    def _decide(self, slots: list[int], turn: Turn, may_limit: bool) -> Sliced[None]:
        table, policy = self._table, turn.policy
        for count, slot in enumerate(slots, 1):
            if not count % SLICE_ROWS:
                yield
            cap, why = self._cap(policy, slot, bool(table.extended[slot]))
            # An extension need not raise the cap: the policy may have none any more, or the request's own cap be lower.
            extends = bool(table.extended[slot]) and cap > self._cap(policy, slot, False)[0]
            info = table.info[slot]
            reserve = effects.answer_reserve(self._policies.of(slot), info) if info and cap != NO_CAP else 0
            limits = cap, policy.scheduler.shadow, reserve
            if limits != (table.max_think_tokens[slot], table.cap_shadow[slot], table.answer_reserve_tokens[slot]):
                self._send(slot, limits, ("empty_answer" if extends else why, why), turn.out, may_limit)

    def _cap(self, policy: Policy, slot: int, extended: bool) -> tuple[int, str]:
        """Return a request's cap, and its reason: the section of the entry that lowers it, or `hard_cap`.

        extended: whether the cap is extended for an empty answer.
        """
        info = self._table.info[slot]
        assert info is not None
        if not policy.scheduler.enabled:
            return NO_CAP, "hard_cap"
        if self._table.control[slot]:
            return effects.cap(self._policies.held(slot).capping.scheduler, info, extended), "hard_cap"
        own = self._policies.of(slot).scheduler
        if (shortening := self._policies.shortening(slot)) is None:
            return effects.cap(own, info, extended), "hard_cap"
        without = shortening.without.scheduler
        cap = effects.cap(own, info, extended, without)
        return cap, shortening.section if cap < effects.cap(without, info, extended) else "hard_cap"

    def _send(
        self,
        slot: int,
        limits: tuple[int, bool, int],
        reasons: tuple[str, str],
        out: agent_pb2.Directives,
        may_limit: bool,
    ) -> None:
        """Decide a cap. limits: the cap, whether it is in shadow, and the answer reserve. reasons: the
        decision's reason, and the reason that the cap would have without an extension."""
        table, (cap, shadow, reserve), (reason, why) = self._table, limits, reasons
        if cap != table.max_think_tokens[slot] and not table.extended[slot]:
            # Another cap is near at another time.
            table.put(slot, cap_probed=False)
        has_none = table.max_think_tokens[slot] in ((NO_CAP,) if may_limit else (NO_CAP, UNTOLD))
        table.note_cap(slot, cap, shadow, reserve)
        if table.closing[slot]:
            return
        if cap != NO_CAP:
            # The request's own cap is in force although the policy's is in shadow.
            in_shadow = table.shadow_cap(slot) != NO_CAP
            decision_id = self._ledger.make("cap", reason, slot, in_shadow, cap_tokens=cap, behind=why)
            values = {"max_think_tokens": cap, "answer_reserve_tokens": reserve, "shadow": shadow}
            out.caps.add(decision_id=decision_id, slot=slot, extended=bool(table.extended[slot]), **values)
        elif not has_none:
            out.caps.add(decision_id=self._ledger.make("cap", "lifted", slot), slot=slot)
