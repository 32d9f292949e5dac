"""Keeps the rows of the newest report, from which `moments` computes the state of a request after any of these rows.

The request table holds the state after the whole report. A rule is asked about every sentence end within the report, so
that its answers do not depend on how the agent merges steps into reports. The module knows no rule and no policy. The
code does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.masks import any_in
from meridian_control.common.table_columns import (
    END_WORDS,
    PROBE_PLACES,
    PROBE_WORDS,
    RANKS,
    ROW_WORDS,
    RPDI,
    place_of,
    words_of,
)
from meridian_control.engine.token_rows import FLAG_END, FLAG_FROM_OUTPUT, TAKE_BACK_SHIFT, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from meridian_control.engine.token_rows import TokenRows

# Columns of `History.counts`: thinking tokens, output tokens, sentence ends with a rank, and token entropies.
THINK_TOKENS, OUTPUT_TOKENS, SENTENCE_ENDS, ENTROPIES = range(4)
THINK, OUTPUT = agent_pb2.PHASE_THINK, agent_pb2.PHASE_OUTPUT
# Places of columns in a row of SIGNAL_ROW, in numbers of each column's own size.
PHASE, ENTROPY_NATS, END_RANK = map(place_of, ("phase", "entropy_nats", "end_rank"))
ENTROPY_SUM, ENTROPY_WINDOW_SUM = map(place_of, ("entropy_sum", "entropy_window_sum"))
# Words of a row with the columns of `History.counts`, with the rows of `History.entropy_sums`, and with cycles.
COUNT_WORDS, ENTROPY_SUMS = slice(4), words_of("entropy_sum", "entropy_window_sum")
CYCLES = words_of("loop_period", "loop_tokens")
# For each word with a value at a sentence end, the word that had the value at the sentence end before; the newest
# values are written afterwards.
SHIFTED = np.maximum(np.arange(RPDI.stop) - 1, 0)

T = TypeVar("T")


class kept(Generic[T]):  # noqa: N801
    """A property that is computed once, like `functools.cached_property` but without the lock of Python 3.11."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, made_for: Any, owner: type | None = None) -> T:
        value: T = self._make(made_for)
        made_for.__dict__[self._name] = value
        return value


class Unsampled:
    """The columns that a probe's result changes, with their values before the result, [slots] or [moments].

    words: rows of SIGNAL_ROW, [slots or moments, words].
    """

    eat_nats: NDArray[np.float64]
    eat_ema_nats: NDArray[np.float64]
    eat_ema_variance: NDArray[np.float64]
    eat_count: NDArray[np.int64]
    eat_think_tokens: NDArray[np.int64]
    empty_answer: NDArray[np.bool_]
    earlier_eat_ema_nats: NDArray[np.float64]
    earlier_eat_ema_variance: NDArray[np.float64]

    def __init__(self, words: NDArray[np.int64]) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        if name not in PROBE_PLACES:
            raise AttributeError(name)
        kind, place = PROBE_PLACES[name]
        column = self._words.view(kind)[:, place]
        setattr(self, name, column)
        return column

    @property
    def words(self) -> NDArray[np.int64]:
        """The words that a probe's result changes, [slots or moments, words]."""
        return self._words[:, PROBE_WORDS]

    def of(self, index: list[int]) -> Unsampled:
        """Return the columns of some of the slots."""
        return Unsampled(self._words[index])


class Before:
    """Columns of the slots that have rows, with their values before the report, [slots].

    words: the slots' rows of SIGNAL_ROW before the report, as far as token rows change them.
    """

    def __init__(self, words: NDArray[np.int64]) -> None:
        self._words = words

    @kept
    def phase(self) -> NDArray[np.uint8]:
        return self._words.view(np.uint8)[:, PHASE]

    @kept
    def entropy_nats(self) -> NDArray[np.float32]:
        return self._words.view(np.float32)[:, ENTROPY_NATS]

    @kept
    def end_rank(self) -> NDArray[np.uint32]:
        return self._words.view(np.uint32)[:, END_RANK]


class SentenceEnds(NamedTuple):
    """Rows that reported the end marker's rank at a sentence end, [ends], sorted by slot.

    number: how many ranks the slot has had. newest: the words of the columns boundary_ranks and boundary_rpdi
    of the slot after the row; before: the same before the report.
    """

    row: NDArray[np.intp]
    number: NDArray[np.int64]
    newest: NDArray[np.int64]
    before: NDArray[np.int64]

    @property
    def ranks(self) -> NDArray[np.int64]:
        return self.newest[:, RANKS]

    @property
    def rpdi(self) -> NDArray[np.float64]:
        return self.newest.view(np.float64)[:, RPDI]


