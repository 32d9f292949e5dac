"""Keeps the rows of the newest report, from which `moments` computes the state of a request after any of these rows.

The request table holds the state after the whole report. A rule is asked about every sentence end within the report, so
that its answers do not depend on how the agent merges steps into reports. The module knows no rule and no policy. The
code does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decisions.table_columns import SIGNAL_ROW
from meridian_control.decisions.token_rows import FLAG_END

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from meridian_control.decisions.token_rows import TokenRows

# Rows of `History.counts`: thinking tokens, output tokens, sentence ends with a rank, and token entropies.
THINK_TOKENS, OUTPUT_TOKENS, SENTENCE_ENDS, ENTROPIES = range(4)
THINK, OUTPUT = agent_pb2.PHASE_THINK, agent_pb2.PHASE_OUTPUT

T = TypeVar("T")


class kept(Generic[T]):  # noqa: N801
    """A property that is computed once, like `functools.cached_property` but without the lock of Python 3.11."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, made_for: Any, owner: type | None = None) -> T:
        made: T = self._make(made_for)
        made_for.__dict__[self._name] = made
        return made


class Unsampled(NamedTuple):
    """The columns that a probe's result changes, with their values before the result, [slots] or [moments]."""

    eat_nats: NDArray[np.float64]
    eat_ema_nats: NDArray[np.float64]
    eat_ema_variance: NDArray[np.float64]
    eat_count: NDArray[np.int64]
    eat_think_tokens: NDArray[np.int64]
    same_answer: NDArray[np.int64]
    empty_answer: NDArray[np.bool_]
    earlier_eat_ema_nats: NDArray[np.float64]
    earlier_eat_ema_variance: NDArray[np.float64]


class Before(NamedTuple):
    """Columns of the slots that have rows, with their values before the report, [slots]."""

    phase: NDArray[np.uint8]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.uint32]


class SentenceEnds(NamedTuple):
    """Rows that reported the end marker's rank at a sentence end, [ends], sorted by slot.

    number: how many ranks the slot has had. ranks, margins, rpdi: the columns boundary_ranks, boundary_margins and
    boundary_rpdi of the slot after the row; ranks_before, margins_before, rpdi_before: the same before the report.
    """

    row: NDArray[np.intp]
    number: NDArray[np.int64]
    ranks: NDArray[np.int64]
    ranks_before: NDArray[np.int64]
    margins: NDArray[np.float64]
    margins_before: NDArray[np.float64]
    rpdi: NDArray[np.float64]
    rpdi_before: NDArray[np.float64]


class Entropies(NamedTuple):
    """Rows with the token entropy of a thinking token, [entropies].

    nats: the entropy. change_nats: the change of the sum over the slot's entropy window.
    """

    row: NDArray[np.intp]
    nats: NDArray[np.float64]
    change_nats: NDArray[np.float64]


