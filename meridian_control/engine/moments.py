"""Computes the request table's columns at single moments within the newest report.

A rule reads moments in the same way as the table. The module knows no rule and no policy. The code does no I/O and
reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meridian_control.common.masks import any_in
from meridian_control.common.table_columns import END_WORDS, PROBE_COLUMNS, PROBE_WORDS, RANKS, RPDI
from meridian_control.engine.history import (
    COUNT_WORDS,
    CYCLES,
    END_RANK,
    ENTROPIES,
    ENTROPY_NATS,
    ENTROPY_SUMS,
    OUTPUT,
    OUTPUT_TOKENS,
    PHASE,
    SENTENCE_ENDS,
    THINK,
    THINK_TOKENS,
    SentenceEnds,
    kept,
)
from meridian_control.engine.token_rows import FLAG_END, TAKE_BACK_SHIFT, differs
from meridian_control.journal.records import RequestChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable

# The live requests of an engine in one state: now, or at moments of the newest report.
Seen: TypeAlias = "RequestTable | Moments"


class Moments:
    """The columns of `RequestTable` that rules and the decision log read, at places of the newest report, [moments].

    Each column is computed when it is first read. slot: ascending. place: ascending within a slot. step: the step that
    was over at the moment; without it, the step of the newest row. Read the columns before the table takes in more.
    """

    def __init__(
        self,
        table: RequestTable,
        slot: NDArray[np.int64],
        place: NDArray[np.intp],
        step: NDArray[np.int64] | None = None,
    ) -> None:
        self._table, self._history = table, table.history
        self.slot, self.place = slot, place
        if step is not None:
            self.step = step
        # Rules read only the width of the window.
        self.window = table.window

    def __len__(self) -> int:
        return len(self.slot)

    def packed_row(self, index: int) -> bytes:
        """Return a moment's row as SIGNAL_ROW has it. index: the index of the moment."""
        packed: bytes = self._packed[index].tobytes()
        return packed

    @kept
    def _packed(self) -> NDArray[np.int64]:
        """The moments' rows as SIGNAL_ROW has them: the table's rows less what came later in the report,
        [moments, words]."""
        history, words = self._history, self._table.packed(self.slot)
        if len(earlier := self._earlier):
            words[earlier, PROBE_WORDS] = history.unsampled_of(self.slot[earlier]).words
        if len(history.ends.row):
            self._put_ends_before(words)
        words[:, COUNT_WORDS] -= self._later
        words.view(np.float64)[:, ENTROPY_SUMS] -= self._later_entropies.T
        # Cycles are known only at the end of a report.
        words[:, CYCLES] = 0
        words.view(np.uint8)[:, PHASE] = self.phase
        words.view(np.uint32)[:, END_RANK] = self.end_rank
        words.view(np.float32)[:, ENTROPY_NATS] = self.entropy_nats
        return words

    def _put_ends_before(self, words: NDArray[np.int64]) -> None:
        """Replace the values at sentence ends after the moments by those at the sentence ends before the moments.

        words: the moments' rows, [moments, words].
        """
        (here, begin, end), ends = self._ends_seen, self._history.ends
        followed = here < end
        late, early = (followed & (here > begin)).nonzero()[0], (followed & (here == begin)).nonzero()[0]
        words[late, END_WORDS], words[early, END_WORDS] = ends.newest[here[late] - 1], ends.before[begin[early]]

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Return a column that rows do not change, with the EAT columns as they were at each moment."""
        if name.startswith("_"):
            raise AttributeError(name)
        column: NDArray[Any] = getattr(self._table, name)[self.slot]
        if name in PROBE_COLUMNS and len(earlier := self._earlier):
            column[earlier] = getattr(self._history.unsampled_of(self.slot[earlier]), name)
        setattr(self, name, column)
        return column

    @kept
    def _earlier(self) -> NDArray[np.intp]:
        """Indices of the moments that come before the report's EAT sample of their slot."""
        history = self._history
        if history.sampled.keys().isdisjoint(self.slot.tolist()):
            return np.zeros(0, np.intp)
        sampled_in = np.full(len(self._table.live), -1)
        sampled_in[history.sampled_slots] = history.sampled_steps
        return np.flatnonzero(self.step < sampled_in[self.slot])

    @kept
    def step(self) -> NDArray[np.int64]:
        return self._row_step

    @kept
    def _row_step(self) -> NDArray[np.int64]:
        """The step of the newest row at each moment, -1 before the slot's first row."""
        if not len(self._history.step):
            return np.full(len(self.slot), -1)
        row_step: NDArray[np.int64] = self._history.step[self.place - 1]
        row_step[~self._has_row] = -1
        return row_step

    @kept
    def _has_row(self) -> NDArray[np.bool_]:
        slot = self._history.rows.slot
        if not len(slot):
            return np.zeros(len(self.slot), bool)
        has_row: NDArray[np.bool_] = (slot[self.place - 1] == self.slot) & (self.place > 0)
        return has_row

    @kept
    def live(self) -> NDArray[np.bool_]:
        return np.ones(len(self.slot), bool)

    @kept
    def thinking(self) -> NDArray[np.bool_]:
        thinking: NDArray[np.bool_] = self.phase == THINK
        return thinking

    @kept
    def phase(self) -> NDArray[np.uint8]:
        rows = self._history.rows
        phase = self._newest(rows.phase, "phase")
        if rows.flags_seen & FLAG_END:
            ended = self._has_row & ((rows.flags[self.place - 1] & FLAG_END) != 0)
            phase = np.where(ended, OUTPUT, phase)
        return phase

    @kept
    def entropy_nats(self) -> NDArray[np.float32]:
        return self._newest(self._history.rows.entropy_nats, "entropy_nats")

    @kept
    def end_rank(self) -> NDArray[np.uint32]:
        return self._newest(self._history.rows.end_rank, "end_rank")

    def _newest(self, column: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the row column's value in the newest row, or the table's value before the slot's first row."""
        if np.count_nonzero(self._has_row) == len(self.slot):
            return column[self.place - 1]
        held: NDArray[Any] = getattr(self._table, name)[self.slot]
        if not len(column):
            return held
        rows, before = self._history.rows, getattr(self._history.before, name)
        earlier = before[np.minimum(rows.s.searchsorted(self.slot), len(rows.s) - 1)]
        earlier = np.where(self._over > 0, earlier, held)
        return np.where(self._has_row, column[self.place - 1], earlier)

    def _back(self, name: str, count: int) -> NDArray[Any]:
        """Return a column to which rows add: the table's value minus the sum over the rows after the moment. count:
        column of `History.counts`."""
        values: NDArray[Any] = getattr(self._table, name)[self.slot] - self._later[:, count]
        return values

    @kept
    def _later(self) -> NDArray[np.int64]:
        """The sums that the rows after each moment add to the counts, [moments, 4]."""
        here, over = self._counts_seen
        return over - here

    @kept
    def _counts_seen(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The running counts at each moment, and after the slot's last row, [moments, 4]."""
        counts = self._history.counts
        return counts.take(self.place, axis=0), counts.take(self._over, axis=0)

    @kept
    def _later_entropies(self) -> NDArray[np.float64]:
        """The entropies that the rows after each moment add to the sums of entropies, [2, moments]."""
        here, over = self._sums_seen
        return over - here

    @kept
    def _sums_seen(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The running sums of entropies at each moment, and after the slot's last row, [2, moments]."""
        (here, over), sums = self._counts_seen, self._history.entropy_sums
        return sums.take(here[:, ENTROPIES], axis=1), sums.take(over[:, ENTROPIES], axis=1)

    @kept
    def _over(self) -> NDArray[np.intp]:
        """The place after the slot's last row."""
        return np.maximum(self._span[1], self.place)

    @kept
    def _span(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return self._history.span(self.slot)

    @kept
    def think_tokens(self) -> NDArray[np.int64]:
        return self._back("think_tokens", THINK_TOKENS)

    @kept
    def output_tokens(self) -> NDArray[np.int64]:
        held: NDArray[np.int64] = self._table.output_tokens[self.slot]
        if not np.count_nonzero(held) and not self._history.rows.flags_seen >> TAKE_BACK_SHIFT:
            # Without tokens taken back, a request without answer tokens had none before either.
            return held
        return self._back("output_tokens", OUTPUT_TOKENS)

    @kept
    def entropy_count(self) -> NDArray[np.int64]:
        return self._back("entropy_count", ENTROPIES)

    @kept
    def entropy_sum(self) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = self._table.entropy_sum[self.slot] - self._later_entropies[0]
        return sums

    @kept
    def entropy_window_sum(self) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = self._table.entropy_window_sum[self.slot] - self._later_entropies[1]
        return sums

    @kept
    def boundary_now(self) -> NDArray[np.bool_]:
        number = self._history.counts[:, SENTENCE_ENDS]
        is_end: NDArray[np.bool_] = self._has_row & (number[self.place] > number[self.place - 1])
        return is_end & (self.step == self._row_step) if "step" in vars(self) else is_end

    @kept
    def boundary_count(self) -> NDArray[np.int64]:
        return self._back("boundary_count", SENTENCE_ENDS)

    boundary_ranks = kept(lambda seen: seen._at_newest_end("boundary_ranks", RANKS))
    boundary_rpdi = kept(lambda seen: seen._at_newest_end("boundary_rpdi", RPDI))

    def _at_newest_end(self, name: str, words: slice) -> NDArray[Any]:
        """Return the column's values after the newest sentence end of each moment. words: those of SentenceEnds that
        hold the column."""
        (here, begin, end), held = self._ends_seen, getattr(self._table, name)[self.slot]
        ends = self._history.ends
        newest, before = (values.view(held.dtype)[:, words] for values in (ends.newest, ends.before))
        # Most moments are in slots without a sentence end in the report.
        late, early = (here > begin).nonzero()[0], ((end > begin) & (here == begin)).nonzero()[0]
        held[late], held[early] = newest[here[late] - 1], before[begin[early]]
        return held  # type: ignore[no-any-return]

    @kept
    def _ends_seen(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the report's sentence ends before each moment, and before the places around the slot's rows."""
        here, over = self._counts_seen
        begin = self._history.counts[self._span[0], SENTENCE_ENDS]
        return here[:, SENTENCE_ENDS], begin, over[:, SENTENCE_ENDS]


class RowMoments(Moments):
    """The moments right after rows. The rows are known, so less must be searched for."""

    def __init__(self, table: RequestTable, row: NDArray[np.intp]) -> None:
        super().__init__(table, table.history.rows.slot.take(row), row + 1)
        self.row = row

    def _newest(self, column: NDArray[Any], name: str) -> NDArray[Any]:
        return column.take(self.row)

    @kept
    def _row_step(self) -> NDArray[np.int64]:
        return self._history.step[self.row]

    @kept
    def _has_row(self) -> NDArray[np.bool_]:
        return np.ones(len(self.slot), bool)

    @kept
    def _span(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        edges, owner = self._history.rows.edges, self._history.rows.owner.take(self.row)
        return edges.take(owner), edges.take(owner + 1)

    @kept
    def _over(self) -> NDArray[np.intp]:
        rows = self._history.rows
        return rows.edges[1:].take(rows.owner.take(self.row))

    @kept
    def think_tokens(self) -> NDArray[np.int64]:
        return self._history.think_tokens.take(self.row)


def at_rows_or_end(table: RequestTable, row: NDArray[np.intp], slots: NDArray[np.intp]) -> Moments:
    """Return the moments right after the rows, at most one per slot, and the end of the report for all other slots.

    The rows belong to these slots, or `slots` is empty.
    """
    if len(row) >= len(slots):
        return RowMoments(table, row)
    slot, place = table.history.rows.slot[row], row + 1
    rest = slots[~table.mask(slot)[slots]]
    slot, place = np.concatenate([slot, rest]), np.concatenate([place, table.history.span(rest)[1]])
    order = slot.argsort()
    return Moments(table, slot[order], place[order])


class _EndMoments(RowMoments):
    """The moments right after sentence ends at which the request goes on thinking. ends: the sentence ends."""

    def __init__(self, table: RequestTable, ends: SentenceEnds) -> None:
        super().__init__(table, ends.row)
        self._at, self.boundary_count = ends, ends.number

    boundary_ranks = kept(lambda seen: seen._at.ranks)
    boundary_rpdi = kept(lambda seen: seen._at.rpdi)
    thinking, boundary_now = kept(lambda seen: seen.live), kept(lambda seen: seen.live)


def sentence_ends(table: RequestTable) -> Moments:
    """Return the moments at which a request that goes on thinking reported the rank at a sentence end."""
    ends, flags = table.history.ends, table.history.rows.flags
    if table.history.rows.flags_seen & FLAG_END and any_in(over := (flags[ends.row] & FLAG_END) != 0):
        ends = SentenceEnds(*(column[~over] for column in ends))
    return _EndMoments(table, ends)


def joined(table: RequestTable, parts: Sequence[tuple[NDArray[Any], ...]]) -> Moments:
    """Return the moments of these slots, places and steps, sorted and without duplicates."""
    slot, place, step = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.lexsort((place, step, slot))
    slot, place, step = slot[order], place[order], step[order]
    once = differs(slot) | differs(step) | differs(place)
    return Moments(table, slot[once], place[once], step[once])


def changes(table: RequestTable) -> list[RequestChange]:
    """Return the changes of phase and the ends of thinking in the newest report, sorted by step."""
    history, rows = table.history, table.history.rows
    after, has_ends = rows.phase, rows.flags_seen & FLAG_END
    if has_ends:
        is_end = (rows.flags & FLAG_END) != 0
        after = np.where(is_end, OUTPUT, after)
    changed = rows.before(after, history.before.phase) != after
    row = (changed | is_end if has_ends else changed).nonzero()[0]
    if not len(row):
        return []
    slot, over, counts = rows.slot.take(row), rows.edges.take(rows.owner.take(row) + 1), history.counts
    output_tokens = table.output_tokens[slot] - (counts[over, OUTPUT_TOKENS] - counts[row + 1, OUTPUT_TOKENS])
    flags = rows.flags.take(row).tolist()
    kinds = ["think_end" if flag & FLAG_END else "phase" for flag in flags]
    columns = history.step.take(row), slot, after.take(row), history.think_tokens.take(row), output_tokens
    return sorted(_changes(kinds, flags, columns), key=lambda change: change.step)


def changes_at_steps(table: RequestTable, kind: str, slots: Iterable[int], steps: Iterable[int]) -> list[RequestChange]:
    """Return events of the given kind for live requests, each with the request's state after the given step."""
    slot_steps = [(slot, step) for slot, step in zip(slots, steps, strict=True) if table.holds(slot)]
    if not slot_steps:
        return []
    slot, step = np.array(slot_steps).T
    moments = Moments(table, slot, table.history.places_in(slot, step), step)
    columns = moments.step, moments.slot, moments.phase, moments.think_tokens, moments.output_tokens
    return _changes([kind] * len(slot_steps), [0] * len(slot_steps), columns)


def _changes(kinds: list[str], flags: list[int], columns: tuple[NDArray[Any], ...]) -> list[RequestChange]:
    """Return events with these kinds, flags, and columns of the other fields in their order, [events] each."""
    return [RequestChange(*row) for row in zip(kinds, flags, *(column.tolist() for column in columns), strict=True)]
