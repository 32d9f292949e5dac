"""Writes the events of one session to the decision log.

The module owns the choice of the requests that are kept. The session passes in the time. The module runs on the
server's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.decision_log.records import Circumstances, Decision, Life, LifeEvent
from meridian_control.decision_log.request_ids import sampled
from meridian_control.decisions.moments import Moments

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
    """Writes the events of one session. `now` is the time of the message that the session is handling.

    While requests run, the methods only queue what the session tells them. The log calls the methods whose names begin
    with `_write` later, in the same order, and only these change lives. Snapshots and lost streams let the log catch up
    first.
    """

    def __init__(self, log: DecisionLog, engine_id: str, incarnation: str, session_id: str, now: datetime) -> None:
        self._log, self._engine_id, self._incarnation, self._session_id = log, engine_id, incarnation, session_id
        self.now = now
        self._lives: dict[int, Life] = {}
        # Slots of the requests that have lives once the log has taken in all that is queued.
        self._kept: set[int] = set()
        # The circumstances of the newest decisions, which the next decisions may share.
        self._under: Circumstances | None = None

    def opened(self, opened: agent_pb2.RequestOpened, ratio: float) -> None:
        """Begin the life of a request if the request belongs to the sample; `ratio` is the sampled share, 0 to 1."""
        if sampled(opened.request_id, ratio):
            self._kept.add(opened.slot)
            self._log.queue(self._write_opened, (opened, self.now))
        elif opened.slot in self._kept:
            self._kept.remove(opened.slot)
            self._log.queue(self._write_replaced, opened.slot)

    def snapshot(self, requests: Iterable[agent_pb2.RequestOpened], ratio: float) -> None:
        """Update the lives from a snapshot: continue known requests, begin new ones, and close missing ones."""
        self._log.catch_up()
        before, self._lives = self._lives, {}
        for opened in requests:
            life = self._log.back((self._engine_id, self._incarnation, opened.request_id))
            if life is None:
                self._lives.pop(opened.slot, None)
                if sampled(opened.request_id, ratio):
                    joined_late = bool(opened.think_tokens or opened.output_tokens)
                    self._write_opened((opened, self.now), joined_late)
                continue
            self._lives[opened.slot] = life
            life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
            if life.session_id != self._session_id:
                life.session_id = self._session_id
                self._note(life, self.now, "stream_back", opened.phase)
        for slot, life in before.items():
            if self._lives.get(slot) is not life:
                self._close(life, self.now, "unknown")
        self._kept = set(self._lives)

    def closed(self, closed: Iterable[agent_pb2.RequestClosed], table: RequestTable) -> None:
        """Close the lives of requests that the engine has closed. The request table must still have the requests."""
        for request in closed:
            if (slot := request.slot) in self._kept:
                self._kept.remove(slot)
                reason = "handed_over" if request.handed_over else FINISH_NAMES.get(request.reason, "unknown")
                tokens = int(table.think_tokens[slot]), int(table.output_tokens[slot])
                self._log.queue(self._write_closed, (slot, self.now, reason, *tokens))
                if self._log.ended is not None:
                    self._log.catch_up()

    def happened(self, change: RequestChange, detail: str = "") -> None:
        """Note a change of a request: a new phase, an end of thinking, or the start or end of a preemption."""
        if change.slot in self._kept:
            self._log.queue(self._write_change, (change, self.now, detail))

    def in_control_group(self, slot: int) -> None:
        """Note, once in a life, that the entropy rules only shadow the request."""
        if slot in self._kept:
            self._log.queue(self._write_control_group, (slot, self.now))

    def lost(self) -> None:
        """Note that the stream is lost. A later stream may continue with the same requests."""
        self._log.catch_up()
        for life in self._lives.values():
            if life.session_id == self._session_id:
                self._note(life, self.now, "stream_lost", agent_pb2.PHASE_UNSPECIFIED)
                self._log.over(life)
        self._lives, self._kept = {}, set()

    def decided(
        self,
        decisions: list[Decision],
        indices: list[int],
        seen: Seen,
        *,
        shadow: bool,
        revision: int,
        behind: tuple[Policy, Shortening | None, LevelChange | None],
    ) -> None:
        """Log decisions of one kind and reason about requests whose lives are kept.

        indices: for each decision the index in `seen` of the values that its rule saw. behind: the policy that was in
        force for all the requests, with the revision `revision`, the budget or pressure entry that has shortened it,
        and the newest change of the entry's level.
        """
        if self._kept.isdisjoint([made.slot for made in decisions]):
            return
        under, now, (policy, *by) = self._under, self.now, behind
        if under is None or under.policy is not policy or under[:4] != (now, self._session_id, shadow, revision):
            under = Circumstances(now, self._session_id, shadow, revision, policy, seen.window.shape[1])
            self._under = under
        if isinstance(seen, Moments):
            number = self._log.queue_moments(seen.held)
            self._log.queue(self._write_decided_within, (decisions, indices, number, under, by))
        else:
            rows = [seen.packed_row(index) for index in indices]
            self._log.queue(self._write_decided, (decisions, rows, under, by))

    def settled(self, made: Decision) -> None:
        """Note that a decision has got its outcome."""
        made.outcome_time = self.now
        if self._log.settled is not None:
            self._log.catch_up()
            if made.is_logged:
                self._log.settled(made)

    # --------------------------------------------------------------------------------------------------- later writing

    def _write_opened(self, told: tuple[agent_pb2.RequestOpened, datetime], joined_late: bool = False) -> None:
        opened, now = told
        # The copy lets the rest of the message be freed: a reference to a part of a protobuf message keeps the whole
        # message.
        copied = agent_pb2.RequestOpened()
        copied.CopyFrom(opened)
        life = Life(self._engine_id, self._incarnation, self._session_id, copied, now, joined_late)
        life.think_tokens, life.output_tokens = opened.think_tokens, opened.output_tokens
        self._log.begin(life)
        self._lives[opened.slot] = life
        self._note(life, now, "opened", opened.phase)

    def _write_replaced(self, slot: int) -> None:
        self._lives.pop(slot, None)

    def _write_closed(self, told: tuple[int, datetime, str, int, int]) -> None:
        slot, now, reason, think_tokens, output_tokens = told
        life = self._lives.pop(slot)
        life.think_tokens, life.output_tokens = max(0, think_tokens), max(0, output_tokens)
        self._close(life, now, reason)

    def _write_change(self, told: tuple[RequestChange, datetime, str]) -> None:
        change, now, detail = told
        life = self._lives[change.slot]
        life.think_tokens, life.output_tokens = max(0, change.think_tokens), max(0, change.output_tokens)
        self._note(life, now, change.kind, change.phase, detail)

    def _write_control_group(self, told: tuple[int, datetime]) -> None:
        slot, now = told
        life, detail = self._lives[slot], "the entropy rules only shadow this request"
        if all(event.kind != "control_group" for event in life.events):
            self._note(life, now, "control_group", agent_pb2.PHASE_UNSPECIFIED, detail)

    def _write_decided_within(self, told: tuple[list[Decision], list[int], int, Circumstances, Any]) -> None:
        decisions, indices, number, under, by = told
        rows = self._log.moment_rows[number]
        self._write_decided((decisions, [rows[index] for index in indices], under, by))

    def _write_decided(self, told: tuple[list[Decision], list[bytes], Circumstances, Any]) -> None:
        decisions, rows, under, by = told
        lives, logged = self._lives, []
        for made, row in zip(decisions, rows, strict=True):
            if (life := lives.get(made.slot)) is not None:  # type: ignore[arg-type]
                made.life, made.under, made.seen, made.is_logged = life, under, row, True
                logged.append(made)
                if by[0] is not None and _by_entry(made, under.policy, by[0]):
                    made.shortening, made.level_change = by
        self._log.add_decisions(logged)

    def _note(self, life: Life, now: datetime, kind: str, phase: int, detail: str = "") -> None:
        self._log.add(life, LifeEvent(0, now, kind, phase, life.think_tokens, life.output_tokens, detail))

    def _close(self, life: Life, now: datetime, reason: str) -> None:
        self._note(life, now, "closed", agent_pb2.PHASE_UNSPECIFIED, reason)
        life.close_time = now
        self._log.over(life)
        if self._log.ended is not None:
            self._log.ended(life)


def _by_entry(made: Decision, policy: Policy, shortening: Shortening) -> bool:
    """Whether the entry has changed the value on which the decision depends."""
    if (changed := BY_ENTRY.get((made.kind, made.reason))) is None:
        return False
    now, without = (getattr(getattr(one, changed[0]), changed[1]) for one in (policy, shortening.without))
    return bool(now != without)
