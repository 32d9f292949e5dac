"""Writes the events of one session to the decision log.

The module owns the choice of the requests that are kept. The session passes in the time. The module runs on the
server's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.opened_request import is_under_way
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.journal.records import FREEZE, Circumstances, Life, LifeEvent, TokenCounts
from meridian_control.journal.request_ids import sampled
from meridian_control.policy.effects import is_gated

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    import numpy as np
    from numpy.typing import NDArray

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.journal.log import DecisionLog
    from meridian_control.journal.records import Behind, Decision, RequestChange, Seen

FINISH_NAMES = {
    agent_pb2.FINISH_REASON_STOP: "stop",
    agent_pb2.FINISH_REASON_LENGTH: "length",
    # An agent of 0.3.0 knows no more, nor does one whose front end has no hook or passes no marks on.
    agent_pb2.FINISH_REASON_ABORT: "aborted by the front end: a stop string, a disconnect or a pause",
    agent_pb2.FINISH_REASON_ERROR: "error",
    agent_pb2.FINISH_REASON_REPETITION: "repetition",
}


class Journal:
    """Writes the events of one session. `now` is the time of the message that the session is handling. `is_frozen`:
    whether the agent has said that the engine is frozen."""

    def __init__(self, log: DecisionLog, engine_id: str, incarnation: str, session_id: str, now: datetime) -> None:
        self._log, self._engine_id, self._incarnation, self._session_id = log, engine_id, incarnation, session_id
        self.now = now
        self._lives: dict[int | None, Life] = {}
        # The lives from before a snapshot of which only a part is taken in.
        self._before: dict[int | None, Life] = {}
        self.is_frozen, self._freezes = False, ""
        # Place of the newest report's events in the order of the log.
        self._report_number = 0

    def opened(self, opened: OpenedRequest, ratio: float, *, joined_late: bool = False) -> None:
        """Begin the life of a request if the request belongs to the sample; `ratio` is the sampled share, 0 to 1."""
        if not sampled(opened.request_id, ratio):
            self._lives.pop(opened.slot, None)
            return
        who, number = (self._engine_id, self._incarnation, self._session_id), self._log.next_number()
        life = Life(*who, opened, number, self.now, joined_late)
        life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
        self._log.begin_life(life)
        self._lives[opened.slot] = life
        self._turn(life, FREEZE, self.is_frozen, self._freezes)

    def begin_snapshot(self) -> None:
        """Begin to update the lives from a snapshot."""
        self._before, self._lives = self._lives, {}

    def listed(self, opened: OpenedRequest, ratio: float) -> None:
        """Continue the life of a request that a snapshot lists, or begin it if it is not known."""
        life = self._log.back((self._engine_id, self._incarnation, *opened.identity))
        if life is None:
            self.opened(opened, ratio, joined_late=is_under_way(opened))
            return
        self._lives[opened.slot] = life
        life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
        if life.session_id != self._session_id:
            life.session_id = self._session_id
            self._note(life, "stream_back", opened.phase)
        # The engine may have been frozen or thawed since the stream before.
        self._turn(life, FREEZE, self.is_frozen, self._freezes)

    def end_snapshot(self) -> Sliced[None]:
        """Close the lives of the requests that the snapshot does not list."""
        before = self._before
        for count, slot in enumerate(list(before), 1):
            life = before.pop(slot)
            if self._lives.get(slot) is not life:
                self._close(life, "unknown")
            if not count % SLICE_ROWS:
                yield

    def closed(self, closed: agent_pb2.RequestClosed, table: Seen) -> None:
        """Close the life of a request that the engine has closed. The request table must still have the request."""
        if (life := self._lives.pop(slot := closed.slot, None)) is not None:
            life.think_tokens, life.output_tokens = int(table.think_tokens[slot]), int(table.output_tokens[slot])
            ended = "the client has gone" if closed.client_gone else FINISH_NAMES.get(closed.reason, "unknown")
            self._close(life, "handed_over" if closed.handed_over else ended)

    def report_begins(self) -> None:
        """Note that a report's events come next, of requests that have been opened: they happened before the decisions
        that follow from the report, which are logged first."""
        self._report_number = self._log.next_number()

    def happened(self, change: RequestChange, detail: str = "") -> None:
        """Note a change of a request: a new phase, an end of thinking, or the start or end of a preemption."""
        if (life := self._lives.get(change.slot)) is not None:
            life.think_tokens, life.output_tokens = change.think_tokens, change.output_tokens
            self._note(life, change.kind, change.phase, detail, self._report_number)

    def turned(self, slot: int, turns: tuple[str, str], is_on: bool, detail: str) -> None:
        """Note that something holds for a request from now on, or no longer, if that is new. turns: the kinds of both
        events; a life without one begins with what the second says."""
        if (life := self._lives.get(slot)) is not None:
            self._turn(life, turns, is_on, detail)

    def _turn(self, life: Life, turns: tuple[str, str], is_on: bool, detail: str) -> None:
        newest = next((event.kind for event in reversed(life.events) if event.kind in turns), turns[1])
        if newest != (kind := turns[not is_on]):
            self._note(life, kind, agent_pb2.PHASE_UNSPECIFIED, detail)

    def frozen(self, is_frozen: bool, why: str) -> Sliced[None]:
        """Note in all lives that the engine is frozen from now on, or that it has thawed, if that is new. why: the
        freezes."""
        self.is_frozen, self._freezes = is_frozen, why
        for count, life in enumerate(list(self._lives.values()), 1):
            self._turn(life, FREEZE, is_frozen, why)
            if not count % SLICE_ROWS:
                yield

    def lost(self) -> Sliced[None]:
        """Note that the stream is lost. A later stream may continue with the same requests."""
        lives = [*self._before.values(), *self._lives.values()]
        self._before, self._lives = {}, {}
        for count, life in enumerate(lives, 1):
            if life.is_live and life.session_id == self._session_id:
                self._note(life, "stream_lost", agent_pb2.PHASE_UNSPECIFIED)
                self._log.end_life(life)
            if not count % SLICE_ROWS:
                yield

    def decided(self, decision: Decision, seen: Seen, index: int, behind: Behind) -> None:
        """Log a decision other than a probe, if the life of its request is kept. index: the index in `seen` of the
        values that its rule saw."""
        if (life := self._lives.get(decision.slot)) is not None:
            values = (seen.packed_row(index),)
            self._log.add_decision(decision, life, self._circumstances(decision, values, seen, behind))

    def probed(self, probes: list[Decision], seen: Seen, indices: NDArray[np.intp], behind: Behind) -> None:
        """Log probes of one reason about requests with one policy, of those requests whose lives are kept. indices: for
        each probe the index in `seen` of the values that its rule saw."""
        if not self._lives:
            return
        values: tuple[bytes, ...] | TokenCounts
        if probes[0].reason == "eat" and not is_gated(behind.policy.entropy):
            values = TokenCounts(seen.think_tokens.take(indices), seen.output_tokens.take(indices))
        else:
            values = tuple(map(seen.packed_row, indices))
        under = self._circumstances(probes[0], values, seen, behind)
        before = seen.probed_tokens.take(indices)
        self._log.add_probes(probes, self._lives, under._replace(probed_tokens=before))

    def _circumstances(
        self, first: Decision, values: tuple[bytes, ...] | TokenCounts, seen: Seen, behind: Behind
    ) -> Circumstances:
        number, window_tokens = self._log.next_number(), seen.window.shape[1]
        first_id, session_id = first.decision_id, self._session_id
        return Circumstances(number, first_id, self.now, session_id, behind, values, window_tokens)

    def settled(self, decisions: Iterable[Decision]) -> None:
        """Note that decisions have got their outcomes."""
        for decision in decisions:
            decision.outcome_time = self.now
            if self._log.settled is not None and decision.holders:
                self._log.settled(decision)

    def _note(self, life: Life, kind: str, phase: int, detail: str = "", number: int = 0) -> None:
        """Add an event to a life. number: place in the order of the log, the next one if absent."""
        place, tokens = number or self._log.next_number(), (life.think_tokens, life.output_tokens)
        self._log.add_event(life, LifeEvent(place, self.now, kind, phase, *tokens, detail))

    def _close(self, life: Life, reason: str) -> None:
        life.close_number, life.close_time, life.close_reason = self._log.next_number(), self.now, reason
        self._log.end_life(life)
        if self._log.ended is not None:
            self._log.ended(life)