class History:
    """The rows of the newest report that the table has taken in, sorted by slot.

    A place is a position between two rows: place n comes right after row n - 1. counted: thinking tokens and output
    tokens that each row adds, [rows]. think_tokens: thinking tokens after the report, [slots]. sampled: step in which
    EAT was measured, by slot. probed: step in which the outcome of the slot's probe came, by slot.
    """

    def __init__(
        self,
        rows: TokenRows,
        before: Before,
        ends: SentenceEnds,
        counted: tuple[NDArray[np.int64], NDArray[np.int64]],
        entropies: Entropies,
        *,
        think_tokens: NDArray[np.int64],
    ) -> None:
        self.rows, self.before, self.ends, self.entropies = rows, before, ends, entropies
        (self._think, self._output), self._think_tokens = counted, think_tokens
        self._steps: NDArray[np.int64] | None = None
        self.sampled: dict[int, int] = {}
        # The EAT columns of the sampled slots, with their values before the report.
        self.unsampled: Unsampled
        self.probed: dict[int, int] = {}

    def tell_steps(self, step_of: NDArray[np.int64]) -> None:
        """Take in the step of each row, in the order of the rows in the report."""
        self._steps = step_of

    def tell_rpdi(self, newest: NDArray[np.float64], before: NDArray[np.float64]) -> None:
        """Take in RPDI at the report's sentence ends, as SentenceEnds has it."""
        self.ends = self.ends._replace(rpdi=newest, rpdi_before=before)

    def sample(self, table: Any, sampled: dict[int, int]) -> None:
        """Keep the EAT columns before the table takes in the report's samples.

        sampled: step in which the first sample of each slot was measured.
        """
        self.sampled = sampled
        rows = table.packed(self.sampled_slots).view(SIGNAL_ROW)[:, 0]
        self.unsampled = Unsampled(*(rows[name] for name in Unsampled._fields))

    def note_probe_outcome(self, slot: int, step: int) -> None:
        """Note the step in which the outcome of the slot's probe came."""
        self.probed[slot] = step

    # --------------------------------------------------------------------------------------------------------- places

    def span(self, slot: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return for each slot the places before its first row and after its last row; both are 0 without rows."""
        rows = self.rows
        if not len(rows.s):
            return np.zeros(len(slot), np.intp), np.zeros(len(slot), np.intp)
        index = np.minimum(rows.s.searchsorted(slot), len(rows.s) - 1)
        known = rows.s[index] == slot
        return np.where(known, rows.first[index], 0), np.where(known, rows.last[index] + 1, 0)

    def places_in(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return for each slot the place after its last row of the given step."""
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
    def owner(self) -> NDArray[np.intp]:
        """The index of each row's slot among the slots that have rows, [rows]."""
        owner: NDArray[np.intp] = self.rows.begins.cumsum() - 1
        return owner

    @kept
    def think_tokens(self) -> NDArray[np.int64]:
        """The thinking tokens of the request after each row, [rows]."""
        added = self._think.cumsum()
        before = self._think_tokens - added.take(self.rows.last)
        think_tokens: NDArray[np.int64] = added + before.take(self.owner)
        return think_tokens

    @kept
    def thinks(self) -> NDArray[np.bool_]:
        """Whether the request thinks after each row, [rows]."""
        rows = self.rows
        return rows.thinks & ((rows.flags & FLAG_END) == 0) if rows.flags_seen & FLAG_END else rows.thinks

    # ---------------------------------------------------------------------------------------- running sums, [places]

    @kept
    def counts(self) -> NDArray[np.int64]:
        """Running sums in the rows THINK_TOKENS to ENTROPIES, [4, places]."""
        counts = np.zeros((4, len(self.rows.slot) + 1), np.int64)
        added = counts[:, 1:]
        added[THINK_TOKENS], added[OUTPUT_TOKENS] = self._think, self._output
        added[SENTENCE_ENDS, self.ends.row] = added[ENTROPIES, self.entropies.row] = 1
        return counts.cumsum(axis=1, out=counts)

    @kept
    def entropy_sums(self) -> NDArray[np.float64]:
        """Running sums of the entropies and of the changes of their windows' sums, [2, entropies + 1]; they are indexed
        by number of entropies, not by place."""
        sums = np.zeros((2, len(self.entropies.row) + 1))
        sums[0, 1:], sums[1, 1:] = self.entropies.nats, self.entropies.change_nats
        return sums.cumsum(axis=1, out=sums)

    # -------------------------------------------------------------------------------------------------------- moments

    @property
    def sampled_slots(self) -> NDArray[np.int64]:
        return np.fromiter(self.sampled, np.int64, len(self.sampled))

    @property
    def sampled_steps(self) -> NDArray[np.int64]:
        return np.fromiter(self.sampled.values(), np.int64, len(self.sampled))

    def unsampled_of(self, slots: NDArray[np.int64]) -> Unsampled:
        """Return the EAT columns of sampled slots, with their values before the report."""
        number = {slot: number for number, slot in enumerate(self.sampled)}
        at = [number[slot] for slot in slots.tolist()]
        columns: tuple[NDArray[Any], ...] = self.unsampled
        return Unsampled(*(column[at] for column in columns))


def ratio_of_means(
    width: int, count: NDArray[np.int64], total: NDArray[np.float64], newest_sum: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return RPDI: the mean of the newest `width` entropies divided by the mean of all `count`; NaN while there are
    fewer."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (newest_sum / width) / (total / count)
    return np.where(count >= width, ratio, np.nan)
