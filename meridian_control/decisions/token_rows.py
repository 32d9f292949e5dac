"""Turns the token rows of a report into arrays, sorted by slot and, within a slot, by the order of generation.

The module checks the columns and their bounds; it does not know their effect on a request. The code does no I/O and
reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from meridian.v1 import agent_pb2

if TYPE_CHECKING:
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

# Largest number of rows of one slot in a report. No correct agent sends more, however many steps a report merges.
MAX_ROWS_PER_SLOT = 1 << 14


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The columns of the rows, each [rows], and where each slot's rows begin and end.

    margin_nats: log-probability of the likeliest token minus that of the end marker, NaN if either was not measured.
    at_ms: time at which the row came. number: index of the row in the report. begins: whether the row is the first of
    its slot. s: the slots that have rows; first, last: indices of their first and last rows; all three [slots].
    """

    slot: NDArray[np.int64]
    phase: NDArray[np.int32]
    flags: NDArray[np.int64]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.uint32]
    end_logprob_nats: NDArray[np.float32]
    margin_nats: NDArray[np.float64]
    at_ms: NDArray[np.float64]
    number: NDArray[np.intp]
    begins: NDArray[np.bool_]
    first: NDArray[np.intp]
    last: NDArray[np.intp]
    s: NDArray[np.int64]

    def before(self, column: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        """Return the column's value in the previous row of the same slot; `first`, [slots], is used for first rows."""
        shifted = np.empty_like(column)
        shifted[1:] = column[:-1]
        shifted[self.first] = first
        return shifted


def rows_of(columns: agent_pb2.TokenColumns, live: NDArray[np.bool_], at_ms: float | NDArray[np.float64]) -> TokenRows:
    """Return the rows of live slots. live: [slots]. at_ms: time at which the rows came, one for all or [rows].

    Raises ValueError if the columns differ in length or if a slot has too many rows.
    """
    slot, *others = _arrays(columns)
    when_ms = np.empty(len(slot))
    when_ms[:] = at_ms
    known = slot < len(live)
    known[known] = live[slot[known]]
    chosen = known.nonzero()[0]
    order = chosen[slot[chosen].argsort(kind="stable")]
    slot = slot[order]
    begins, ends = differs(slot), np.ones(len(slot), bool)
    ends[:-1] = begins[1:]
    first, last = begins.nonzero()[0], ends.nonzero()[0]
    if len(first) and (most := int((last - first).max()) + 1) > MAX_ROWS_PER_SLOT:
        raise ValueError(f"a slot must have at most {MAX_ROWS_PER_SLOT} rows in a report; got {most}")
    phase, flags, entropy, end_rank, end_logprob, margin = (column[order] for column in others)
    in_order = slot, phase, flags, entropy, end_rank, end_logprob, margin, when_ms[order], order
    return TokenRows(*in_order, begins, first, last, s=slot[first])


def differs(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark each entry that differs from the previous entry, and the first entry."""
    found = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=found[1:])
    return found


def nth(slot: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return for each row the number of earlier rows of the same slot; the rows are sorted by slot."""
    first = differs(slot).nonzero()[0]
    number = np.arange(len(slot))
    counts: NDArray[np.intp] = number - first[np.searchsorted(first, number, side="right") - 1]
    return counts


def owners(slot: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the index of the first value of each slot, and for each value the number of its slot among them. slot:
    ascending."""
    begins = differs(slot)
    return begins.nonzero()[0], begins.cumsum() - 1


def newest_first(
    slot: NDArray[np.int64],
    values: NDArray[Any],
    held: NDArray[Any],
    owned: tuple[NDArray[np.intp], NDArray[np.intp]],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return for each value the slot's newest values up to this one, and the slot's newest values before the report;
    both newest first, [values, number].

    slot: ascending. held: the table's column with the newest values of each slot, [slots, number]. owned: as `owners`
    returns them for `slot`.
    """
    (first, owner), ages = owned, np.arange(held.shape[1])
    before = held[slot[first]]
    # One array with the values of each slot, oldest first: the kept values, then the values of the report.
    at = np.arange(len(slot)) + len(ages) * (owner + 1)
    line = np.empty(len(slot) + before.size, held.dtype)
    line[at] = values
    line[(at[first] - 1)[:, None] - ages] = before
    return line[at[:, None] - ages], before[owner]


def _arrays(columns: agent_pb2.TokenColumns) -> tuple[NDArray[Any], ...]:
    slot = np.fromiter(columns.slot, np.int64, len(columns.slot))
    phase = np.fromiter(columns.phase, np.int32, len(columns.phase))
    flags = np.fromiter(columns.flags, np.int64, len(columns.flags))
    entropy = np.fromiter(columns.entropy_nats, np.float32, len(columns.entropy_nats))
    end_rank = np.fromiter(columns.end_rank, np.uint32, len(columns.end_rank))
    end_logprob = np.fromiter(columns.end_logprob_nats, np.float32, len(columns.end_logprob_nats))
    top_logprob = np.fromiter(columns.top_logprob_nats, np.float32, len(columns.top_logprob_nats))
    if not len(top_logprob):
        # An older agent leaves the column out.
        top_logprob = np.full(len(slot), np.nan, np.float32)
    arrays = (slot, phase, flags, entropy, end_rank, end_logprob, top_logprob)
    if len({len(a) for a in arrays}) != 1:
        raise ValueError(f"token columns must have one length; got {[len(a) for a in arrays]}")
    phase[(phase < 0) | (phase > agent_pb2.PHASE_OUTPUT)] = agent_pb2.PHASE_UNSPECIFIED
    # The difference is taken in double precision, so that a rule compares the same number that `explain` shows.
    with np.errstate(invalid="ignore"):
        margin = top_logprob.astype(np.float64) - end_logprob
    return (*arrays[:-1], margin)
