"""Turns the token rows of a report into arrays, sorted by slot and, within a slot, by the order of generation.

The module checks the columns and their bounds; it does not know their effect on a request. The code does no I/O and
reads no clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.errors import BadReport
from meridian_control.common.masks import all_in, any_in
from meridian_control.common.table_columns import ANSWER_TOKEN, NO_TOKEN, OTHER_TOKEN, THINK_END

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
FLAG_GOES_ON = agent_pb2.TOKEN_FLAG_SENTENCE_GOES_ON
FLAG_PARAGRAPH = agent_pb2.TOKEN_FLAG_PARAGRAPH
FLAG_BOUNDARY = agent_pb2.TOKEN_FLAG_SENTENCE | FLAG_PARAGRAPH
TAKE_BACK_SHIFT = int(agent_pb2.TOKEN_FLAG_TAKE_BACK).bit_length() - 1

# Kinds of a token that is none of the answer, and of one that is.
KINDS = np.array([OTHER_TOKEN, ANSWER_TOKEN], np.uint8)

# Bytes of each row in TokenColumns.byte_columns.
ROW_BYTES = 7 * 4
# Largest number of rows of one slot in a report. No correct agent sends more, however many steps a report merges.
MAX_ROWS_PER_SLOT = 1 << 14


class TokenRows(NamedTuple):
    """The columns of the rows, each [rows], and where each slot's rows begin and end.

    phase_after: phase of the request after the row. thinks: whether the row belongs to thinking. thinking, answering:
    whether its token is text of the thinking or of the answer. at_ms: time at which the row came. number: index of the
    row in the report. owner: index of the row's slot in `s`. s: the slots that have rows; first, last: indices of their
    first and last rows; all three [slots]. edges: `first`, followed by the number of rows. flags_seen: the bits that
    the flags of any row have. sent: number of rows in the report, those of unknown requests included.
    """

    slot: NDArray[np.int64]
    phase: NDArray[np.int64]
    phase_after: NDArray[np.int64]
    flags: NDArray[np.int64]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.int64]
    thinks: NDArray[np.bool_]
    thinking: NDArray[np.bool_]
    answering: NDArray[np.bool_]
    at_ms: NDArray[np.float64]
    number: NDArray[np.intp]
    owner: NDArray[np.intp]
    first: NDArray[np.intp]
    last: NDArray[np.intp]
    edges: NDArray[np.intp]
    s: NDArray[np.int64]
    flags_seen: int
    end_logprob_nats: NDArray[np.float32]
    sent: int

    def before(self, column: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        """Return the column's value in the previous row of the same slot; `first`, [slots], is used for first rows."""
        shifted = np.empty_like(column)
        shifted[1:] = column[:-1]
        shifted[self.first] = first
        return shifted

    def newest_signals(self) -> NDArray[np.uint32]:
        """Return the bits of each slot's newest end rank, entropy and log-probability of the end marker, [slots, 3]."""
        newest = np.empty((3, len(self.last)), np.uint32)
        newest[0] = self.end_rank.take(self.last)
        for bits, column in zip(newest[1:].view(np.float32), (self.entropy_nats, self.end_logprob_nats), strict=True):
            column.take(self.last, out=bits, mode="clip")
        return newest.T


def rows_of(columns: agent_pb2.TokenColumns, live: NDArray[np.bool_], at_ms: float | NDArray[np.float64]) -> TokenRows:
    """Return the rows of live slots. live: [slots]. at_ms: time at which the rows came, one for all or [rows].

    Raises BadReport if the columns differ in length or if a slot has too many rows.
    """
    order, whole, signals = _read(columns, by_slot=True)
    sent = len(order)
    edges = _slot_edges(whole[0])
    s = whole[0].take(edges[:-1])
    if len(s) and not _all_live(s, live):
        is_live = live.take(whole[0], mode="clip") & (whole[0] < len(live))
        order, whole, signals = order[is_live], whole[:, is_live], signals[:, is_live]
        edges = _slot_edges(whole[0])
        s = whole[0].take(edges[:-1])
    slot, phase, flags, end_rank = whole
    phases_seen, seen = np.bitwise_or.reduce(whole[1:3], axis=1).tolist()
    _keep_known_phases(phase, phases_seen)
    first, last = edges[:-1], edges[1:] - 1
    if len(slot) > MAX_ROWS_PER_SLOT and (most := int((last - first).max()) + 1) > MAX_ROWS_PER_SLOT:
        raise BadReport(f"a slot must have at most {MAX_ROWS_PER_SLOT} rows in a report; got {most}")
    thinking = thinks = phase == agent_pb2.PHASE_THINK
    answering = phase == agent_pb2.PHASE_OUTPUT
    if seen & FLAG_MARKER:
        text = (flags & FLAG_MARKER) == 0
        thinking, answering = thinks & text, answering & text
    entropy_nats, end_logprob_nats, _ = signals
    return TokenRows(
        slot=slot,
        phase=phase,
        phase_after=np.where((flags & FLAG_END) != 0, agent_pb2.PHASE_OUTPUT, phase) if seen & FLAG_END else phase,
        flags=flags,
        entropy_nats=entropy_nats,
        end_rank=end_rank,
        thinks=thinks,
        thinking=thinking,
        answering=answering,
        at_ms=at_ms.take(order) if isinstance(at_ms, np.ndarray) else np.full(len(order), at_ms),
        number=order,
        owner=np.arange(len(first)).repeat(edges[1:] - first),
        first=first,
        last=last,
        edges=edges,
        s=s,
        flags_seen=seen,
        end_logprob_nats=end_logprob_nats,
        sent=sent,
    )


