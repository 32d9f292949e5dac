"""Keeps the rows of the newest report, from which the state of a request after any of these rows can be computed.

The request table holds the state after the whole report. A rule is asked about every sentence end within the report, so
that its answers do not depend on how the agent merges steps into reports. The module knows no rule and no policy. The
code does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.masks import any_in
from meridian_control.common.table_columns import END_WORDS, RANKS, ROW_WORDS, RPDI, column_in, place_of, words_of
from meridian_control.engine.token_rows import FLAG_FROM_OUTPUT, TAKE_BACK_SHIFT, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.token_rows import TokenRows

# Columns of `History.counts`: thinking tokens, output tokens, sentence ends with a rank, and token entropies.
THINK_TOKENS, OUTPUT_TOKENS, SENTENCE_ENDS, ENTROPIES = range(4)
# Places of columns in a row of SIGNAL_ROW, in numbers of each column's own size.
PHASE, BOUNDARY_NOW = map(place_of, ("phase", "boundary_now"))
ENTROPY_NATS, END_RANK = map(place_of, ("entropy_nats", "end_rank"))
ENTROPY_SUM, ENTROPY_WINDOW_SUM = map(place_of, ("entropy_sum", "entropy_window_sum"))
# Words of a row with the columns of `History.counts`, and with the rows of `History.sums`.
COUNT_WORDS, ENTROPY_SUMS = slice(4), words_of("entropy_sum", "entropy_window_sum")
# For each word with a value at a sentence end, the word that had the value at the sentence end before; the newest
# values are written afterwards.
SHIFTED = np.maximum(np.arange(RPDI.stop) - 1, 0)
# The number of a step within a report is smaller.
MAX_STEP = (1 << 32) - 1


class SentenceEnds(NamedTuple):
    """Rows that reported the end marker's rank at a sentence end, [ends], sorted by slot.

    newest: the words of the columns boundary_ranks and boundary_rpdi of the slot after the row; before: the same before
    the report.
    """

    row: NDArray[np.intp]
    newest: NDArray[np.int64]
    before: NDArray[np.int64]


NO_ENDS = SentenceEnds(np.zeros(0, np.intp), *[np.zeros((0, END_WORDS.stop - END_WORDS.start), np.int64)] * 2)


class Unsampled:
    """The signals of all slots before the table takes in the report's EAT samples; each column is an attribute.

    words: rows of SIGNAL_ROW, [slots, words]. steps: step of each slot's first sample, -1 for none, [slots].
    """

    def __init__(self, words: NDArray[np.int64], sampled: dict[int, int]) -> None:
        self.words, self.steps = words, np.full(len(words), -1)
        self.steps[list(sampled)] = list(sampled.values())

    def __getattr__(self, name: str) -> Any:
        return column_in(self.words, name)


class History:
    """The rows of the newest report that the table has taken in, sorted by slot.

    before, after: the rows of SIGNAL_ROW of the slots that have rows, before and after the report, as far as token rows
    change them, [slots, words]. counts, sums: as `running_counts` and `window_entropies` return them. step: the step of
    each row, followed by -1 for no row, [rows + 1]. unsampled: None if the report has no EAT samples. probed: step in
    which the outcome of the slot's probe came, by slot.
    """

    def __init__(
        self,
        rows: TokenRows,
        before: NDArray[np.int64],
        after: NDArray[np.int64],
        counts: NDArray[np.int64],
        sums: NDArray[np.float64],
    ) -> None:
        self.rows, self.before, self.after, self.ends = rows, before, after, NO_ENDS
        self.counts, self.sums = counts, sums
        self.step = np.zeros(len(rows.slot) + 1, np.int64)
        self.step[-1] = -1
        self.unsampled: Unsampled | None = None
        self.probed: dict[int, int] = {}

    def tell_steps(self, step_of: NDArray[np.int64]) -> None:
        """Take in the step of each row, in the order of the rows in the report."""
        self.step[:-1] = step_of.take(self.rows.number)

    def note_probe_outcomes(self, slots: list[int | None], steps: list[int]) -> None:
        """Note the steps in which the outcomes of these slots' probes came, [outcomes]; None is no probe."""
        self.probed |= {slot: step for slot, step in zip(slots, steps, strict=True) if slot is not None}

    def newest_rows(self, slots: NDArray[np.int64], steps: NDArray[np.int64] | int = MAX_STEP) -> NDArray[np.intp]:
        """Return for each slot its newest row up to a step of the report, -1 if the slot has none."""
        slot = np.append(self.rows.slot, -1)
        row = ((slot[:-1] << 32) + self.step[:-1]).searchsorted((slots << 32) + steps, side="right") - 1
        return np.where(slot[row] == slots, row, -1)

    def count(self, column: int, row: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return a count of each row's slot right after the row. column: its column in `counts`."""
        owner, counts = self.rows.owner.take(row), self.counts[:, column]
        count: NDArray[np.int64] = (self.after[:, column] - counts.take(self.rows.edges[1:])).take(owner)
        count += counts.take(row + 1)
        return self._kept_from_negative(count)

    def counted(self, row: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the slots' rows of SIGNAL_ROW after the report, but with the counts and the sums of entropies right
        after these rows."""
        owner = self.rows.owner.take(row)
        here, over = self.counts.take(row + 1, axis=0), self.counts.take(self.rows.edges.take(owner + 1), axis=0)
        words = self.after.take(owner, axis=0)
        later = self.sums.take(over[:, ENTROPIES], axis=1) - self.sums.take(here[:, ENTROPIES], axis=1)
        words.view(np.float64)[:, ENTROPY_SUMS] -= later.T
        counts = words[:, COUNT_WORDS]
        counts -= over - here
        self._kept_from_negative(counts)
        return words

    def _kept_from_negative(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replace negative counts by 0, because a faulty agent may take back more tokens than it counted."""
        return np.maximum(counts, 0, out=counts) if self.rows.flags_seen >> TAKE_BACK_SHIFT else counts

    def state(self, row: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the slots' rows of SIGNAL_ROW right after these rows, as far as rules and the decision log read them
        and token rows change them."""
        rows, words, number = self.rows, self.counted(row), self.counts[:, SENTENCE_ENDS]
        words.view(np.uint32)[:, END_RANK] = rows.end_rank.take(row)
        words.view(np.float32)[:, ENTROPY_NATS] = rows.entropy_nats.take(row)
        in_bytes = words.view(np.uint8)
        in_bytes[:, PHASE] = rows.phase_after.take(row)
        in_bytes[:, BOUNDARY_NOW] = number.take(row + 1) > number.take(row)
        return words


def running_counts(rows: TokenRows, ends: NDArray[np.intp], measured: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return running sums in the columns THINK_TOKENS to ENTROPIES before each row and at the end, [rows + 1, 4].

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
) -> NDArray[np.float64]:
    """Add the token entropies of some rows to the sums of entropies and to the windows; return running sums of the
    entropies and of the changes of the windows' sums, [2, entropies + 1].

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
    running = np.zeros((2, len(measured) + 1))
    running[0, 1:], running[1, 1:] = entropy, change
    return running.cumsum(axis=1, out=running)


def values_at_ends(history: History, known: NDArray[np.intp], before: NDArray[np.int64], width: int) -> SentenceEnds:
    """Return the ranks and RPDI at the report's sentence ends.

    known: their rows, [ends]. before: as SentenceEnds has it. width: number of entropies in a window.
    """
    counted, owner = history.counted(known), history.rows.owner.take(known)
    newest = before.take(SHIFTED, axis=1)
    newest[:, 0] = history.rows.end_rank.take(known)
    with np.errstate(divide="ignore", invalid="ignore"):
        newest.view(np.float64)[:, RPDI.start] = ratio_of_means(
            width, counted[:, ENTROPIES], *counted.view(np.float64)[:, ENTROPY_SUMS].T
        )
    if any_in(owner[1:] == owner[:-1]):
        # The values at a request's earlier sentence ends of the report come before those that the table holds.
        index = np.arange(len(known))[:, None]
        earlier = index - owner.searchsorted(owner)[:, None]
        for words in (RANKS, RPDI):
            ages = np.arange(words.stop - words.start)
            held = before[index, words.start + np.maximum(ages - earlier - 1, 0)]
            newest[:, words] = np.where(ages <= earlier, newest[np.maximum(index - ages, 0), words.start], held)
    return SentenceEnds(known, newest, before)


def ratio_of_means(
    width: int, count: NDArray[np.int64], total: NDArray[np.float64], newest_sum: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return RPDI: the mean of the newest `width` entropies divided by the mean of all `count`; NaN while there are
    fewer. Call it with NumPy's warnings about divisions off, because a count or a total may be 0."""
    return np.where(count >= width, (newest_sum / width) / (total / count), np.nan)


NO_HISTORY = History(
    rows_of(agent_pb2.TokenColumns(), np.zeros(0, bool), 0.0),
    before=np.zeros((0, ROW_WORDS.stop), np.int64),
    after=np.zeros((0, ROW_WORDS.stop), np.int64),
    counts=np.zeros((1, 4), np.int64),
    sums=np.zeros((2, 1)),
)
