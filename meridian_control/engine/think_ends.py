"""Counts the ends of thinking on one engine and the answers that follow, from the agent's reports.

All ends count, whether a rule, the cap or the model ended the thinking. The code does no I/O and reads no clock; each
object belongs to one session.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import reason_name
from meridian_control.common.table_columns import FORCED_END, NATURAL_END, NO_CAP
from meridian_control.engine.request_table import THINK
from meridian_control.engine.token_rows import FLAG_BY_CAP, FLAG_BY_RESERVE, FLAG_END, FLAG_FORCED, columns_of

if TYPE_CHECKING:
    from meridian_control.engine.decision_ledger import Ledger
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.engine.totals import Totals

# Reasons with which vLLM ends an answer before the model has, because it is too long or repeats itself.
CUT = (agent_pb2.FINISH_REASON_LENGTH, agent_pb2.FINISH_REASON_REPETITION)
FINISHED = (agent_pb2.FINISH_REASON_STOP, *CUT)
# An answer is empty if it has at most this many tokens, because the token that ends the text may count as one.
EMPTY_ANSWER = 1
# An answer is long if it has more than LONG_ANSWER times the median tokens of the newest USUAL_ANSWERS answers after
# natural ends; at least MIN_ANSWERS such answers must be known.
LONG_ANSWER, USUAL_ANSWERS, MIN_ANSWERS = 4, 128, 16


class ThinkEnds:
    def __init__(self, table: RequestTable, totals: Totals, ledger: Ledger) -> None:
        self._table, self._totals, self._ledger = table, totals, ledger
        # Lengths in tokens of the newest answers after natural ends.
        self._usual_answers: deque[int] = deque(maxlen=USUAL_ANSWERS)

    def count(self, slot: int, flags: int, think_tokens: int) -> str:
        """Count an end of a live request's thinking after `think_tokens` thinking tokens; return the reason."""
        table, forced = self._table, bool(flags & FLAG_FORCED)
        reason = by_limit(flags) or (self._rule(slot, think_tokens) if forced else "natural")
        self._totals.ends[reason] += 1
        if table.ended[slot]:
            self._totals.answers[f"reentry_after_{how(bool(table.forced[slot]))}"] += 1
        table.note_think_end(slot, forced, NATURAL_END if reason == "natural" else FORCED_END)
        return reason

    def count_unknown(self, tokens: agent_pb2.TokenColumns) -> None:
        """Count ends of thinking in rows of requests that the agent never reported as opened. The rule behind a forced
        one is not known."""
        (slots, _, flags, _), _ = columns_of(tokens)
        ends = np.flatnonzero(flags & FLAG_END)
        for slot, flag in zip(slots[ends].tolist(), flags[ends].tolist(), strict=True):
            if not self._table.holds(slot):
                forced = reason_name(agent_pb2.FORCE_REASON_UNSPECIFIED) if flag & FLAG_FORCED else "natural"
                self._totals.ends[by_limit(flag) or forced] += 1

    def _rule(self, slot: int, think_tokens: int) -> str:
        """Return the rule that ended a request's thinking, and count the tokens that were left before the cap."""
        table = self._table
        reason = reason_name(int(table.end_decided[slot]))
        if table.end_decided[slot] == agent_pb2.FORCE_REASON_EXTENSION and slot in self._ledger.forces:
            # Only a decision of this stream names the capability.
            reason = self._ledger.forces[slot].reason
        if (cap := table.cap_in_force(slot)) != NO_CAP:
            self._totals.below_cap[reason] += max(0, cap - think_tokens)
        return reason

    def count_answer(self, closed: agent_pb2.RequestClosed) -> None:
        """Count the thinking and the answer of a finished request. Aborted requests are not counted, nor are requests
        that another engine continues, except for the complete thinking of a request that is handed over."""
        slot, table, totals = closed.slot, self._table, self._totals
        if not table.holds(slot) or closed.reason not in FINISHED or is_continued(table, slot):
            return
        if think_tokens := int(table.think_tokens[slot]):
            totals.think_tokens.add_one(think_tokens)
        if closed.handed_over:
            return
        if table.phase[slot] == THINK:
            totals.answers["unended"] += 1
        elif table.ended[slot]:
            length, forced = int(table.output_tokens[slot]), bool(table.forced[slot])
            totals.answers[f"{self._answer(length)}_after_{how(forced)}"] += 1
            if not forced:
                self._usual_answers.append(length)

    def _answer(self, length: int) -> str:
        if length <= EMPTY_ANSWER:
            return "empty"
        usual = self._usual_answers
        is_long = len(usual) >= MIN_ANSWERS and length > LONG_ANSWER * statistics.median(usual)
        return "long" if is_long else "answered"


def is_continued(table: RequestTable, slot: int) -> bool:
    """Whether another engine continues a live request from its KV blocks."""
    info = table.info[slot]
    return info is not None and info.remote_decode


def by_limit(flags: int) -> str:
    """Return the limit that ended thinking, by the flags of the end's row: hard_cap, answer_reserve, or premature_stop
    for a reserve that replaces the model's stop; empty if a rule or the model ended it."""
    if flags & FLAG_BY_RESERVE:
        return "answer_reserve" if flags & FLAG_BY_CAP else "premature_stop"
    return "hard_cap" if flags & FLAG_BY_CAP else ""


def how(forced: bool) -> str:
    return "forced" if forced else "natural"