NO_ENDS = SentenceEnds(
    np.zeros(0, np.intp), np.zeros(0, np.int64), *[np.zeros((0, END_WORDS.stop - END_WORDS.start), np.int64)] * 2
)


class Entropies(NamedTuple):
    """Rows with the token entropy of a thinking token, [entropies].

    nats: the entropy. change_nats: the change of the sum over the slot's entropy window.
    """

    row: NDArray[np.intp]
    nats: NDArray[np.float64]
    change_nats: NDArray[np.float64]


class History:
    """The rows of the newest report that the table has taken in, sorted by slot.

    A place is a position between two rows: place n comes right after row n - 1. counts: as `running_counts` returns
    them. think_tokens: thinking tokens after the report, [slots]. sampled: step in which EAT was measured, by slot.
    probed: step in which the outcome of the slot's probe came, by slot.
    """

    def __init__(
        self,
        rows: TokenRows,
        before: Before,
        counts: NDArray[np.int64],
        entropies: Entropies,
        *,
        think_tokens: NDArray[np.int64],
    ) -> None:
        self.rows, self.before, self.ends, self.entropies = rows, before, NO_ENDS, entropies
        self.counts, self._think_tokens = counts, think_tokens
        self._steps: NDArray[np.int64] | None = None
        self.sampled: dict[int, int] = {}
        # The EAT columns of the sampled slots, with their values before the report.
        self.unsampled: Unsampled
        self.probed: dict[int, int] = {}

    def tell_steps(self, step_of: NDArray[np.int64]) -> None:
        """Take in the step of each row, in the order of the rows in the report."""
        self._steps = step_of

    def sample(self, table: Any, sampled: dict[int, int]) -> None:
        """Keep the EAT columns before the table takes in the report's samples.

        sampled: step in which the first sample of each slot was measured.
        """
        self.sampled = sampled
        self.unsampled = Unsampled(table.packed(self.sampled_slots))

    def note_probe_outcomes(self, slots: list[int | None], steps: list[int]) -> None:
        """Note the steps in which the outcomes of these slots' probes came, [outcomes]; None is no probe."""
        self.probed |= {slot: step for slot, step in zip(slots, steps, strict=True) if slot is not None}

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
        parts = zip(*(column.tolist() for column in (*self.span(slots), steps)), strict=True)
        places = (at + self.step[at:until].searchsorted(step, side="right") for at, until, step in parts)
        return np.fromiter(places, np.intp, len(slots))

    @kept
    def step(self) -> NDArray[np.int64]:
        """The step of each row, [rows]."""
        if self._steps is None:
            return np.zeros(len(self.rows.slot), np.int64)
        return self._steps[self.rows.number]

    @kept
    def think_tokens(self) -> NDArray[np.int64]:
        """The thinking tokens of the request after each row, [rows]."""
        added = self.counts[:, THINK_TOKENS]
        before = self._think_tokens - added.take(self.rows.edges[1:])
        think_tokens: NDArray[np.int64] = added[1:] + before.take(self.rows.owner)
        return think_tokens

    @kept
    def thinks(self) -> NDArray[np.bool_]:
        """Whether the request thinks after each row, [rows]."""
        rows = self.rows
        return rows.thinks & ((rows.flags & FLAG_END) == 0) if rows.flags_seen & FLAG_END else rows.thinks

    # ---------------------------------------------------------------------------------------- running sums, [places]

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
        return self.unsampled.of([number[slot] for slot in slots.tolist()])


