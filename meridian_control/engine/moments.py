"""Computes the request table's columns at single moments within the newest report.

A rule reads moments in the same way as the table. The module knows no rule and no policy. The code does no I/O and
reads no clock.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meridian_control.common.masks import all_in
from meridian_control.common.table_columns import (
    CYCLES,
    END_WORDS,
    PROBE_COLUMNS,
    PROBE_WORDS,
    RANKS,
    ROW_COLUMNS,
    ROW_WORDS,
    RPDI,
    SIGNAL_COLUMNS,
    column_in,
)
from meridian_control.engine.history import BOUNDARY_NOW, OUTPUT_TOKENS, PHASE, THINK_TOKENS
from meridian_control.engine.request_table import THINK
from meridian_control.engine.token_rows import FLAG_END, differs
from meridian_control.journal.records import RequestChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable

# The live requests of an engine in one state: now, or at moments of the newest report.
Seen: TypeAlias = "RequestTable | Moments"


class Moments:
    """The columns of `RequestTable` that rules and the decision log read, at moments of the newest report, [moments].

    Each column is computed when it is first read. slot: ascending. row: the newest row of the slot at the moment, -1
    before its first row. known: columns that are known already, and `step`, the step that was over at the moment;
    without it, the step of the row. Read the columns before the table takes in more.
    """

    def __init__(
        self, table: RequestTable, slot: NDArray[np.int64], row: NDArray[np.intp], **known: NDArray[Any]
    ) -> None:
        # Rules read only the width of the window.
        self.slot, self.row, self.window = slot, row, table.window
        self._table, self._history = table, table.history
        vars(self).update(known)

    def __len__(self) -> int:
        return len(self.slot)

    def packed_row(self, index: int) -> bytes:
        """Return a moment's row as SIGNAL_ROW has it. index: the index of the moment."""
        packed: bytes = self._words[index].tobytes()
        return packed

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Return a column as it was at each moment, if rows or results of probes change it."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in SIGNAL_COLUMNS:
            column: NDArray[Any] = getattr(self._table, name)[self.slot]
        elif name in ROW_COLUMNS:
            column = column_in(self._row_words, name)
        else:
            column = column_in(self._probe_words if name in PROBE_COLUMNS else self._words, name)
        setattr(self, name, column)
        return column

    @cached_property
    def step(self) -> NDArray[np.int64]:
        return self._history.step[self.row]

    @cached_property
    def thinking(self) -> NDArray[np.bool_]:
        thinking: NDArray[np.bool_] = self.phase == THINK
        return thinking

    @cached_property
    def _row_words(self) -> NDArray[np.int64]:
        """The words that rows change, as they were at each moment, [moments, words]."""
        history, slot, has_row = self._history, self.slot, self.row >= 0
        if all_in(has_row):
            words = history.state(self.row)
        else:
            words, owner = self._table.packed(slot)[:, ROW_WORDS], history.rows.s.searchsorted(slot)
            before = np.append(history.rows.s, -1)[owner] == slot
            words[before] = history.before[owner[before]]
            words[has_row] = history.state(self.row[has_row])
        if "step" in vars(self):
            # At a later step than that of its row, a request is at no sentence end any more.
            words.view(np.bool_)[:, BOUNDARY_NOW] &= self.step == history.step[self.row]
        return words

    @cached_property
    def _probe_words(self) -> NDArray[np.int64]:
        """The table's rows of SIGNAL_ROW, with what results of probes change as it was at each moment, [moments,
        words]."""
        unsampled, words = self._history.unsampled, self._table.packed(self.slot)
        if unsampled is not None:
            earlier = self.step < unsampled.steps.take(self.slot)
            words[earlier, PROBE_WORDS] = unsampled.words[self.slot[earlier], PROBE_WORDS]
        return words

    @cached_property
    def _words(self) -> NDArray[np.int64]:
        """The rows of SIGNAL_ROW as they were at each moment, [moments, words]."""
        words, ends, slot = self._probe_words.copy(), self._history.ends, self.slot
        words[:, ROW_WORDS] = self._row_words
        # The newest of the report's sentence ends up to each moment, and the first one of the moment's slot.
        slots = np.append(self._history.rows.slot.take(ends.row), -1)
        newest, first = ends.row.searchsorted(self.row, side="right") - 1, slots[:-1].searchsorted(slot)
        after, before = slots[newest] == slot, slots[first] == slot
        words[before, END_WORDS] = ends.before[first[before]]
        words[after, END_WORDS] = ends.newest[newest[after]]
        # Cycles are known only at the end of a report.
        words[:, CYCLES] = 0
        return words


def sentence_ends(table: RequestTable) -> Moments:
    """Return the moments at which a request that goes on thinking reported the rank at a sentence end."""
    rows, (row, newest, _) = table.history.rows, table.history.ends
    if rows.flags_seen & FLAG_END:
        goes_on = rows.phase_after.take(row) == THINK
        row, newest = row[goes_on], newest[goes_on]
    ranks, rpdi = newest[:, RANKS], newest.view(np.float64)[:, RPDI]
    return Moments(table, rows.slot.take(row), row, boundary_ranks=ranks, boundary_rpdi=rpdi)


def joined(table: RequestTable, parts: Sequence[tuple[NDArray[Any], ...]]) -> Moments:
    """Return the moments of these slots, rows and steps, sorted and without duplicates."""
    slot, row, step = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.lexsort((row, step, slot))
    slot, row, step = slot[order], row[order], step[order]
    once = differs(slot) | differs(step) | differs(row)
    return Moments(table, slot[once], row[once], step=step[once])


def changes(table: RequestTable) -> list[RequestChange]:
    """Return the changes of phase and the ends of thinking in the newest report, sorted by step."""
    history, rows = table.history, table.history.rows
    changed = rows.before(rows.phase_after, history.before.view(np.uint8)[:, PHASE]) != rows.phase_after
    if rows.flags_seen & FLAG_END:
        changed |= (rows.flags & FLAG_END) != 0
    if not len(row := changed.nonzero()[0]):
        return []
    flags = rows.flags.take(row).tolist()
    kinds = ["think_end" if flag & FLAG_END else "phase" for flag in flags]
    counts = [history.count(column, row) for column in (THINK_TOKENS, OUTPUT_TOKENS)]
    columns = history.step.take(row), rows.slot.take(row), rows.phase_after.take(row), *counts
    return sorted(_changes(kinds, flags, columns), key=lambda change: change.step)


def changes_at_steps(table: RequestTable, kind: str, slots: Iterable[int], steps: Iterable[int]) -> list[RequestChange]:
    """Return events of the given kind for live requests, each with the request's state after the given step."""
    slot_steps = [(slot, step) for slot, step in zip(slots, steps, strict=True) if table.holds(slot)]
    if not slot_steps:
        return []
    slot, step = np.array(slot_steps).T
    moments = Moments(table, slot, table.history.newest_rows(slot, step), step=step)
    columns = moments.step, moments.slot, moments.phase, moments.think_tokens, moments.output_tokens
    return _changes([kind] * len(slot), [0] * len(slot), columns)


def _changes(kinds: list[str], flags: list[int], columns: tuple[NDArray[Any], ...]) -> list[RequestChange]:
    """Return events with these kinds, flags, and columns of the other fields in their order, [events] each."""
    return [RequestChange(*row) for row in zip(kinds, flags, *(column.tolist() for column in columns), strict=True)]
