"""Collects the probes of one engine's requests that nothing shortens, as episodes for calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.control_group.requests import shows_end
from meridian_control.capabilities.self_calibration.episodes import Episode, LeftOut, Sample, name_of
from meridian_control.common.table_columns import NATURAL_END
from meridian_control.engine.part import UNREAD_PROBE, Part
from meridian_control.engine.request_table import THINK
from meridian_control.engine.think_ends import FINISHED
from meridian_control.journal.request_ids import is_later_choice
from meridian_control.policy.effects import any_self_calibrates, self_calibrates, staged_in_force
from meridian_control.policy.shortening_kinds import kinds_for_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian.v1 import agent_pb2

    from meridian_control.capabilities.self_calibration.in_order import InOrder
    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.part import ProbeResult, Stream
    from meridian_control.policy.model import Policy

# Most probes of a request that are kept; a request with more is left out.
MAX_SAMPLES = 2000


class Recorder(Part):
    """The live requests of one engine that nothing shortens, and whose policy asks for self-calibration: the control
    group, and while nothing in force may shorten a request, all that are measured.

    in_order: takes each request when it begins, and what came of it when it closes.
    """

    def __init__(self, stream: Stream, in_order: InOrder) -> None:
        self._stream, self._table, self._in_order = stream, stream.table, in_order
        # The stream's mark in `in_order`, which may keep it for long after the stream has ended.
        self._mark = object()
        self._samples: dict[int, list[Sample]] = {}
        # Slots of the requests that have begun since the last look for those to record.
        self._opened: list[int] = []
        # Samples whose results came with the report that is being taken in, by slot.
        self._new: list[tuple[int, Sample]] = []
        # Whether the policy in force asks for self-calibration of some request.
        self._is_asked = False

    def policy_begins(self, revision: int, policy: Policy, now: object) -> None:
        self._is_asked = any_self_calibrates(policy)
        if not self._is_asked:
            self._samples.clear()

    def policy_changed(self, now: object) -> None:
        self._in_order.forget(self._mark, lambda slot: self._is_asked and self._is_meant(slot))

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        self._samples.clear()
        self._new.clear()
        self._forget()

    def snapshot_ends(self, now: object) -> None:
        self._begin()

    def stream_ended(self, now: object, followed: bool) -> None:
        self._forget()

    def opened(self, slots: Sequence[int]) -> None:
        self._opened += slots

    def _begin(self) -> None:
        """Begin to record the requests among those that have opened."""
        for slot in self._opened if self._is_asked else ():
            opened = self._table.info[slot]
            if opened is not None and self._is_meant(slot):
                self._in_order.begin(self._mark, slot, self._stream.policies.who(opened).traffic)
        self._opened.clear()

    def _forget(self) -> None:
        self._opened.clear()
        self._in_order.forget(self._mark, lambda slot: False)

    def probed(self, results: Sequence[ProbeResult]) -> None:
        for result in results if self._is_asked else ():
            if self._is_recorded(result.slot):
                place, same = result.think_tokens, result.same_answer
                read = result.reason != UNREAD_PROBE
                measured = place, place, result.eat_nats, result.cost_tokens, same, result.is_empty
                sample = Sample(*measured, read, bool(result.is_other))
                self._new.append((result.slot, sample))

    def reported(self, report: agent_pb2.StepReport, now: object) -> None:
        self._begin()
        for slot, sample in self._new:
            arrived = max(sample.think_tokens, int(self._table.think_tokens[slot]))
            kept = self._samples.setdefault(slot, [])
            if len(kept) <= MAX_SAMPLES:
                kept.append(sample._replace(arrived_tokens=arrived))
        self._new.clear()

    def closed(self, rows: Sequence[agent_pb2.RequestClosed], governed: bool) -> None:
        for closed in rows if self._is_asked else ():
            samples = self._samples.pop(closed.slot, [])
            opened = self._table.info[closed.slot]
            if opened is None:
                continue
            has_thought = bool(self._table.think_tokens[closed.slot])
            counts = has_thought and governed and closed.reason in FINISHED and self._is_meant(closed.slot)
            result = self._result(opened, samples) if counts else None
            self._in_order.end(self._mark, closed.slot, self._stream.policies.who(opened).traffic, result)

    def _is_meant(self, slot: int) -> bool:
        """Whether self-calibration is to record a request. A request that counts has had the same rules from its
        beginning. Of several choices of one prompt the first counts, because they are alike."""
        table, opened = self._table, self._table.info[slot]
        if opened is None or is_later_choice(opened.request_id):
            return False
        return bool(table.counted[slot] and not table.unmeasured[slot]) and self._is_recorded(slot)

    def _result(self, opened: OpenedRequest, samples: list[Sample]) -> Episode | LeftOut:
        """Return the episode of a request whose thinking the model itself has ended, once, and whose newest probe lies
        near that end, so that the answer that stayed is known."""
        table, slot = self._table, opened.slot
        natural = int(table.think_tokens[slot])
        if table.first_end[slot] != NATURAL_END or table.reentered[slot] or table.phase[slot] == THINK:
            return LeftOut.NOT_NATURAL
        if not samples:
            return LeftOut.UNPROBED
        if len(samples) > MAX_SAMPLES:
            return LeftOut.MANY
        if not shows_end(samples[-1].think_tokens, natural):
            return LeftOut.FAR
        return Episode(name_of(opened.request_id), natural, tuple(samples))

    def _is_recorded(self, slot: int) -> bool:
        """Whether a request's policy asks for self-calibration, and nothing in force may shorten the request."""
        policies = self._stream.policies
        assert policies.policy is not None
        if not self_calibrates(policies.of(slot)):
            return False
        return bool(self._table.control[slot]) or not (
            kinds_for_request(policies.held(slot).own) or staged_in_force(policies.policy)
        )