def running_counts(rows: TokenRows, ends: NDArray[np.intp], measured: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return running sums in the columns THINK_TOKENS to ENTROPIES, [places, 4].

    ends: the rows that report a rank at a sentence end. measured: whether a row has the entropy of a thinking token,
    [rows].
    """
    counts = np.zeros((len(rows.slot) + 1, 4), np.int64)
    added = counts[1:].T
    added[THINK_TOKENS], added[OUTPUT_TOKENS], added[ENTROPIES] = rows.thinking, rows.answering, measured
    added[SENTENCE_ENDS, ends] = 1
    if rows.flags_seen >> TAKE_BACK_SHIFT:
        back = rows.flags >> TAKE_BACK_SHIFT
        from_output = (rows.flags & FLAG_FROM_OUTPUT) != 0
        added[THINK_TOKENS] -= np.where(from_output, 0, back)
        added[OUTPUT_TOKENS] -= np.where(from_output, back, 0)
    return np.add.accumulate(counts, axis=0, out=counts)


def window_entropies(
    rows: TokenRows,
    measured: NDArray[np.intp],
    counts_before: NDArray[np.int64],
    table: tuple[NDArray[np.int64], NDArray[np.int64]],
    window: NDArray[np.float32],
) -> Entropies:
    """Add the token entropies of some rows to the sums of entropies and to the windows.

    measured: the rows. counts_before: running counts before each slot's first row, [slots, 4]. table: the rows of
    SIGNAL_ROW of the slots that have rows, before and after the report; the second ones get the sums. window: the
    newest entropies of each slot, 0 before there are as many, [slots, tokens of the window]; the function writes into
    it.
    """
    (held, now), width, owner = table, window.shape[1], rows.owner.take(measured)
    # Double precision, so that an entropy leaves the window's sum exactly as it entered.
    entropy = rows.entropy_nats.take(measured).astype(np.float64)
    earlier = counts_before[:, ENTROPIES]
    count = (held[:, ENTROPIES] - earlier).take(owner)
    count += np.arange(len(measured))
    at = count % width
    at += rows.slot.take(measured) * width
    line = window.reshape(-1)
    oldest = line.take(at)
    if len(measured) > width:
        # If a report has more entropies than the window holds, some enter and leave the window in the same report.
        number = np.arange(len(measured)) - earlier.take(owner)
        passed = (number >= width).nonzero()[0]
        oldest[passed] = entropy[passed - width]
    change = entropy - oldest
    sums = now.view(np.float64)
    np.add.at(sums[:, ENTROPY_SUM], owner, entropy)
    np.add.at(sums[:, ENTROPY_WINDOW_SUM], owner, change)
    # If an entry occurs several times, NumPy keeps the value that is written last, which is the newest.
    line[at] = entropy
    return Entropies(measured, entropy, change)


def values_at_ends(
    history: History, known: NDArray[np.intp], before: NDArray[np.int64], now: NDArray[np.int64], width: int
) -> SentenceEnds:
    """Return the ranks and RPDI at the report's sentence ends.

    known: their rows, [ends]. before: as SentenceEnds has it. now: the rows of SIGNAL_ROW of the slots that have rows,
    after the report. width: number of entropies in a window.
    """
    rows, counts, sums = history.rows, history.counts, history.entropy_sums
    owner = rows.owner.take(known)
    # The counts and entropies after each sentence end, which the table has in them too.
    over, here, held = counts.take(rows.edges.take(owner + 1), axis=0), counts.take(known + 1, axis=0), now[owner]
    later = sums.take(over[:, ENTROPIES], axis=1) - sums.take(here[:, ENTROPIES], axis=1)
    total, newest_sum = held.view(np.float64)[:, ENTROPY_SUMS].T - later
    over -= here
    newest = before.take(SHIFTED, axis=1)
    newest[:, 0] = rows.end_rank.take(known)
    values = newest.view(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        values[:, RPDI.start] = ratio_of_means(width, held[:, ENTROPIES] - over[:, ENTROPIES], total, newest_sum)
    if any_in(owner[1:] == owner[:-1]):
        index = np.arange(len(known))
        _put_earlier_ends(newest, before, index - counts[rows.first.take(owner), SENTENCE_ENDS])
    return SentenceEnds(known, held[:, SENTENCE_ENDS] - over[:, SENTENCE_ENDS], newest, before)


def _put_earlier_ends(newest: NDArray[np.int64], before: NDArray[np.int64], earlier: NDArray[np.int64]) -> None:
    """Put the values at a request's earlier sentence ends of the report before those that the table holds.

    newest, before: as SentenceEnds has them; of `newest`, each sentence end's own values are set. earlier: the number
    of the request's earlier sentence ends in the report, [ends].
    """
    index, earlier = np.arange(len(newest))[:, None], earlier[:, None]
    for words in (RANKS, RPDI):
        ages = np.arange(words.stop - words.start)
        held = before[index, words.start + np.maximum(ages - earlier - 1, 0)]
        newest[:, words] = np.where(ages <= earlier, newest[np.maximum(index - ages, 0), words.start], held)


def ratio_of_means(
    width: int, count: NDArray[np.int64], total: NDArray[np.float64], newest_sum: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return RPDI: the mean of the newest `width` entropies divided by the mean of all `count`; NaN while there are
    fewer. Call it with NumPy's warnings about divisions off, because a count or a total may be 0."""
    return np.where(count >= width, (newest_sum / width) / (total / count), np.nan)


def _no_history() -> History:
    """Return the history of a table that takes in no report."""
    rows, nothing = rows_of(agent_pb2.TokenColumns(), np.zeros(0, bool), 0.0), np.zeros(0)
    counts, entropies = running_counts(rows, rows.first, rows.thinking), Entropies(rows.first, nothing, nothing)
    before = np.zeros((0, ROW_WORDS.stop), np.int64)
    return History(rows, Before(before), counts, entropies, think_tokens=rows.s)


NO_HISTORY = _no_history()
