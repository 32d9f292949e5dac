"""How thinking ends on one engine, and what comes of it: counted from what the agent reports, whoever ended it.

Owns the table's columns `ended` and `forced`. Pure; one session at a time.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.requests import FLAG_BY_CAP, FLAG_END, FLAG_FORCED, THINK
from meridian_control.words import reason_name

if TYPE_CHECKING:
    from meridian_control.decision_log import Journal
    from meridian_control.requests import RequestTable
    from meridian_control.totals import Totals

FINISHED = (agent_pb2.FINISH_REASON_STOP, agent_pb2.FINISH_REASON_LENGTH)
# An answer is long that has LONG_ANSWER times the median tokens of the newest USUAL_ANSWERS answers after natural ends,
# once MIN_ANSWERS of them are known.
LONG_ANSWER, USUAL_ANSWERS, MIN_ANSWERS = 4, 128, 16


class Endings:
    def __init__(self, table: RequestTable, totals: Totals, journal: Journal | None) -> None:
        self._table, self._totals, self._journal = table, totals, journal
        # Lengths of the newest answers after natural ends, in tokens.
        self._usual_answers: deque[int] = deque(maxlen=USUAL_ANSWERS)

    def count(self, tokens: agent_pb2.TokenColumns) -> list[int]:
        """Count why thinking ended in tokens that the table has taken in.

        Returns the slots of live requests in which it did.
        """
        flags = np.fromiter(tokens.flags, np.int64, len(tokens.flags))
        ended = []
        for row in np.flatnonzero(flags & FLAG_END).tolist():
            slot = tokens.slot[row]
            reason = self._reason(slot, int(flags[row]))
            self._totals.ends[reason] += 1
            if self._table.holds(slot):
                self._ended(slot, reason, bool(flags[row] & FLAG_FORCED))
                ended.append(slot)
        return ended

    def _reason(self, slot: int, flags: int) -> str:
        if flags & FLAG_BY_CAP:
            return "hard_cap"
        return self._rule(slot) if flags & FLAG_FORCED and self._table.holds(slot) else "natural"

    def _rule(self, slot: int) -> str:
        """The rule that ended a request's thinking; what it left to the cap is counted."""
        table = self._table
        reason = reason_name(int(table.end_decided[slot]))
        if table.max_think_tokens[slot] >= 0 and not table.cap_shadow[slot]:
            left = table.max_think_tokens[slot] - table.think_tokens[slot]
            self._totals.below_cap[reason] += max(0, int(left))
        return reason

    def _ended(self, slot: int, reason: str, forced: bool) -> None:
        table = self._table
        if table.ended[slot]:
            self._totals.answers[f"reentry_after_{how(bool(table.forced[slot]))}"] += 1
        table.ended[slot], table.forced[slot] = True, forced
        if self._journal is not None:
            self._journal.ended(slot, reason, table)

    def count_answer(self, closed: agent_pb2.RequestClosed) -> None:
        """Count what a finished request made of its thinking; an aborted one says nothing."""
        slot, table, totals = closed.slot, self._table, self._totals
        if not table.holds(slot) or closed.reason not in FINISHED:
            return
        if think_tokens := int(table.think_tokens[slot]):
            totals.think_tokens.add(np.array([think_tokens]))
        if table.phase[slot] == THINK:
            totals.answers["unended"] += 1
        elif table.ended[slot]:
            length, forced = int(table.output_tokens[slot]), bool(table.forced[slot])
            totals.answers[f"{self._answer(length)}_after_{how(forced)}"] += 1
            if not forced:
                self._usual_answers.append(length)

    def _answer(self, length: int) -> str:
        if length <= 1:
            return "empty"
        usual = self._usual_answers
        is_long = len(usual) >= MIN_ANSWERS and length > LONG_ANSWER * statistics.median(usual)
        return "long" if is_long else "answered"


def how(forced: bool) -> str:
    return "forced" if forced else "natural"
