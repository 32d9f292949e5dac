"""Writes the events of one session to the decision log.

The module owns the choice of the requests that are kept. The session passes in the time. The module runs on the
server's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.decision_log.records import Circumstances, Decision, Life, LifeEvent
from meridian_control.decision_log.request_ids import sampled

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from meridian_control.budgets.stages import Shortening
    from meridian_control.decision_log.log import DecisionLog
    from meridian_control.decision_log.records import Decision
    from meridian_control.decisions.moments import RequestChange
    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.decisions.termination import Seen
    from meridian_control.policy.model import Policy
    from meridian_control.pressure.controller import LevelChange

# Section and field of the value that a budget or pressure may have changed for a decision, by the decision's kind and
# reason.
BY_ENTRY = {
    **{("cap", reason): ("scheduler", "max_think_tokens") for reason in ("budget", "pressure", "empty_answer")},
    ("force", "soft_close"): ("scheduler", "soft_think_tokens"),
    **{("force", reason): ("entropy", "shadow") for reason in ENTROPY_REASONS},
}
FINISH_NAMES = {
    agent_pb2.FINISH_REASON_STOP: "stop",
    agent_pb2.FINISH_REASON_LENGTH: "length",
    agent_pb2.FINISH_REASON_ABORT: "abort",
    agent_pb2.FINISH_REASON_ERROR: "error",
}


class Journal:
    """Writes the events of one session. `now` is the time of the message that the session is handling."""

    def __init__(self, log: DecisionLog, engine_id: str, incarnation: str, session_id: str, now: datetime) -> None:
        self._log, self._engine_id, self._incarnation, self._session_id = log, engine_id, incarnation, session_id
        self.now = now
        self._lives: dict[int, Life] = {}

    def opened(self, opened: agent_pb2.RequestOpened, ratio: float, joined_late: bool = False) -> None:
        """Begin the life of a request if the request belongs to the sample; `ratio` is the sampled share, 0 to 1."""
        self._lives.pop(opened.slot, None)
        if not sampled(opened.request_id, ratio):
            return
        # The copy lets the rest of the message be freed: a reference to a part of a protobuf message keeps the whole
        # message.
        copied = agent_pb2.RequestOpened()
        copied.CopyFrom(opened)
        life = Life(self._engine_id, self._incarnation, self._session_id, copied, self.now, joined_late)
        life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
        self._log.begin(life)
        self._lives[opened.slot] = life
        self._note(life, "opened", opened.phase)

    def snapshot(self, requests: Iterable[agent_pb2.RequestOpened], ratio: float) -> None:
        """Update the lives from a snapshot: continue known requests, begin new ones, and close missing ones."""
        before, self._lives = self._lives, {}
        for opened in requests:
            life = self._log.back((self._engine_id, self._incarnation, opened.request_id))
            if life is None:
                self.opened(opened, ratio, joined_late=bool(opened.think_tokens or opened.output_tokens))
                continue
            self._lives[opened.slot] = life
            life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
            if life.session_id != self._session_id:
                life.session_id = self._session_id
                self._note(life, "stream_back", opened.phase)
        for slot, life in before.items():
            if self._lives.get(slot) is not life:
                self._close(life, "unknown")

    def closed(self, closed: Iterable[agent_pb2.RequestClosed], table: RequestTable) -> None:
        """Close the lives of requests that the engine has closed. The request table must still have the requests."""
        for request in closed:
            if (life := self._lives.pop(request.slot, None)) is not None:
                self._count(life, request.slot, table)
                reason = FINISH_NAMES.get(request.reason, "unknown")
                self._close(life, "handed_over" if request.handed_over else reason)

    def happened(self, change: RequestChange, detail: str = "") -> None:
        """Note a change of a request: a new phase, an end of thinking, or the start or end of a preemption."""
        if (life := self._lives.get(change.slot)) is not None:
            life.think_tokens, life.output_tokens = max(0, change.think_tokens), max(0, change.output_tokens)
            self._note(life, change.kind, change.phase, detail)

    def in_control_group(self, slot: int) -> None:
        """Note, once in a life, that the entropy rules only shadow the request."""
        life = self._lives.get(slot)
        if life is not None and all(event.kind != "control_group" for event in life.events):
            self._note(life, "control_group", agent_pb2.PHASE_UNSPECIFIED, "the entropy rules only shadow this request")

    def lost(self) -> None:
        """Note that the stream is lost. A later stream may continue with the same requests."""
        for life in self._lives.values():
            if life.session_id == self._session_id:
                self._note(life, "stream_lost", agent_pb2.PHASE_UNSPECIFIED)
                self._log.over(life)
        self._lives = {}

    def decided(
        self,
        decisions: Iterable[tuple[Decision, int]],
        shadow: bool,
        seen: Seen,
        policy: Policy,
        revision: int,
        *,
        shortening: Shortening | None = None,
        level_change: LevelChange | None = None,
    ) -> None:
        """Log decisions of one kind and reason about requests whose lives are kept.

        decisions: the decisions, each with the index in `seen` of the values that its rule saw. `policy` and `revision`
        were in force for all the requests; `shortening` is the budget or pressure entry that has shortened `policy`,
        `level_change` the newest change of the entry's level.
        """
        under = Circumstances(self.now, self._session_id, shadow, revision, policy, seen.window.shape[1])
        for made, index in decisions:
            if (life := self._lives.get(made.slot)) is None:  # type: ignore[arg-type]
                continue
            made.number, made.life, made.under, made.seen = self._log.number(), life, under, seen.packed_row(index)
            made.is_logged = True
            if shortening is not None and _by_entry(made, policy, shortening):
                made.shortening, made.level_change = shortening, level_change
            self._log.add(life, made, life.probes if made.kind == "probe" else life.events)

    def settled(self, made: Decision) -> None:
        """Note that a decision has got its outcome."""
        made.outcome_time = self.now
        if self._log.settled is not None:
            self._log.settled(made)

    @staticmethod
    def _count(life: Life, slot: int, table: RequestTable) -> None:
        life.think_tokens = max(0, int(table.think_tokens[slot]))
        life.output_tokens = max(0, int(table.output_tokens[slot]))

    def _note(self, life: Life, kind: str, phase: int, detail: str = "") -> None:
        event = LifeEvent(self._log.number(), self.now, kind, phase, life.think_tokens, life.output_tokens, detail)
        self._log.add(life, event, life.events)

    def _close(self, life: Life, reason: str) -> None:
        self._note(life, "closed", agent_pb2.PHASE_UNSPECIFIED, reason)
        life.close_time = self.now
        self._log.over(life)
        if self._log.ended is not None:
            self._log.ended(life)


def _by_entry(made: Decision, policy: Policy, shortening: Shortening) -> bool:
    """Whether the entry has changed the value on which the decision depends."""
    if (changed := BY_ENTRY.get((made.kind, made.reason))) is None:
        return False
    now, without = (getattr(getattr(one, changed[0]), changed[1]) for one in (policy, shortening.without))
    return bool(now != without)
