"""The rows of a report, and what it takes to tell how requests stood after any of them (`moments`).

The table holds what a report comes to in the end; a rule is asked about every sentence end on the way there, so that it
sees the same however steps are merged to reports. Knows no rule and no policy. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meridian_control.decisions.moments import OUTPUT, THINK, Moments, Unsampled, kept
from meridian_control.decisions.token_rows import FLAG_END

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.decisions.token_rows import Rows


class Before(NamedTuple):
    """Columns [slots] of the rows' slots as they were before the report."""

    phase: NDArray[np.uint8]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.uint32]


class SentenceEnds(NamedTuple):
    """Rows that made the end marker's rank at a sentence end known, [ends], in the order of slots.

    ranks: the newest RANK_HISTORY of the slot there, newest first, [ends, RANK_HISTORY]; number: how many it has had.
    before: the same of each end's slot before the report.
    """

    row: NDArray[np.intp]
    ranks: NDArray[np.int64]
    number: NDArray[np.int64]
    before: NDArray[np.int64]


class Entropies(NamedTuple):
    """Rows with a token entropy of thinking, [entropies]: its nats, and by how much it changed its window's sum."""

    row: NDArray[np.intp]
    nats: NDArray[np.float64]
    change_nats: NDArray[np.float64]


class Change(NamedTuple):
    """What happened to a request in a step: its phase and counts from then on. flags: of the row, 0 without one."""

    kind: str
    flags: int
    step: int
    slot: int
    phase: int
    think_tokens: int
    output_tokens: int