def _all_live(s: NDArray[np.int64], live: NDArray[np.bool_]) -> bool:
    """Whether all slots of a report are live. s: the report's slots. live: [slots of the table]."""
    return int(s.max()) < len(live) and all_in(live.take(s))


def _slot_edges(slot: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the indices of the first rows of the slots, followed by the number of rows. slot: ascending."""
    begins = np.empty(len(slot) + 1, bool)
    begins[0] = begins[-1] = True
    np.not_equal(slot[1:], slot[:-1], out=begins[1:-1])
    return begins.nonzero()[0]


def token_kinds(rows: TokenRows, row: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Return the kind of the tokens of some rows, as the table's column `newest_token` has it. row: indices."""
    kind = KINDS.take(rows.answering.take(row))
    if rows.flags_seen & FLAG_END:
        kind[(rows.flags.take(row) & FLAG_END) != 0] = THINK_END
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


NO_INTERVALS = Intervals(np.zeros(0, np.intp), np.zeros(0), np.zeros(0, np.uint8))


def intervals(rows: TokenRows, newest: NDArray[np.uint8], newest_ms: NDArray[np.float64]) -> Intervals:
    """Return the milliseconds from each answer token's previous token to the answer token.

    Tokens of a request that share a time are assumed to be spread evenly over the time since the request's previous
    tokens. The first tokens of a request yield no latency, because no earlier token time is known. newest, newest_ms:
    kind and time of each slot's newest token before the report, [slots].
    """
    answer = rows.answering.nonzero()[0]
    if not len(answer):
        return NO_INTERVALS
    owner = rows.owner.take(answer)
    begin, held = rows.first.take(owner), newest.take(owner)
    begins = begin == answer
    previous = np.where(begins, held, token_kinds(rows, answer - 1))
    shares = rows.at_ms[1:] == rows.at_ms[:-1]
    shares[rows.first[1:] - 1] = False
    # First row and number of the rows that share the slot and the time of each answer token.
    first, count = answer, None
    if any_in(shares):
        edges = np.concatenate([rows.first[:1], (~shares).nonzero()[0] + 1, rows.edges[-1:]])
        group = edges.searchsorted(answer, side="right")
        first, count = edges.take(group - 1), edges.take(group) - edges.take(group - 1)
        begins = begin == first
    interval_ms = rows.at_ms.take(first) - np.where(begins, newest_ms.take(owner), rows.at_ms.take(first - 1))
    # A report that was delayed in transit gives its rows times that may lie before the previous report's times.
    np.maximum(interval_ms, 0.0, out=interval_ms)
    if count is not None:
        interval_ms /= count
    if any_in(unknown := begins & (held == NO_TOKEN)):
        known = ~unknown
        answer, interval_ms, previous = answer[known], interval_ms[known], previous[known]
    return Intervals(answer, interval_ms, previous)


def differs(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark each entry that differs from the previous entry, and the first entry."""
    is_new = np.empty(len(column), bool)
    is_new[:1] = True
    np.not_equal(column[1:], column[:-1], out=is_new[1:])
    return is_new


def row_count(columns: agent_pb2.TokenColumns) -> int:
    """Return the number of rows."""
    return len(columns.sparse.phase) or len(columns.byte_columns) // ROW_BYTES or len(columns.slot)


def columns_of(columns: agent_pb2.TokenColumns) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return slot, phase, flags and end rank, [4, rows], and token entropy and the log-probabilities of the end marker
    and of the likeliest token, [3, rows]. A phase that is not known becomes PHASE_UNSPECIFIED.

    Raises BadReport if the columns differ in length.
    """
    _, whole, measured = _read(columns)
    _keep_known_phases(whole[1], int(np.bitwise_or.reduce(whole[1])))
    return whole, measured


def _encoded(columns: agent_pb2.TokenColumns) -> NDArray[np.uint32]:
    """Return the columns as byte_columns has them, [7, rows]. Raises BadReport if they differ in length."""
    if not (encoded := columns.byte_columns):
        return _plain_columns(columns)
    if len(encoded) % ROW_BYTES:
        raise BadReport(f"byte_columns must have {ROW_BYTES} bytes for each token; got {len(encoded)} bytes")
    return np.frombuffer(encoded, "<u4").reshape(ROW_BYTES // 4, -1)


def _by_slot(slot: NDArray[Any]) -> NDArray[np.intp]:
    """Return the order of the rows by slot and, within a slot, as they are. NumPy sorts numbers of 16 bits in linear
    time; slots of live requests have no more."""
    return slot.astype(np.uint16, copy=False).argsort(kind="stable")


def _read(
    columns: agent_pb2.TokenColumns, by_slot: bool = False
) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.float32]]:
    """Return the order of the rows, as they are or by slot, and in this order the columns of `columns_of`, with phases
    as they were sent. Raises BadReport."""
    if columns.HasField("sparse"):
        return _spread(columns.sparse, by_slot)
    encoded = _encoded(columns)
    order = _by_slot(encoded[0]) if by_slot else np.arange(encoded.shape[1])
    rows = encoded.take(order, axis=1) if by_slot else encoded
    return order, rows[:4].astype(np.int64), rows[4:].view(np.float32)


def _spread(
    sparse: agent_pb2.SparseColumns, by_slot: bool
) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.float32]]:
    """Return of sparse columns what `_read` returns. Raises BadReport."""
    count = len(sparse.phase)
    slot, phase = _numbers(sparse, "slot", "<u2", count), _numbers(sparse, "phase", "u1", count)
    flagged, measured = _row_numbers(sparse, "flagged_row", count), _row_numbers(sparse, "measured_row", count)
    order = numbers = np.arange(count)
    if by_slot:
        order = _by_slot(slot)
        slot, phase = slot.take(order), phase.take(order)
        (place := np.empty_like(order))[order] = numbers
        flagged, measured = place.take(flagged), place.take(measured)
    whole, signals = np.zeros((4, count), np.int64), np.full((3, count), np.nan, np.float32)
    whole[0], whole[1] = slot, phase
    whole[2][flagged] = _numbers(sparse, "flags", "<u4", len(flagged))
    end_rank, *told = _numbers(sparse, "signals", "<u4", 4 * len(measured)).reshape(4, -1)
    whole[3][measured] = end_rank
    for column, bits in zip(signals, told, strict=True):
        column[measured] = bits.view(np.float32)
    return order, whole, signals


