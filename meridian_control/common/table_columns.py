"""Declares the columns of the request table: their types, the values of a new row, and what each column means.

Only `RequestTable` writes columns; all other modules read them. The module holds declarations only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Kinds of a request's newest token: no token reported yet, an answer token, an end of thinking, any other token.
NO_TOKEN, ANSWER_TOKEN, THINK_END, OTHER_TOKEN = range(4)

# How the thinking of a request first ended: not yet, by the model itself, by anything else.
NO_END, NATURAL_END, FORCED_END = range(3)

# Values of `max_think_tokens` and `rank` without a number: nothing was decided yet, or the request has no cap.
UNTOLD, NO_CAP = -1, -2
# Value of `probed_tokens` before the first probe; with any interval it is below every number of tokens.
NOT_PROBED = -(1 << 40)
# Value of `ranked_phase` before the first rank is decided: the agent ranks the request by its phase.
UNRANKED = 255

# Number of newest sentence ends, and of newest EAT samples, at which the table keeps what a rule compares: the most
# that entropy.confirm_sentence_ends may ask for.
CONFIRM_HISTORY = 4
# Number of newest sentence ends for which the table keeps the end-marker rank, because a rank condition reads up to 8
# of them at each sentence end.
RANK_HISTORY = 8 + CONFIRM_HISTORY - 1


def column(kind: Any, new: Any, number: int = 0) -> Any:
    """Declare a column. kind: its type. new: the value in the row of a new request. number: values per request of a
    column that has several."""
    return (kind, new, number) if number else (kind, new)


class Columns:
    """The columns as typed attributes, each [slots]."""

    live: NDArray[np.bool_] = column(bool, True)
    phase: NDArray[np.uint8] = column(np.uint8, 0)
    # Index of the policy that holds for the request, among the session's policies.
    group: NDArray[np.int64] = column(np.int64, 0)
    # Floor of thinking tokens that the request itself asks for.
    own_min_think_tokens: NDArray[np.int64] = column(np.int64, 0)
    prompt_tokens: NDArray[np.int64] = column(np.int64, 0)
    think_tokens: NDArray[np.int64] = column(np.int64, 0)
    output_tokens: NDArray[np.int64] = column(np.int64, 0)
    preempted: NDArray[np.bool_] = column(bool, False)
    # Whether the request waits for its first step, and the agent will report its queueing time.
    queued: NDArray[np.bool_] = column(bool, False)
    # Whether the engine leaves the request unmeasured while no rule in force reads signals.
    unmeasured: NDArray[np.bool_] = column(bool, False)
    # Time of the request's newest token, or of its opening before the first token: milliseconds on the session's clock.
    token_ms: NDArray[np.float64] = column(np.float64, 0.0)
    newest_token: NDArray[np.uint8] = column(np.uint8, NO_TOKEN)
    # Signals of the newest token.
    entropy_nats: NDArray[np.float32] = column(np.float32, np.nan)
    end_rank: NDArray[np.uint32] = column(np.uint32, 0)
    end_logprob_nats: NDArray[np.float32] = column(np.float32, np.nan)
    # Sums and count of the token entropies of the thinking so far, for RPDI.
    entropy_sum: NDArray[np.float64] = column(np.float64, 0.0)
    entropy_window_sum: NDArray[np.float64] = column(np.float64, 0.0)
    entropy_count: NDArray[np.int64] = column(np.int64, 0)
    # Whether the newest token ends a sentence; whether its row reported the rank at a sentence end; number of ranks
    # reported so far.
    at_boundary: NDArray[np.bool_] = column(bool, False)
    boundary_now: NDArray[np.bool_] = column(bool, False)
    boundary_count: NDArray[np.int64] = column(np.int64, 0)
    # The newest EAT sample, the exponential moving mean and variance of the samples, and their number.
    eat_nats: NDArray[np.float64] = column(np.float64, np.nan)
    eat_ema_nats: NDArray[np.float64] = column(np.float64, np.nan)
    eat_ema_variance: NDArray[np.float64] = column(np.float64, 0.0)
    eat_count: NDArray[np.int64] = column(np.int64, 0)
    # Thinking tokens at which the newest EAT sample was measured.
    eat_think_tokens: NDArray[np.int64] = column(np.int64, 0)
    # Thinking tokens at which the newest EAT probe was asked for; whether a probe has no outcome yet, because a request
    # has one probe at a time.
    probed_tokens: NDArray[np.int64] = column(np.int64, NOT_PROBED)
    probe_open: NDArray[np.bool_] = column(bool, False)
    # Thinking tokens at which a probe near the cap may be asked for.
    next_cap_probe_tokens: NDArray[np.int64] = column(np.int64, 1)
    # Whether the newest probe found that the answer would be empty; whether the request was probed near this cap, which
    # happens once for each cap; whether the cap was extended because the answer would be empty.
    empty_answer: NDArray[np.bool_] = column(bool, False)
    cap_probed: NDArray[np.bool_] = column(bool, False)
    extended: NDArray[np.bool_] = column(bool, False)
    # Cycle in which the newest thinking tokens repeat, as of the newest report: tokens of a round, and tokens that
    # repeat; 0 for no cycle.
    loop_period: NDArray[np.int64] = column(np.int64, 0)
    loop_tokens: NDArray[np.int64] = column(np.int64, 0)
    # Whether the newest report closes the request.
    closing: NDArray[np.bool_] = column(bool, False)
    # Newest decisions that are in force on the agent. Of ranks, the agent is sent only those that differ from the one
    # that it gives the request's phase by itself.
    rank: NDArray[np.int64] = column(np.int64, UNTOLD)
    # Phase of the request when `rank` was decided. The agent drops a rank when the phase changes.
    ranked_phase: NDArray[np.uint8] = column(np.uint8, UNRANKED)
    # Eviction tier that was sent, 0 for none.
    tier: NDArray[np.uint8] = column(np.uint8, 0)
    max_think_tokens: NDArray[np.int64] = column(np.int64, UNTOLD)
    cap_shadow: NDArray[np.bool_] = column(bool, False)
    # Answer reserve that was sent with the cap, 0 for none.
    answer_reserve_tokens: NDArray[np.int64] = column(np.int64, 0)
    # Whether thinking has ended at least once; whether its newest end was forced.
    ended: NDArray[np.bool_] = column(bool, False)
    forced: NDArray[np.bool_] = column(bool, False)
    # How thinking ended the first time; whether thinking has ended more than once.
    first_end: NDArray[np.uint8] = column(np.uint8, NO_END)
    reentered: NDArray[np.bool_] = column(bool, False)
    # Whether the request is held out, so that nothing shortens it; whether it counts as treated or as held out when it
    # closes.
    control: NDArray[np.bool_] = column(bool, False)
    counted: NDArray[np.bool_] = column(bool, False)
    # The signals whose first value that a rule could read is still to be compared with the calibration, one bit for
    # each of drift_schema.SIGNALS.
    awaited_signals: NDArray[np.uint8] = column(np.uint8, 0)
    # The rule that ended the request's thinking, as a ForceReason.
    end_decided: NDArray[np.uint8] = column(np.uint8, 0)
    # The rules in shadow that fired for the request, one bit for each ForceReason.
    shadow_decided: NDArray[np.uint32] = column(np.uint32, 0)

    # Columns with several values per request, [slots, number], newest first.
    # End-marker ranks at the newest sentence ends of the thinking.
    boundary_ranks: NDArray[np.int64] = column(np.int64, 0, RANK_HISTORY)
    # RPDI at the newest sentence ends.
    boundary_rpdi: NDArray[np.float64] = column(np.float64, np.nan, CONFIRM_HISTORY)
    # The moving mean and variance of EAT after the samples before the newest one.
    earlier_eat_ema_nats: NDArray[np.float64] = column(np.float64, np.nan, CONFIRM_HISTORY - 1)
    earlier_eat_ema_variance: NDArray[np.float64] = column(np.float64, np.nan, CONFIRM_HISTORY - 1)


# By name of each column: (type, value in the row of a new request); and of each with several values, their number, too.
COLUMNS: dict[str, tuple[Any, Any]] = {}
HISTORIES: dict[str, tuple[Any, Any, int]] = {}
for _name in Columns.__annotations__:
    _declared = vars(Columns)[_name]
    (HISTORIES if len(_declared) == 3 else COLUMNS)[_name] = _declared
    # A table sets the attribute, and what reads some columns at some moments looks them up as they are asked for.
    delattr(Columns, _name)

# The columns that token rows change, the columns that a probe's result changes, and the others from which the decision
# log takes a decision's signals. The table keeps each request's values of them side by side, in rows of SIGNAL_ROW, so
# that they are copied at once. The first four columns are those of `History.counts`, in its order, and `end_rank`,
# `entropy_nats` and `end_logprob_nats` lie in the order of `TokenRows.newest_signals`.
ROW_COLUMNS = (
    *("think_tokens", "output_tokens", "boundary_count", "entropy_count"),
    *("entropy_sum", "entropy_window_sum", "token_ms", "end_rank", "entropy_nats", "end_logprob_nats"),
    *("phase", "newest_token", "at_boundary", "boundary_now"),
)
PROBE_COLUMNS = (
    *("eat_count", "eat_think_tokens", "eat_nats", "eat_ema_nats", "eat_ema_variance"),
    *("earlier_eat_ema_nats", "earlier_eat_ema_variance", "empty_answer"),
)
SENTENCE_END_COLUMNS = ("boundary_ranks", "boundary_rpdi")
SIGNAL_COLUMNS = (
    *ROW_COLUMNS,
    *PROBE_COLUMNS,
    *("max_think_tokens", "loop_period", "loop_tokens"),
    *SENTENCE_END_COLUMNS,
)
SIGNAL_ROW = np.dtype(
    [
        (name, HISTORIES[name][0], (HISTORIES[name][2],)) if name in HISTORIES else (name, COLUMNS[name][0])
        for name in SIGNAL_COLUMNS
    ],
    align=True,
)
# Bytes of a word; a row of SIGNAL_ROW is read and written as an array of words, too.
WORD_BYTES = 8


def place_of(name: str) -> int:
    """Return the place of a signal column in a row, in numbers of the column's own size."""
    column, offset = SIGNAL_ROW.fields[name][:2]  # type: ignore[index]
    return int(offset) // column.base.itemsize


