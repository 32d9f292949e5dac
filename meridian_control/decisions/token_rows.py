"""Turns the token rows of a report into arrays, sorted by slot and, within a slot, by the order of generation.

The module checks the columns and their bounds; it does not know their effect on a request. The code does no I/O and
reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.packed_fields import NOTHING, floats, integers, packed_fields
from meridian_control.decisions.table_columns import ANSWER_TOKEN, NO_TOKEN, OTHER_TOKEN, THINK_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Short names for the row flags of meridian.v1.TokenFlag.
FLAG_MARKER = agent_pb2.TOKEN_FLAG_MARKER
FLAG_END = agent_pb2.TOKEN_FLAG_END
FLAG_FROM_OUTPUT = agent_pb2.TOKEN_FLAG_FROM_OUTPUT
FLAG_FORCED = agent_pb2.TOKEN_FLAG_FORCED
FLAG_BY_CAP = agent_pb2.TOKEN_FLAG_BY_CAP
FLAG_BY_RESERVE = agent_pb2.TOKEN_FLAG_BY_RESERVE
FLAG_PARAGRAPH = agent_pb2.TOKEN_FLAG_PARAGRAPH
FLAG_BOUNDARY = agent_pb2.TOKEN_FLAG_SENTENCE | FLAG_PARAGRAPH
TAKE_BACK_SHIFT = int(agent_pb2.TOKEN_FLAG_TAKE_BACK).bit_length() - 1

# Numbers of the columns' fields, by type.
COLUMNS = agent_pb2.TokenColumns
INTEGERS = (
    COLUMNS.SLOT_FIELD_NUMBER,
    COLUMNS.PHASE_FIELD_NUMBER,
    COLUMNS.FLAGS_FIELD_NUMBER,
    COLUMNS.END_RANK_FIELD_NUMBER,
)
FLOATS = (
    COLUMNS.ENTROPY_NATS_FIELD_NUMBER,
    COLUMNS.END_LOGPROB_NATS_FIELD_NUMBER,
    COLUMNS.TOP_LOGPROB_NATS_FIELD_NUMBER,
)

# Kinds of a token in the type of their column.
ANSWER_KIND, OTHER_KIND = np.uint8(ANSWER_TOKEN), np.uint8(OTHER_TOKEN)

# Largest number of rows of one slot in a report. No correct agent sends more, however many steps a report merges.
MAX_ROWS_PER_SLOT = 1 << 14


class TokenRows(NamedTuple):
    """The columns of the rows, each [rows], and where each slot's rows begin and end.

    thinks: whether the row belongs to thinking. thinking, answering: whether its token is text of the thinking or of
    the answer. at_ms: time at which the row came. number: index of the row in the report. begins: whether the row is
    the first of its slot. s: the slots that have rows; first, last: indices of their first and last rows; all three
    [slots]. flags_seen: the bits that the flags of any row have.
    """

    slot: NDArray[np.int64]
    phase: NDArray[np.int64]
    flags: NDArray[np.int64]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.int64]
    thinks: NDArray[np.bool_]
    thinking: NDArray[np.bool_]
    answering: NDArray[np.bool_]
    at_ms: NDArray[np.float64]
    number: NDArray[np.intp]
    begins: NDArray[np.bool_]
    first: NDArray[np.intp]
    last: NDArray[np.intp]
    s: NDArray[np.int64]
    flags_seen: int
    # Log-probabilities of the end marker and of the likeliest token, in the order of the report.
    told_end_logprob_nats: NDArray[np.float32]
    told_top_logprob_nats: NDArray[np.float32]

    def before(self, column: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        """Return the column's value in the previous row of the same slot; `first`, [slots], is used for first rows."""
        shifted = np.empty_like(column)
        shifted[1:] = column[:-1]
        shifted[self.first] = first
        return shifted

    def end_logprob_nats(self, row: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return the end marker's log-probability in these rows."""
        return self.told_end_logprob_nats[self.number[row]]

    def margin_nats(self, row: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the log-probability of the likeliest token minus that of the end marker in these rows, NaN if either
        was not measured."""
        number = self.number[row]
        # The difference is taken in double precision, so that a rule compares the same number that `explain` shows.
        with np.errstate(invalid="ignore"):
            margin: NDArray[np.float64] = (
                self.told_top_logprob_nats[number].astype(np.float64) - self.told_end_logprob_nats[number]
            )
        return margin


def rows_of(columns: agent_pb2.TokenColumns, live: NDArray[np.bool_], at_ms: float | NDArray[np.float64]) -> TokenRows:
    """Return the rows of live slots. live: [slots]. at_ms: time at which the rows came, one for all or [rows].

    Raises ValueError if the columns differ in length or if a slot has too many rows.
    """
    told_slot, told_phase, told_flags, told_entropy, told_rank, *logprobs = _arrays(columns)
    when_ms = np.empty(len(told_slot))
    when_ms[:] = at_ms
    is_live = live.take(told_slot, mode="clip") & (told_slot < len(live))
    # NumPy sorts numbers of 16 bits in linear time; slots of live requests have no more.
    order = told_slot.astype(np.uint16).argsort(kind="stable")
    if np.count_nonzero(is_live) < len(order):
        order = order[is_live[order]]
    slot, phase, flags = told_slot.take(order), told_phase.take(order), told_flags.take(order)
    begins = differs(slot)
    first = begins.nonzero()[0]
    last = np.empty_like(first)
    last[:-1], last[-1:] = first[1:] - 1, len(slot) - 1
    if len(slot) > MAX_ROWS_PER_SLOT and (most := int((last - first).max()) + 1) > MAX_ROWS_PER_SLOT:
        raise ValueError(f"a slot must have at most {MAX_ROWS_PER_SLOT} rows in a report; got {most}")
    seen = int(np.bitwise_or.reduce(flags))
    thinks = phase == agent_pb2.PHASE_THINK
    thinking, answering = thinks, phase == agent_pb2.PHASE_OUTPUT
    if seen & FLAG_MARKER:
        text = (flags & FLAG_MARKER) == 0
        thinking, answering = thinks & text, answering & text
    return TokenRows(
        slot=slot,
        phase=phase,
        flags=flags,
        entropy_nats=told_entropy.take(order),
        end_rank=told_rank.take(order),
        thinks=thinks,
        thinking=thinking,
        answering=answering,
        at_ms=when_ms.take(order),
        number=order,
        begins=begins,
        first=first,
        last=last,
        s=slot.take(first),
        flags_seen=seen,
        told_end_logprob_nats=logprobs[0],
        told_top_logprob_nats=logprobs[1],
    )


def token_kinds(rows: TokenRows) -> NDArray[np.uint8]:
    """Return the kind of each row's token, as the table's column `newest_token` has it, [rows]."""
    kind: NDArray[np.uint8] = np.where(rows.answering, ANSWER_KIND, OTHER_KIND)
    if rows.flags_seen & FLAG_END:
        kind[(rows.flags & FLAG_END) != 0] = THINK_END
    return kind


class Intervals(NamedTuple):
    """Milliseconds before answer tokens: the row of each token, and the kind of the token before it, [intervals]
    each."""

    row: NDArray[np.intp]
    ms: NDArray[np.float64]
    previous: NDArray[np.uint8]

    @property
    def output_itl_ms(self) -> NDArray[np.float64]:
        """The milliseconds from one answer token to the next."""
        output_itl_ms: NDArray[np.float64] = self.ms[self.previous == ANSWER_TOKEN]
        return output_itl_ms

    @property
    def ttot_ms(self) -> NDArray[np.float64]:
        """The milliseconds from an end of thinking to the answer's first token."""
        ttot_ms: NDArray[np.float64] = self.ms[self.previous == THINK_END]
        return ttot_ms


def intervals(
    rows: TokenRows, kind: NDArray[np.uint8], newest: NDArray[np.uint8], newest_ms: NDArray[np.float64]
) -> Intervals:
    """Return the milliseconds from each answer token's previous token to the answer token.

    Tokens of a request that share a time are assumed to be spread evenly over the time since the request's previous
    tokens. The first tokens of a request yield no latency, because no earlier token time is known. kind: as
    `token_kinds` returns it. newest, newest_ms: kind and time of each slot's newest token before the report, [slots].
    """
    answer = rows.answering.nonzero()[0]
    # First row and number of the rows that share the slot and the time of each answer token.
    together = (rows.begins | differs(rows.at_ms)).nonzero()[0]
    if len(together) == len(kind):
        first, count = answer, np.ones(len(answer), np.int64)
    else:
        group = together.searchsorted(answer, side="right")
        first = together.take(group - 1)
        over = np.empty(len(together) + 1, np.int64)
        over[:-1], over[-1] = together, len(kind)
        count = over.take(group) - first
    before, before_ms = rows.before(kind, newest), rows.before(rows.at_ms, newest_ms)
    known = (before.take(first) != NO_TOKEN).nonzero()[0]
    answer, first, count = answer.take(known), first.take(known), count.take(known)
    # A report that was delayed in transit gives its rows times that may lie before the previous report's times.
    interval_ms = np.maximum(rows.at_ms.take(first) - before_ms.take(first), 0.0) / count
    return Intervals(answer, interval_ms, before.take(answer))


def differs(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark each entry that differs from the previous entry, and the first entry."""
    found = np.empty(len(column), bool)
    found[:1] = True
    np.not_equal(column[1:], column[:-1], out=found[1:])
    return found


def owners(slot: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the index of the first value of each slot, and for each value the number of its slot among them. slot:
    ascending."""
    begins = differs(slot)
    return begins.nonzero()[0], begins.cumsum() - 1


class Newest:
    """Computes, for values in slots, the slot's newest values up to each of them.

    slot: [values], ascending. most: the largest number of newest values of a slot that any column keeps.
    """

    def __init__(self, slot: NDArray[np.int64], most: int) -> None:
        first, self._owner = owners(slot)
        self._slots = slot
        self._once = len(first) == len(slot)
        if self._once:
            self.number = np.ones(len(slot), np.int64)
            return
        self._slots, ages = slot[first], np.arange(most)
        # Places in one array with the values of each slot, oldest first: the kept values, then those of the report.
        at = np.arange(len(slot)) + most * (self._owner + 1)
        self._at, self._size = at, len(slot) + most * len(first)
        self._newest = at[:, None] - ages
        self._kept = self._newest[first] - 1
        self.number = np.arange(1, len(slot) + 1) - first[self._owner]

    def of(self, values: NDArray[Any], held: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return for each value the slot's newest values up to this one, and the slot's newest values before the
        report; both newest first, [values, number].

        held: the table's column with the newest values of each slot, [slots, number].
        """
        number, before = held.shape[1], held[self._slots]
        if self._once:
            newest = np.empty_like(before)
            newest[:, 0], newest[:, 1:] = values, before[:, :-1]
            return newest, before
        line = np.empty(self._size, held.dtype)
        line[self._at] = values
        line[self._kept[:, :number]] = before
        return line[self._newest[:, :number]], before[self._owner]


def _arrays(columns: agent_pb2.TokenColumns) -> tuple[NDArray[Any], ...]:
    packed = packed_fields(columns)
    told: tuple[Sequence[int], ...] = (columns.slot, columns.phase, columns.flags, columns.end_rank)
    slot, phase, flags, end_rank = [
        integers(packed.get(field, NOTHING), numbers) for field, numbers in zip(INTEGERS, told, strict=True)
    ]
    entropy, end_logprob, top_logprob = [floats(packed.get(field, NOTHING)) for field in FLOATS]
    if not len(top_logprob):
        # An older agent leaves the column out.
        top_logprob = np.full(len(slot), np.nan, np.float32)
    arrays = (slot, phase, flags, entropy, end_rank, end_logprob, top_logprob)
    if len({len(a) for a in arrays}) != 1:
        raise ValueError(f"token columns must have one length; got {[len(a) for a in arrays]}")
    if len(phase) and not 0 <= phase.min() <= phase.max() <= agent_pb2.PHASE_OUTPUT:
        phase[(phase < 0) | (phase > agent_pb2.PHASE_OUTPUT)] = agent_pb2.PHASE_UNSPECIFIED
    return arrays