class History:
    """The rows of a report that a table has taken in.

    A place is a number of rows, in their order by slots: the row before it is the newest one there. counted: what each
    row adds to thinking and output, [rows]. sampled: by slot, the step in which EAT was measured. probed: by slot, the
    step in which the outcome of its probe came.
    """

    def __init__(
        self,
        rows: Rows,
        before: Before,
        ends: SentenceEnds,
        counted: tuple[NDArray[np.int64], NDArray[np.int64]],
        entropies: Entropies,
    ) -> None:
        self.rows, self.before, self.ends, self.entropies = rows, before, ends, entropies
        self._think, self._output = counted
        self._steps: NDArray[np.int64] | None = None
        self.sampled: dict[int, int] = {}
        self._unsampled: dict[int, tuple[Any, ...]] = {}
        self.probed: dict[int, int] = {}

    def tell_steps(self, step_of: NDArray[np.int64]) -> None:
        """The step of each of the report's rows, in the report's own order."""
        self._steps = step_of

    def sample(self, table: RequestTable, slot: int, step: int) -> None:
        """EAT is about to be taken in that was measured in this step."""
        if slot not in self.sampled:
            self.sampled[slot] = step
            self._unsampled[slot] = tuple(getattr(table, name)[slot] for name in Unsampled._fields)

    # --------------------------------------------------------------------------------------------------------- places

    def span(self, slot: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The places before the first row and after the last one of slots; both 0 for one without rows."""
        rows = self.rows
        if not len(rows.s):
            return np.zeros(len(slot), np.intp), np.zeros(len(slot), np.intp)
        index = np.minimum(np.searchsorted(rows.s, slot), len(rows.s) - 1)
        known = rows.s[index] == slot
        return np.where(known, rows.first[index], 0), np.where(known, rows.last[index] + 1, 0)

    def places_in(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.intp]:
        """The place of each slot once a step is over."""
        begin, end = self.span(slots)
        parts = zip(begin.tolist(), end.tolist(), steps.tolist(), strict=True)
        found = (at + self.step[at:until].searchsorted(step, side="right") for at, until, step in parts)
        return np.fromiter(found, np.intp, len(slots))

    @kept
    def step(self) -> NDArray[np.int64]:
        """The step of each row, [rows]."""
        if self._steps is None:
            return np.zeros(len(self.rows.slot), np.int64)
        return self._steps[self.rows.number]

    @kept
    def thinks(self) -> NDArray[np.bool_]:
        """Whether the request thinks after each row, [rows]."""
        thinks: NDArray[np.bool_] = (self.rows.phase == THINK) & ((self.rows.flags & FLAG_END) == 0)
        return thinks

    # ---------------------------------------------------------------------------------------- running sums, [places]

    @kept
    def think(self) -> NDArray[np.int64]:
        return _running(self._think)

    @kept
    def output(self) -> NDArray[np.int64]:
        return _running(self._output)

    @kept
    def end_number(self) -> NDArray[np.int64]:
        return _counted(self.ends.row, len(self.rows.slot))

    @kept
    def entropy_number(self) -> NDArray[np.int64]:
        rows = len(self.rows.slot)
        return np.arange(rows + 1) if len(self.entropies.row) == rows else _counted(self.entropies.row, rows)

    @kept
    def entropy_nats(self) -> NDArray[np.float64]:
        """By number of entropies, as `window_nats`."""
        return _running(self.entropies.nats)

    @kept
    def window_nats(self) -> NDArray[np.float64]:
        return _running(self.entropies.change_nats)

    # -------------------------------------------------------------------------------------------------------- moments

    @property
    def sampled_slots(self) -> NDArray[np.int64]:
        return np.fromiter(self.sampled, np.int64, len(self.sampled))

    @property
    def sampled_steps(self) -> NDArray[np.int64]:
        return np.fromiter(self.sampled.values(), np.int64, len(self.sampled))

    def unsampled(self, slots: NDArray[np.int64]) -> Unsampled:
        """What was known of EAT in sampled slots before."""
        return Unsampled(*map(np.array, zip(*(self._unsampled[slot] for slot in slots.tolist()), strict=True)))

    def at_rows(self, table: RequestTable, row: NDArray[np.intp]) -> Moments:
        """The moments right after rows."""
        rows = self.rows
        found = Moments(table, self, rows.slot[row], row + 1)
        found._over = rows.last[rows.s.searchsorted(found.slot)] + 1
        return found

    def rows_of(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows of slots, which are ascending."""
        return np.isin(self.rows.slot, slots).nonzero()[0]

    def at_rows_or_end(self, table: RequestTable, row: NDArray[np.intp], slots: NDArray[np.intp]) -> Moments:
        """The moments right after rows, one of each slot at most; the end of the report for slots without any."""
        slot, place = self.rows.slot[row], row + 1
        if len(rest := slots[~np.isin(slots, slot)]):
            slot, place = np.concatenate([slot, rest]), np.concatenate([place, self.span(rest)[1]])
            order = slot.argsort()
            slot, place = slot[order], place[order]
        return Moments(table, self, slot, place)

    def sentence_ends(self, table: RequestTable) -> Moments:
        """The moments at which a rank at a sentence end came to be known to a request that thinks on."""
        ends, flags = self.ends, self.rows.flags
        if len(ends.row) and (over := (flags[ends.row] & FLAG_END) != 0).any():
            ends = SentenceEnds(*(column[~over] for column in ends))
        found = self.at_rows(table, ends.row)
        found.boundary_ranks, found.boundary_count = ends.ranks, ends.number
        found.live = found.thinking = found.boundary_now = np.ones(len(ends.row), bool)
        return found

    def changes(self, table: RequestTable) -> list[Change]:
        """Where a request's phase changed, or its thinking ended, in the order of steps where they were told."""
        rows = self.rows
        is_end = (rows.flags & FLAG_END) != 0
        after = np.where(is_end, OUTPUT, rows.phase) if is_end.any() else rows.phase
        changed = rows.before(after, self.before.phase) != after
        row = (changed if after is rows.phase else changed | is_end).nonzero()[0]
        if not len(row):
            return []
        kinds = ["think_end" if end else "phase" for end in is_end[row].tolist()]
        found = _changes(self.at_rows(table, row), kinds, rows.flags[row].tolist())
        return sorted(found, key=lambda change: change.step)

    def at_steps(self, table: RequestTable, kind: str, slots: Iterable[int], steps: Iterable[int]) -> list[Change]:
        """What else happened to live requests, once these steps were over."""
        told = [(slot, step) for slot, step in zip(slots, steps, strict=True) if table.holds(slot)]
        if not told:
            return []
        slot, step = np.array(told).T
        moments = Moments(table, self, slot, self.places_in(slot, step), step)
        return _changes(moments, [kind] * len(told), [0] * len(told))


def _changes(moments: Moments, kinds: list[str], flags: list[int]) -> list[Change]:
    columns = moments.step, moments.slot, moments.phase, moments.think_tokens, moments.output_tokens
    return [Change(*row) for row in zip(kinds, flags, *(column.tolist() for column in columns), strict=True)]


def _running(column: NDArray[Any]) -> NDArray[Any]:
    """The sum of what comes before each place, [places]."""
    running = np.zeros(len(column) + 1, column.dtype)
    column.cumsum(out=running[1:])
    return running


def _counted(row: NDArray[np.intp], rows: int) -> NDArray[np.int64]:
    """How many of these rows come before each place, [places]."""
    marked = np.zeros(rows + 1, np.int64)
    marked[row + 1] = 1
    return marked.cumsum()