def words_of(first: str, last: str) -> slice:
    """Return the words of a row that hold the signal columns from `first` to `last`."""
    (_, begin, *_), (column, end, *_) = (SIGNAL_ROW.fields[name] for name in (first, last))  # type: ignore[index]
    return slice(begin // WORD_BYTES, -(-(end + column.itemsize) // WORD_BYTES))


# The words of a row with the newest EAT sample, the moving mean and variance, and those at earlier samples. For each of
# these words but the first three, the word that had the value one sample before.
EAT_WORDS = words_of("eat_nats", "earlier_eat_ema_variance")
EAT_SHIFTED = [0, 1, 2, 1, *range(3, CONFIRM_HISTORY + 1), 2, *range(CONFIRM_HISTORY + 2, 2 * CONFIRM_HISTORY)]

# The words of a row that token rows change, those that a probe's result changes, and those with the values at sentence
# ends; and among the last, the words of ranks and RPDI.
ROW_WORDS = words_of(ROW_COLUMNS[0], ROW_COLUMNS[-1])
PROBE_WORDS = words_of(PROBE_COLUMNS[0], PROBE_COLUMNS[-1])
END_WORDS = words_of(SENTENCE_END_COLUMNS[0], SENTENCE_END_COLUMNS[-1])
RANKS, RPDI = (
    slice(words.start - END_WORDS.start, words.stop - END_WORDS.start)
    for words in (words_of(name, name) for name in SENTENCE_END_COLUMNS)
)
# Words with the cycle.
CYCLES = words_of("loop_period", "loop_tokens")
# Type of each signal column, and its place in a row, or its places if it has several values, in numbers of that type.
SIGNAL_PLACES: dict[str, tuple[Any, int | slice]] = {
    name: (SIGNAL_ROW[name].base, slice(place, place + HISTORIES[name][2]) if name in HISTORIES else place)
    for name, place in ((name, place_of(name)) for name in SIGNAL_COLUMNS)
}


def column_in(words: NDArray[np.int64], name: str) -> Any:
    """Return a signal column of rows of SIGNAL_ROW. words: [rows, words]. Raises AttributeError if there is no such
    column."""
    if name not in SIGNAL_PLACES:
        raise AttributeError(name)
    kind, place = SIGNAL_PLACES[name]
    return words.view(kind)[:, place]


# The other columns of each type. The table keeps them side by side, so that it writes and reads several at once.
BY_TYPE: dict[Any, tuple[str, ...]] = {
    kind: tuple(name for name, (own, _) in COLUMNS.items() if own is kind and name not in SIGNAL_COLUMNS)
    for kind, _ in COLUMNS.values()
}
