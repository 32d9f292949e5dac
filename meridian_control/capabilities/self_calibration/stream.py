"""Collects the probes of one engine's requests that nothing shortens, as episodes for calibration."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from meridian_control.capabilities.control_group.requests import shows_end
from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.self_calibration.episodes import Episode, LeftOut, Sample, name_of
from meridian_control.common.table_columns import NATURAL_END
from meridian_control.engine.part import UNREAD_PROBE, Part
from meridian_control.engine.request_table import THINK
from meridian_control.engine.think_ends import FINISHED
from meridian_control.journal.request_ids import is_later_choice
from meridian_control.policy.effects import any_self_calibrates, self_calibrates, staged_in_force
from meridian_control.policy.shortening_kinds import kinds_for_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meridian.v1 import agent_pb2

    from meridian_control.capabilities.self_calibration.in_order import InOrder
    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.part import ProbeResult, Stream
    from meridian_control.policy.model import Policy

# Most probes of a request that are kept; a request with more is left out.
MAX_SAMPLES = 2000


class GoingOn(NamedTuple):
    """A recorded request whose stream has ended: the stream's mark, and the request's probes."""

    mark: object
    samples: list[Sample]


def any_lost(samples: Sequence[Sample]) -> bool:
    """Return whether a request has had probes beside these, so that the newest ones with one answer may be fewer than
    the engine has counted. An agent of the first version does not count them."""
    counts = [0, *(sample.same_answer for sample in samples)]
    return any(later > 1 and later != before + 1 for before, later in pairwise(counts))


def drop(in_order: InOrder, left: Iterable[GoingOn]) -> None:
    """Record the requests of a stream that has ended no more, because the engine process has no other stream."""
    for mark in {before.mark for before in left}:
        in_order.forget(mark, lambda slot: False)


class Recorder(Part):
    """The live requests of one engine that nothing shortens, and whose policy asks for self-calibration: the control
    group, and while nothing in force may shorten a request, all that are measured.

    in_order: takes each request when it begins, and what came of it when it closes.
    """

    def __init__(self, stream: Stream, in_order: InOrder) -> None:
        self._stream, self._table, self._in_order = stream, stream.table, in_order
        # The mark in `in_order` of this stream and of those of the engine process before it, which `in_order` may keep
        # for long after they have ended.
        self._mark = object()
        self._samples: dict[int, list[Sample]] = {}
        # Slots of the requests that were recorded before the newest snapshot; and whether it has come.
        self._before: set[int] = set()
        self._is_listed = False
        # Slots of the requests that have begun since the last look for those to record.
        self._opened: list[int] = []
        # Samples whose results came with the report that is being taken in, by slot.
        self._new: list[tuple[int, Sample]] = []
        # Whether the policy in force asks for self-calibration of some request; None before a policy.
        self._is_asked: bool | None = None

    def expect(self, left: Mapping[int, GoingOn]) -> None:
        """Take what the engine process's stream before has left."""
        for slot, before in left.items():
            self._mark, self._samples[slot] = before.mark, before.samples

    def left(self) -> dict[int, GoingOn]:
        """Return the recorded requests that run, by slot, for the engine process's next stream."""
        left = {slot: GoingOn(self._mark, self._samples.get(slot, [])) for slot in self._in_order.running(self._mark)}
        self._mark, self._samples = object(), {}
        return left

    def policy_begins(self, revision: int, policy: Policy, now: object) -> None:
        self._is_asked = any_self_calibrates(policy)
        if not self._is_asked:
            self._samples.clear()

    def policy_changed(self, now: object) -> None:
        self._look_again()

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        self._new.clear()
        self._opened.clear()
        self._before, self._is_listed = {*self._in_order.running(self._mark)}, False

    def snapshot_ends(self, now: object) -> None:
        self._is_listed = True
        self._look_again()
        self._begin()

    def _look_again(self) -> None:
        """Forget the requests that are not meant any more under the policy in force, or that the newest snapshot does
        not list as those that they were."""
        if self._is_asked is None or not self._is_listed:
            return
        goes_on = self._stream.parts.of(ControlGroup).goes_on
        gone = {slot for slot in self._before if not goes_on(slot)}
        self._in_order.forget(self._mark, lambda slot: slot not in gone and self._is_meant(slot))
        running = {*self._in_order.running(self._mark)}
        self._samples = {slot: samples for slot, samples in self._samples.items() if slot in running}
        self._before.clear()

    def stream_ended(self, now: object, followed: bool) -> None:
        self._opened.clear()
        drop(self._in_order, self.left().values())

    def opened(self, slots: Sequence[int]) -> None:
        self._opened += slots

    def _begin(self) -> None:
        """Begin to record the requests among those that have opened."""
        for slot in self._opened if self._is_asked else ():
            opened = self._table.info[slot]
            if opened is not None and self._is_meant(slot) and not self._stream.parts.of(ControlGroup).goes_on(slot):
                self._in_order.begin(self._mark, slot, self._stream.policies.who(opened).traffic)
        self._opened.clear()

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
        if any_lost(samples):
            return LeftOut.LOST
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
