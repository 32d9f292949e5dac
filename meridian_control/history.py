"""How requests stood within a report: the request table's columns after any row of the newest report.

The table holds what a report comes to in the end; a rule is asked about every sentence end on the way there, so that it
sees the same however steps are merged to reports. Knows no rule and no policy. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.rows import FLAG_END, differs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from meridian_control.requests import RequestTable
    from meridian_control.rows import Rows

THINK, OUTPUT = agent_pb2.PHASE_THINK, agent_pb2.PHASE_OUTPUT

T = TypeVar("T")


class kept(Generic[T]):  # noqa: N801
    """A property that is worked out once: `functools.cached_property` without the lock that Python 3.11 has in it."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, made_for: Any, owner: type | None = None) -> T:
        made: T = self._make(made_for)
        made_for.__dict__[self._name] = made
        return made


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


class Unsampled(NamedTuple):
    """What a sample of EAT changes, as it was before, [slots] or [moments]."""

    eat_nats: NDArray[np.float64]
    eat_ema_nats: NDArray[np.float64]
    eat_ema_variance: NDArray[np.float64]
    eat_count: NDArray[np.int64]
    empty_answer: NDArray[np.bool_]


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


class Moments:
    """Requests as they stood at places of a report: the columns of `RequestTable` that rules and the decision log read,
    [moments], each worked out once it is read.

    slot: ascending. place: within a slot ascending. step: where it is given, the step that was over; else that of the
    place's newest row. To be read before the table takes in anything else.
    """

    def __init__(
        self,
        table: RequestTable,
        history: History,
        slot: NDArray[np.int64],
        place: NDArray[np.intp],
        step: NDArray[np.int64] | None = None,
    ) -> None:
        self._table, self._history = table, history
        self.slot, self.place = slot, place
        if step is not None:
            self.step = step
        # Only its width is read.
        self.window = table.window

    def __len__(self) -> int:
        return len(self.slot)

    def __getattr__(self, name: str) -> NDArray[Any]:
        """What does not change within a report."""
        if name.startswith("_"):
            raise AttributeError(name)
        column: NDArray[Any] = getattr(self._table, name)[self.slot]
        if name in Unsampled._fields and len(earlier := self._earlier):
            column[earlier] = getattr(self._history.unsampled(self.slot[earlier]), name)
        setattr(self, name, column)
        return column

    @kept
    def _earlier(self) -> NDArray[np.intp]:
        """Moments before EAT was measured in the report."""
        history = self._history
        if not history.sampled:
            return np.zeros(0, np.intp)
        sampled_in = np.full(len(self._table.live), -1)
        sampled_in[history.sampled_slots] = history.sampled_steps
        return np.flatnonzero(self.step < sampled_in[self.slot])

    @kept
    def step(self) -> NDArray[np.int64]:
        return self._row_step

    @kept
    def _row_step(self) -> NDArray[np.int64]:
        """The step of the newest row; -1 before the first."""
        step = np.append(-1, self._history.step)
        row_step: NDArray[np.int64] = step[np.where(self._has_row, self.place, 0)]
        return row_step

    @kept
    def _has_row(self) -> NDArray[np.bool_]:
        return self.place > self._begin

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
        return self._newest(np.where(rows.flags & FLAG_END, OUTPUT, rows.phase), "phase")

    @kept
    def entropy_nats(self) -> NDArray[np.float32]:
        return self._newest(self._history.rows.entropy_nats, "entropy_nats")

    @kept
    def end_rank(self) -> NDArray[np.uint32]:
        return self._newest(self._history.rows.end_rank, "end_rank")

    def _newest(self, column: NDArray[Any], name: str) -> NDArray[Any]:
        """A column of rows in the newest one, or what the table held before the first."""
        held: NDArray[Any] = getattr(self._table, name)[self.slot]
        if not len(column):
            return held
        rows, before = self._history.rows, getattr(self._history.before, name)
        earlier = before[np.minimum(np.searchsorted(rows.s, self.slot), len(rows.s) - 1)]
        earlier = np.where(self._over > 0, earlier, held)
        return np.where(self._has_row, column[self.place - 1], earlier)

    def _back(self, name: str, running: NDArray[Any]) -> NDArray[Any]:
        """A column that rows add to: as the table has it, less what came after the moment."""
        told: NDArray[Any] = getattr(self._table, name)[self.slot] - (running[self._over] - running[self.place])
        return told

    def _back_by_entropies(self, name: str, running: NDArray[Any]) -> NDArray[Any]:
        (here, over), column = self._entropies, getattr(self._table, name)
        told: NDArray[Any] = column[self.slot] - (running[over] - running[here])
        return told

    @kept
    def _entropies(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many entropies of the report come before each moment, and before its slot's last row is over."""
        number = self._history.entropy_number
        return number[self.place], number[self._over]

    @kept
    def _begin(self) -> NDArray[np.intp]:
        """The place before the slot's first row."""
        return self._history.span(self.slot)[0]

    @kept
    def _over(self) -> NDArray[np.intp]:
        """The place after the slot's last row."""
        return np.maximum(self._history.span(self.slot)[1], self.place)

    @kept
    def think_tokens(self) -> NDArray[np.int64]:
        return self._back("think_tokens", self._history.think)

    @kept
    def output_tokens(self) -> NDArray[np.int64]:
        return self._back("output_tokens", self._history.output)

    @kept
    def entropy_count(self) -> NDArray[np.int64]:
        here, over = self._entropies
        told: NDArray[np.int64] = self._table.entropy_count[self.slot] - (over - here)
        return told

    @kept
    def entropy_sum(self) -> NDArray[np.float64]:
        return self._back_by_entropies("entropy_sum", self._history.entropy_nats)

    @kept
    def entropy_window_sum(self) -> NDArray[np.float64]:
        return self._back_by_entropies("entropy_window_sum", self._history.window_nats)

    @kept
    def boundary_now(self) -> NDArray[np.bool_]:
        number = self._history.end_number
        is_end = self._has_row & (number[self.place] > number[self.place - 1])
        return is_end & (self.step == self._row_step) if "step" in vars(self) else is_end

    @kept
    def boundary_count(self) -> NDArray[np.int64]:
        return self._back("boundary_count", self._history.end_number)

    @kept
    def boundary_ranks(self) -> NDArray[np.int64]:
        ends, number = self._history.ends, self._history.end_number
        held: NDArray[np.int64] = self._table.boundary_ranks[self.slot]
        if not len(ends.row):
            return held
        here, begin, end = number[self.place], number[self._begin], number[self._over]
        before = np.where((end > begin)[:, None], ends.before[np.minimum(begin, len(ends.row) - 1)], held)
        return np.where((here > begin)[:, None], ends.ranks[here - 1], before)


def joined(table: RequestTable, history: History, parts: Sequence[tuple[NDArray[Any], ...]]) -> Moments:
    """The moments of these slots, places and steps, each once, in order."""
    slot, place, step = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.lexsort((place, step, slot))
    slot, place, step = slot[order], place[order], step[order]
    once = differs(slot) | differs(step) | differs(place)
    return Moments(table, history, slot[once], place[once], step[once])


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
