"""Holds the live requests of one engine as NumPy columns indexed by slot.

The table owns token counts, phases, signals, and the decisions that are in force for each request. Rules read columns;
the session changes them through the table's methods. The module does no I/O and knows neither a clock nor a policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.masks import any_in
from meridian_control.decisions.decided_columns import DecidedColumns
from meridian_control.decisions.history import ENTROPIES, Before, Entropies, History, SentenceEnds, ratio_of_means
from meridian_control.decisions.table_columns import (
    BY_TYPE,
    COLUMNS,
    CONFIRM_HISTORY,
    HISTORIES,
    RANK_HISTORY,
    SIGNAL_COLUMNS,
    SIGNAL_ROW,
)
from meridian_control.decisions.token_rows import (
    FLAG_BOUNDARY,
    FLAG_END,
    FLAG_FROM_OUTPUT,
    TAKE_BACK_SHIFT,
    Intervals,
    Newest,
    intervals,
    owners,
    rows_of,
    token_kinds,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from meridian_control.decisions.token_rows import TokenRows

PROMPT, THINK, OUTPUT = agent_pb2.PHASE_PROMPT, agent_pb2.PHASE_THINK, agent_pb2.PHASE_OUTPUT
# The table keeps this phase if an agent of a newer version sends a phase that the control plane does not know.
UNKNOWN = agent_pb2.PHASE_UNSPECIFIED

NONE = np.zeros(0, np.int64)
NO_RANKS, NO_VALUES = np.zeros((0, RANK_HISTORY), np.int64), np.zeros((0, CONFIRM_HISTORY))
NO_ENDS = SentenceEnds(NONE, NONE, NO_RANKS, NO_RANKS, NO_VALUES, NO_VALUES, NO_VALUES, NO_VALUES)

# Values of a new request's columns: those in SIGNAL_ROW, and the others by type.
NEW_SIGNALS = np.zeros((), SIGNAL_ROW)
for _name in SIGNAL_COLUMNS:
    NEW_SIGNALS[_name] = (HISTORIES[_name] if _name in HISTORIES else COLUMNS[_name])[1]
NEW_ROW = {kind: np.array([COLUMNS[name][1] for name in names], kind) for kind, names in BY_TYPE.items()}

# Bound for slot numbers. Agents number requests densely, so only a broken or hostile agent exceeds the bound.
MAX_SLOTS = 1 << 16

# The table grows by a multiple of this many slots, or by a quarter if that is more, because rules look at all slots.
SLOTS_AT_ONCE = 16

# Bounds for a newly opened request: tokens in each count, characters in each text.
MAX_COUNT, MAX_TEXT = 2**31 - 1, 1024
COUNTS = ("prompt_tokens", "think_tokens", "output_tokens")
TEXTS = ("request_id", "model", "tenant", "slo_class", "effort", "traceparent", "handed_over_ref")


class RequestTable(DecidedColumns):
    """The columns of one engine's requests, read as `table.phase[slot]`.

    All modules may read columns; only the methods of this class write them. The capacity doubles when a higher slot
    appears and never shrinks.
    """

    def __init__(self, window_tokens: int, capacity: int = 64) -> None:
        self.window = np.zeros((0, window_tokens), np.float32)
        self._signals = np.zeros(0, SIGNAL_ROW)
        # Milliseconds before the answer tokens of the newest report.
        self.intervals = Intervals(NONE, np.zeros(0), NONE.astype(np.uint8))
        # Rows of the newest report, from which the state of requests within the report is computed.
        self.history = _no_history()
        self.info: list[agent_pb2.RequestOpened | None] = []
        self._loops_known = self._repeats_known = self.has_new = False
        # The other columns by type, [columns, slots]; `self.live` is a row of one of them.
        self._blocks: dict[Any, NDArray[Any]] = {}
        self._resize(capacity)

    @classmethod
    def without_windows(cls, window_tokens: int, capacity: int) -> Self:
        """Return a table for a replay that fills the columns itself. The entropy windows have a width but no values."""
        table = cls(1, capacity)
        table.window = np.broadcast_to(np.zeros((), np.float32), (capacity, window_tokens))
        # A replay reads whole columns of very many slots, which is much faster if each column is contiguous.
        vars(table).update((name, np.ascontiguousarray(getattr(table, name))) for name in SIGNAL_COLUMNS)
        return table

    def fill(self, count: int, **columns: Any) -> None:
        """Write columns of the first `count` slots at once, each from an array [count] or from one value for all."""
        for name, values in columns.items():
            getattr(self, name)[:count] = values

    def _resize(self, capacity: int) -> None:
        old = len(self.info)
        for kind, names in BY_TYPE.items():
            block = np.zeros((len(names), capacity), kind)
            if old:
                block[:, :old] = self._blocks[kind]
            self._blocks[kind] = block
            vars(self).update(zip(names, block, strict=True))
        # Only rows of live slots are copied, because copying the rows of free slots would make the system allocate
        # memory for them.
        live = self.live[:old].nonzero()[0]
        for name in ("window", "_signals"):
            rows = getattr(self, name)
            grown = np.zeros((capacity, *rows.shape[1:]), rows.dtype)
            grown[live] = rows[live]
            setattr(self, name, grown)
        vars(self).update((name, self._signals[name]) for name in SIGNAL_COLUMNS)
        self._packed = self._signals.view(np.uint8).reshape(capacity, -1)
        self.info += [None] * (capacity - old)
        self.slot = np.arange(capacity)

    def open(self, opened: agent_pb2.RequestOpened, now_ms: float = 0.0) -> None:
        """Begin the row of a new request. Raises ValueError if the slot, a count or a text is out of range."""
        slot = opened.slot
        if slot >= MAX_SLOTS:
            raise ValueError(f"slot must be below {MAX_SLOTS}; got {slot}")
        for name in COUNTS:
            if (count := getattr(opened, name)) > MAX_COUNT:
                raise ValueError(f"{name} must be at most {MAX_COUNT}; got {count}")
        for name in TEXTS:
            if (length := len(getattr(opened, name))) > MAX_TEXT:
                raise ValueError(f"{name} must have at most {MAX_TEXT} characters; got {length}")
        if slot >= len(self.info):
            self._resize(max(-(-(slot + 1) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE, len(self.info) * 5 // 4))
        for kind, values in NEW_ROW.items():
            self._blocks[kind][:, slot] = values
        self._signals[slot] = NEW_SIGNALS
        self.phase[slot] = opened.phase if 0 <= opened.phase <= OUTPUT else UNKNOWN
        self.token_ms[slot] = now_ms
        self.prompt_tokens[slot] = opened.prompt_tokens
        # Thinking before the request was opened has been counted for budgets where it happened.
        self.think_tokens[slot] = self.charged_tokens[slot] = opened.think_tokens
        self.output_tokens[slot] = opened.output_tokens
        self.preempted[slot] = opened.preempted
        self.own_min_think_tokens[slot] = opened.min_think_tokens
        self.hand_over_candidate[slot] = opened.hand_over_candidate
        self.end_decided[slot] = agent_pb2.FORCE_REASON_HARD_CAP if opened.forced else 0
        self.ended[slot] = self.forced[slot] = opened.forced
        self.info[slot], self.has_new = opened, True

    def close(self, slot: int) -> None:
        if self.holds(slot):
            self.live[slot] = False
            self.info[slot] = None

    def holds(self, slot: int) -> bool:
        return slot < len(self.info) and bool(self.live[slot])

    def clear(self) -> None:
        for slot in self.slots():
            self.close(int(slot))

    @property
    def thinking(self) -> NDArray[np.bool_]:
        """Whether the slot holds a live request that thinks, [slots]."""
        thinking: NDArray[np.bool_] = self.live & (self.phase == THINK)
        return thinking

    def packed(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return copies of the rows of these slots, each as SIGNAL_ROW has it, [slots, bytes]."""
        return self._packed.take(slots, axis=0)

    def packed_row(self, slot: int) -> bytes:
        """Return a slot's row as SIGNAL_ROW has it."""
        packed: bytes = self._packed[slot].tobytes()
        return packed

    def mask(self, slots: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether each slot is among these, [slots of the table]."""
        mask = np.zeros(len(self.info), bool)
        mask[slots] = True
        return mask

    def slots(self) -> NDArray[np.intp]:
        """Return the live slots in ascending order."""
        return np.flatnonzero(self.live)

    def requests(self) -> Iterator[tuple[int, agent_pb2.RequestOpened]]:
        for slot in self.slots():
            info = self.info[slot]
            assert info is not None
            yield int(slot), info

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot of the live request with this id, None if there is none."""
        return next((slot for slot, info in self.requests() if info.request_id == request_id), None)

    def set_window(self, tokens: int) -> None:
        """Set the length of the entropy windows; a change of the length empties all windows."""
        if tokens != self.window.shape[1]:
            self.window = np.zeros((len(self.info), tokens), np.float32)
            self.entropy_sum[:] = self.entropy_window_sum[:] = 0.0
            self.entropy_count[:] = 0
            self.boundary_rpdi[:] = np.nan

    def add_tokens(self, columns: agent_pb2.TokenColumns, at_ms: float | NDArray[np.float64] = 0.0) -> int:
        """Take in a report's token rows and return how many rows belonged to live requests.

        at_ms: time at which each row came, [rows] or one for all. Raises ValueError if the columns differ in length or
        if a slot has too many rows.
        """
        rows = rows_of(columns, self.live, at_ms)
        s, last = rows.s, rows.last
        before = Before(self.phase[s], self.entropy_nats[s], self.end_rank[s])
        kind = token_kinds(rows)
        self.intervals = intervals(rows, kind, self.newest_token[s], self.token_ms[s])
        self.newest_token[s] = kind.take(last)
        ends, newest = self._boundaries(rows)
        counted = self._count(rows)
        self.history = History(rows, before, ends, counted, self._entropies(rows), think_tokens=self.think_tokens[s])
        if newest is not None:
            self._ratios(newest)
        self.token_ms[s], self.entropy_nats[s] = rows.at_ms.take(last), rows.entropy_nats.take(last)
        self.end_rank[s], self.end_logprob_nats[s] = rows.end_rank.take(last), rows.end_logprob_nats.take(last)
        return len(rows.slot)

    def _count(self, rows: TokenRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Update the token counts; return the thinking tokens and the output tokens that each row adds."""
        s, last, flags = rows.s, rows.last, rows.flags
        think, output = rows.thinking.astype(np.int64), rows.answering.astype(np.int64)
        if takes_back := rows.flags_seen >> TAKE_BACK_SHIFT:
            back = flags >> TAKE_BACK_SHIFT
            think -= np.where(from_output := (flags & FLAG_FROM_OUTPUT) != 0, 0, back)
            output -= np.where(from_output, back, 0)
        for column, added in ((self.think_tokens, think), (self.output_tokens, output)) if len(s) else ():
            counted = column[s] + np.add.reduceat(added, rows.first)
            # A faulty agent may take back more tokens than it counted, so the counts are kept from becoming negative.
            column[s] = np.maximum(counted, 0) if takes_back else counted
        phase = rows.phase.take(last)
        self.phase[s] = np.where(flags.take(last) & FLAG_END, OUTPUT, phase) if rows.flags_seen & FLAG_END else phase
        self.preempted[s] = False
        return think, output

    def _boundaries(self, rows: TokenRows) -> tuple[SentenceEnds, Newest | None]:
        """Take in the end-marker ranks and margins at sentence ends; return the ends, and the places of their values.

        The rank at a sentence end is the rank in the distribution of the next token, so the next token's row reports
        it.
        """
        s, ends = rows.s, np.zeros(len(rows.slot), bool)
        if rows.flags_seen & FLAG_BOUNDARY:
            ends = rows.thinks & ((rows.flags & FLAG_BOUNDARY) != 0)
        is_known = rows.before(ends, self.at_boundary[s])
        known = is_known.nonzero()[0]
        known = known[rows.thinks[known] & (rows.end_rank[known] > 0)]
        is_known[:] = False
        is_known[known] = True
        self.at_boundary[s], self.boundary_now[s] = ends.take(rows.last), is_known.take(rows.last)
        if not len(known):
            return NO_ENDS, None
        slot = rows.slot[known]
        newest = Newest(slot, RANK_HISTORY)
        ranks = newest.of(rows.end_rank[known], self.boundary_ranks)
        margins = newest.of(rows.margin_nats(known), self.boundary_margins)
        count = self.boundary_count[slot] + newest.number
        # If a slot occurs several times, NumPy keeps the value that is written last, which is the newest.
        self.boundary_ranks[slot], self.boundary_margins[slot] = ranks[0], margins[0]
        self.boundary_count[slot] = count
        unknown = np.full((len(known), CONFIRM_HISTORY), np.nan)
        return SentenceEnds(known, count, *ranks, *margins, unknown, unknown), newest

    def _ratios(self, newest: Newest) -> None:
        """Take in RPDI at the report's sentence ends. newest: the places of their values."""
        history, width = self.history, self.window.shape[1]
        slot = history.rows.slot[history.ends.row]
        if not any_in(self.entropy_count[slot] >= width):
            # No request with a sentence end has enough tokens, so RPDI is not known at any of its sentence ends.
            return
        # The entropies after each sentence end, which the sums of the table have in them too.
        row, number, sums = history.ends.row, history.counts[ENTROPIES], history.entropy_sums
        here, over = number[row + 1], number[history.rows.last[history.owner[row]] + 1]
        count, later = self.entropy_count[slot] - (over - here), sums[:, over] - sums[:, here]
        total, newest_sum = self.entropy_sum[slot] - later[0], self.entropy_window_sum[slot] - later[1]
        ratios, before = newest.of(ratio_of_means(width, count, total, newest_sum), self.boundary_rpdi)
        self.boundary_rpdi[slot] = ratios
        history.tell_rpdi(ratios, before)

    def _entropies(self, rows: TokenRows) -> Entropies:
        measured = (rows.thinking & np.isfinite(rows.entropy_nats)).nonzero()[0]
        slot = rows.slot.take(measured)
        # Double precision, so that an entropy leaves the window's sum exactly as it entered.
        entropy = rows.entropy_nats.take(measured).astype(np.float64)
        first, owner = owners(slot)
        number, width = np.arange(len(slot)) - first.take(owner), self.window.shape[1]
        count = self.entropy_count[slot] + number
        at = count % width
        # Until the window is full, its remaining entries belong to the slot's previous request.
        oldest = np.where(count < width, 0.0, self.window[slot, at])
        if len(slot) > width:
            # If a report has more entropies than the window holds, some enter and leave the window in the same report.
            passed = (number >= width).nonzero()[0]
            oldest[passed] = entropy[passed - width]
        change = entropy - oldest
        np.add.at(self.entropy_window_sum, slot, change)
        np.add.at(self.entropy_sum, slot, entropy)
        # If an entry occurs several times, NumPy keeps the value that is written last, which is the newest.
        self.entropy_count[slot] = count + 1
        self.window[slot, at] = entropy
        return Entropies(measured, entropy, change)

    # ------------------------------------------------------------------------------------- reported by the agent

    def set_preempted(self, slot: int, preempted: bool) -> None:
        self.preempted[slot] = preempted

    def mark_closing(self, slot: int) -> None:
        """Note that the newest report closes the request."""
        self.closing[slot] = True

    def set_loops(self, slots: NDArray[np.int64], periods: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Note the cycles in which the thinking of these slots ends, [loops]; all other slots have none."""
        if self._loops_known:
            self.loop_period[:] = self.loop_tokens[:] = 0
        self.loop_period[slots], self.loop_tokens[slots] = periods, tokens
        self._loops_known = len(slots) > 0

    def forget_repetitions(self) -> None:
        """Note that no request repeats itself as of the newest report."""
        if self._loops_known:
            self.set_loops(NONE, NONE, NONE)
        if self._repeats_known:
            self.set_repeats(NONE, NONE)

    def set_repeats(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Note how many of their newest thinking tokens these slots repeat, [repeats]; all other slots repeat none."""
        if self._repeats_known:
            self.repeated_tokens[:] = 0
        self.repeated_tokens[slots] = tokens
        self._repeats_known = len(slots) > 0

    def set_group(self, slot: int, group: int) -> None:
        """Note which of the session's policies holds for a request."""
        self.group[slot] = group

    def set_arm(self, slot: int, control: bool, counted: bool) -> None:
        """Note whether a request belongs to the control group, and whether it counts when it closes."""
        self.control[slot], self.counted[slot] = control, counted

    def await_signals(self, slot: int, signals: int) -> None:
        """Note the signals whose first value is still to be compared with the calibration, as `awaited_signals`."""
        self.awaited_signals[slot] = signals

    def set_groups(self, groups: NDArray[np.int64] | int) -> None:
        """Note which of the session's policies hold for all requests, [slots] or one for all."""
        self.group[:] = groups

    def note_think_end(self, slot: int, forced: bool, kind: int) -> None:
        """Note that the request's thinking has ended.

        forced: whether the agent forced the end. kind: NATURAL_END, RULE_END or OTHER_END.
        """
        self.reentered[slot] |= self.ended[slot]
        if not self.ended[slot]:
            self.first_end[slot] = kind
        self.ended[slot], self.forced[slot] = True, forced

    def note_eat(self, slot: int, eat_nats: float, think_tokens: int, ema_nats: float, ema_variance: float) -> None:
        """Note an EAT sample, measured after `think_tokens`, and the moving mean and variance that include it."""
        if self.eat_count[slot]:
            for earlier, now in (
                (self.earlier_eat_ema_nats, self.eat_ema_nats),
                (self.earlier_eat_ema_variance, self.eat_ema_variance),
            ):
                earlier[slot, 1:] = earlier[slot, :-1]
                earlier[slot, 0] = now[slot]
        self.eat_nats[slot], self.eat_ema_nats[slot], self.eat_ema_variance[slot] = eat_nats, ema_nats, ema_variance
        self.eat_count[slot] += 1
        self.eat_think_tokens[slot] = think_tokens

    def note_trial_answer(self, slot: int, empty: bool, same_answer: int) -> None:
        """Note whether the request's newest probe found that the answer would be empty.

        same_answer: number of newest probes of the request, this one included, with the same likeliest next token.
        """
        self.empty_answer[slot], self.same_answer[slot] = empty, same_answer
        if self.probes_since_stop[slot] >= 0:
            self.probes_since_stop[slot] += 1
            self.stop_is_empty[slot] |= empty and self.probes_since_stop[slot] == 1


def _no_history() -> History:
    rows = rows_of(agent_pb2.TokenColumns(), np.zeros(0, bool), 0.0)
    nothing = np.zeros(0)
    before = Before(NONE.astype(np.uint8), nothing.astype(np.float32), NONE.astype(np.uint32))
    return History(rows, before, NO_ENDS, (NONE, NONE), Entropies(NONE, nothing, nothing), think_tokens=NONE)
