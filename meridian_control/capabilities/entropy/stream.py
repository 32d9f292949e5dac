"""Ends thinking by the rules of the policy's entropy section and by soft close, and asks for the probes they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.capabilities.entropy import probes, rule
from meridian_control.common.enum_names import REASONS
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.engine.part import Part
from meridian_control.policy.effects import EXTENSION_LEAD_TOKENS, hold_ms, in_shadow, is_gated, measured_share

if TYPE_CHECKING:
    from datetime import datetime

    from numpy.typing import NDArray

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.effective_policies import Among
    from meridian_control.engine.moments import Moments, Seen
    from meridian_control.engine.part import Stream, Turn
    from meridian_control.policy.model import Policy

PLACEMENTS = {
    "anywhere": agent_pb2.PLACEMENT_ANYWHERE,
    "sentence": agent_pb2.PLACEMENT_SENTENCE,
    "paragraph": agent_pb2.PLACEMENT_PARAGRAPH,
}
NOBODY = np.zeros(0, np.intp)


class EntropyRules(Part):
    """The entropy rules of one engine's requests.

    After a report the rules are asked at every moment of the report that concerns them, also about the requests that
    the report closes. If the policy has changed, they are asked about the current state of all other requests.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream, self._table, self._ends = stream, stream.table, stream.ends_thinking
        self._revises = False
        # Whether the policy lets the engine measure a sample of the requests only.
        self._samples = False

    @classmethod
    def of(cls, stream: Stream) -> EntropyRules | None:
        return cls(stream) if stream.ends_thinking or stream.may_probe else None

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        hello = self._stream.hello
        self._samples = measured_share(policy.on_engine(hello.labels, hello.model_fingerprint)) < 1

    def revise(self) -> None:
        self._revises = True

    def ends(self, turn: Turn) -> Sliced[None] | None:
        if not self._ends:
            return None
        moments, agree = rule.moments(turn.groups, self._table) if turn.reported else ((), [])
        if not (len(moments) or self._revises):
            return None
        return self._end_some(turn, moments, agree)

    def _end_some(self, turn: Turn, moments: Moments | tuple[()], agree: list[bool]) -> Sliced[None]:
        if moments:
            for (own, among), probes_agree in zip(turn.groups, agree, strict=True):
                mine = None if among is None else among[moments.slot]
                yield from self._end(turn, own, moments, mine, probes_agree)
        if self._revises:
            self._revises = False
            for own, among in turn.groups:
                stays = ~self._table.closing
                yield from self._end(turn, own, self._table, stays if among is None else among & stays)

    def _end(self, turn: Turn, policy: Policy, seen: Seen, among: Among, probes_agree: bool = True) -> Sliced[None]:
        for count, (index, reason) in enumerate(rule.ends(policy, seen, among, probes_agree), 1):
            self._stream.end_thinking(turn, reason, index, shadow=in_shadow(policy, REASONS[reason]), seen=seen)
            if not count % SLICE_ROWS:
                yield

    def decide(self, turn: Turn) -> None:
        if not self._stream.may_probe:
            return
        if not self._samples:
            for own, among in turn.groups:
                self._probe(turn, own, among)
            return
        measured = ~self._table.unmeasured
        for own, among in turn.groups:
            self._probe(turn, own, measured if among is None else among & measured)

    def _probe(self, turn: Turn, policy: Policy, among: Among) -> None:
        table, entropy = self._table, policy.entropy
        near_cap = probes.cap_probes_due(policy, table, among).tolist()
        seen, indices = self._due(turn, policy, among)
        if near_cap and len(indices):
            # The request came near its cap before the EAT probe was due, and it has one probe at a time.
            capped = np.maximum(1, table.max_think_tokens[seen.slot[indices]] - EXTENSION_LEAD_TOKENS)
            indices = indices[~(table.mask(near_cap)[seen.slot[indices]] & (capped < seen.think_tokens[indices]))]
        if len(indices):
            where = PLACEMENTS["anywhere" if is_gated(entropy) else entropy.eat_probe_placement]
            due = seen.slot[indices]
            self._stream.probe(turn, "eat", due, seen=(seen, indices), where=where, hold_ms=hold_ms(entropy))
            table.put(due, probed_tokens=seen.think_tokens[indices])
        if near_cap := [slot for slot in near_cap if not table.probe_open[slot]]:
            due = np.array(near_cap)
            table.put(due, next_cap_probe_tokens=table.think_tokens[due] + probes.CAP_PROBE_INTERVAL_TOKENS)
            self._stream.probe(turn, "empty_answer", due)

    def _due(self, turn: Turn, policy: Policy, among: Among) -> tuple[Seen, NDArray[np.intp]]:
        """Return the table or moments, and the indices in them of the states in which EAT probes came due."""
        if not turn.reported:
            return self._table, probes.probes_due(policy, self._table, among)
        came = probes.probes_came_due(policy, self._table, among)
        return (self._table, NOBODY) if came is None else (came, np.arange(len(came)))