def _numbers(sparse: agent_pb2.SparseColumns, name: str, kind: str, count: int) -> NDArray[Any]:
    """Return the numbers of one field, of which there must be so many. kind: NumPy's name of their type. Raises
    BadReport."""
    encoded: bytes = getattr(sparse, name)
    if len(encoded) != count * (size := np.dtype(kind).itemsize):
        raise BadReport(f"sparse.{name} must have {size} bytes for each of {count} numbers; got {len(encoded)} bytes")
    return np.frombuffer(encoded, kind)


def _row_numbers(sparse: agent_pb2.SparseColumns, name: str, count: int) -> NDArray[Any]:
    """Return the numbers of rows of one field, all of which must be below `count`. Raises BadReport."""
    numbers = _numbers(sparse, name, "<u4", len(getattr(sparse, name)) // 4)
    if len(numbers) and (most := int(numbers.max())) >= count:
        raise BadReport(f"sparse.{name} must be below the {count} rows of the report; got {most}")
    return numbers


def _keep_known_phases(phase: NDArray[np.int64], seen: int) -> None:
    """Replace phases that are not known by PHASE_UNSPECIFIED. seen: the bits that any phase has."""
    # All bits of PHASE_OUTPUT are set, so no phase is out of range unless the bits of all phases together are.
    if not 0 <= seen <= agent_pb2.PHASE_OUTPUT:
        phase[(phase < 0) | (phase > agent_pb2.PHASE_OUTPUT)] = agent_pb2.PHASE_UNSPECIFIED


def spell_out(columns: agent_pb2.TokenColumns) -> None:
    """Replace sparse columns and byte columns by the other columns. Raises BadReport if their lengths fit no rows."""
    if not (columns.byte_columns or columns.HasField("sparse")):
        return
    whole, measured = columns_of(columns)
    columns.Clear()
    fields: tuple[Any, ...] = (columns.slot, columns.phase, columns.flags, columns.end_rank)
    fields += columns.entropy_nats, columns.end_logprob_nats, columns.top_logprob_nats
    for column, values in zip(fields, (*whole, *measured), strict=True):
        column.extend(values.tolist())


def _plain_columns(columns: agent_pb2.TokenColumns) -> NDArray[np.uint32]:
    """Return the columns of an agent older than byte_columns as byte_columns would have them, [7, rows]. Raises
    BadReport if they differ in length."""
    # Such an agent may also leave out the newest column.
    top_logprob_nats = columns.top_logprob_nats or [math.nan] * len(columns.slot)
    whole: list[Sequence[int]] = [columns.slot, columns.phase, columns.flags, columns.end_rank]
    measured = columns.entropy_nats, columns.end_logprob_nats, top_logprob_nats
    lengths = [*map(len, [*whole, *measured])]
    if len(set(lengths)) != 1:
        raise BadReport(f"token columns must have one length; got {lengths}")
    return np.concatenate([np.array(whole).astype(np.uint32), np.array(measured, np.float32).view(np.uint32)])


def sentence_goes_on(flags: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether the token before each row ends no sentence, although its own row says so. flags: of the rows."""
    goes_on: NDArray[np.bool_] = (flags & (FLAG_GOES_ON | FLAG_END)) == FLAG_GOES_ON
    return goes_on
