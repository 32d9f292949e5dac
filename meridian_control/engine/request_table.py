"""Holds the live requests of one engine as NumPy columns indexed by slot.

The table owns token counts, phases, signals, and the decisions that are in force for each request. Rules read columns;
the session changes them through the table's methods. The module does no I/O and knows neither a clock nor a policy.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.errors import BadReport
from meridian_control.common.masks import any_in
from meridian_control.common.opened_request import OpenedRequest
from meridian_control.common.report_bounds import is_measured
from meridian_control.common.table_columns import (
    BY_TYPE,
    COLUMNS,
    EAT_SHIFTED,
    EAT_WORDS,
    END_WORDS,
    HISTORIES,
    NO_CAP,
    ROW_WORDS,
    SIGNAL_COLUMNS,
    SIGNAL_ROW,
    UNRANKED,
    UNTOLD,
    Columns,
    place_of,
)
from meridian_control.engine.history import (
    BOUNDARY_NOW,
    COUNT_WORDS,
    NO_HISTORY,
    PHASE,
    History,
    running_counts,
    values_at_ends,
    window_entropies,
)
from meridian_control.engine.token_rows import (
    FLAG_BOUNDARY,
    FLAG_END,
    FLAG_GOES_ON,
    NO_INTERVALS,
    TAKE_BACK_SHIFT,
    intervals,
    rows_of,
    sentence_goes_on,
    token_kinds,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from meridian_control.common.opened_request import Identity
    from meridian_control.engine.token_rows import TokenRows

PROMPT, THINK, OUTPUT = agent_pb2.PHASE_PROMPT, agent_pb2.PHASE_THINK, agent_pb2.PHASE_OUTPUT
# The table keeps this phase if an agent of a newer version sends a phase that the control plane does not know.
UNKNOWN = agent_pb2.PHASE_UNSPECIFIED

NONE = np.zeros(0, np.int64)

# Places of columns in a row of SIGNAL_ROW, in numbers of each column's own size.
TOKEN_COUNT_WORDS = slice(2)
TOKEN_MS, NEWEST_SIGNALS = place_of("token_ms"), slice(_rank := place_of("end_rank"), _rank + 3)
NEWEST_TOKEN, AT_BOUNDARY = map(place_of, ("newest_token", "at_boundary"))

# Values of a new request's columns: those in SIGNAL_ROW, and the others by type.
NEW_SIGNALS = np.zeros((), SIGNAL_ROW)
for _name in SIGNAL_COLUMNS:
    NEW_SIGNALS[_name] = (HISTORIES[_name] if _name in HISTORIES else COLUMNS[_name])[1]
NEW_ROW = {kind: np.array([COLUMNS[name][1] for name in names], kind) for kind, names in BY_TYPE.items()}

# Memory of a slot without its entropy window.
ROW_BYTES = SIGNAL_ROW.itemsize + sum(values.nbytes for values in NEW_ROW.values()) + 16
# The table grows by a multiple of this many slots, or by a quarter if that is more, because rules look at all slots.
SLOTS_AT_ONCE = 16


class Joined(NamedTuple):
    """Requests that have joined their first step: slots, and queueing times in milliseconds, [requests] each."""

    slot: NDArray[np.int64]
    queueing_ms: NDArray[np.float64]


NOBODY_JOINED = Joined(NONE, np.zeros(0))


def _zeros_on_demand(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of zeros. The system allocates its pages when they are first written to; `np.zeros` writes to all
    of them if it gets memory that was in use before."""
    size, flags = math.prod(shape) * kind.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, size, flags), kind).reshape(shape)


class RequestTable(Columns):
    """The columns of one engine's requests, read as `table.phase[slot]`.

    All modules may read columns; only the methods of this class write them. The capacity grows by a quarter when a
    higher slot appears and never shrinks. has_new: whether a request was opened since the caps of all requests were
    decided; who decides them sets it to False.
    """

    def __init__(self, window_tokens: int, capacity: int = 64) -> None:
        self.window = np.zeros((0, window_tokens), np.float32)
        self._signals = np.zeros(0, SIGNAL_ROW)
        self.end_report()
        # Requests that have joined their first step, of the newest report that has any.
        self.joined = NOBODY_JOINED
        self.info: list[OpenedRequest | None] = []
        # About the memory of the columns, and of `info`.
        self.column_bytes = self.text_bytes = 0
        self._packed = b""
        self.has_loops = self.has_new = False
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

    def put(self, slots: Any, **columns: Any) -> None:
        """Write columns of some slots, each from an array of their values or from one value for all. slots: a slot,
        several, a mask or a slice."""
        for name, values in columns.items():
            getattr(self, name)[slots] = values

    def _resize(self, capacity: int) -> None:
        old = len(self.info)
        for kind, names in BY_TYPE.items():
            block = np.zeros((len(names), capacity), kind)
            if old:
                block[:, :old] = self._blocks[kind]
            self._blocks[kind] = block
            vars(self).update(zip(names, block, strict=True))
        self._new_rows = [(self._blocks[kind], values) for kind, values in NEW_ROW.items()]
        # Only rows of live slots are copied, because copying the rows of free slots would make the system allocate
        # memory for them.
        live = self.live[:old].nonzero()[0]
        for name in ("window", "_signals"):
            rows = getattr(self, name)
            grown = _zeros_on_demand((capacity, *rows.shape[1:]), rows.dtype)
            grown[live] = rows[live]
            setattr(self, name, grown)
        vars(self).update((name, self._signals[name]) for name in SIGNAL_COLUMNS)
        self.column_bytes = ROW_BYTES * capacity + self.window.nbytes
        self._words = self._signals.view(np.int64).reshape(capacity, -1)
        self._row_words, self._end_words = self._words[:, ROW_WORDS], self._words[:, END_WORDS]
        self._eat_words = self._words.view(np.float64)[:, EAT_WORDS]
        self.info += [None] * (capacity - old)
        self.slot = np.arange(capacity)

    def open(self, message: agent_pb2.RequestOpened, now_ms: float = 0.0) -> OpenedRequest:
        """Begin the row of a new request; return what the table keeps of the message. Raises BadReport if the slot, a
        count or a text is out of range."""
        slot = (opened := OpenedRequest(message)).slot
        if slot >= len(self.info):
            self._resize(max(-(-(slot + 1) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE, len(self.info) * 5 // 4))
        for block, values in self._new_rows:
            block[:, slot] = values
        if self.entropy_count[slot]:
            # The system allocates memory for windows that were written to, so only these are emptied.
            self.window[slot] = 0.0
        self._signals[slot] = NEW_SIGNALS
        self.phase[slot] = opened.phase if 0 <= opened.phase <= OUTPUT else UNKNOWN
        self.token_ms[slot] = now_ms
        self.prompt_tokens[slot] = opened.prompt_tokens
        self.extended[slot] = self.cap_probed[slot] = message.cap_extended
        # Most new requests have none of the following.
        if opened.think_tokens:
            self.think_tokens[slot] = opened.think_tokens
            self.ended[slot] = opened.phase == OUTPUT
        if opened.output_tokens:
            self.output_tokens[slot] = opened.output_tokens
        if message.preempted:
            self.preempted[slot] = True
        if message.queued:
            self.queued[slot] = True
        if opened.unmeasured:
            self.unmeasured[slot] = True
        if opened.min_think_tokens:
            self.own_min_think_tokens[slot] = opened.min_think_tokens
        if message.forced:
            self.end_decided[slot] = agent_pb2.FORCE_REASON_HARD_CAP
            self.ended[slot] = self.forced[slot] = True
        if opened.ending:
            self.end_decided[slot] = opened.ending
        if (before := self.info[slot]) is not None:
            self.text_bytes -= before.held_bytes
        self.text_bytes += opened.held_bytes
        self.info[slot], self.has_new = opened, True
        return opened

    def reserve(self, slots: int) -> None:
        """Make room for requests in the slots below a number, so that the table need not grow by and by."""
        if slots > len(self.info):
            self._resize(-(-slots // SLOTS_AT_ONCE) * SLOTS_AT_ONCE)

    def close(self, slot: int) -> None:
        if self.holds(slot) and (info := self.info[slot]) is not None:
            self.live[slot] = False
            self.text_bytes -= info.held_bytes
            self.info[slot] = None

    def holds(self, slot: int) -> bool:
        return slot < len(self.info) and bool(self.live[slot])

    def clear(self) -> None:
        self.live[:] = False
        self.info, self.text_bytes = [None] * len(self.info), 0

    @property
    def thinking(self) -> NDArray[np.bool_]:
        """Whether the slot holds a live request that thinks, [slots]."""
        thinking: NDArray[np.bool_] = self.live & (self.phase == THINK)
        return thinking

    def packed(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return copies of the rows of these slots, each as SIGNAL_ROW has it, [slots, words]."""
        return self._words.take(slots, axis=0)

    def packed_row(self, slot: int) -> bytes:
        """Return a slot's row as SIGNAL_ROW has it."""
        packed: bytes = self._words[slot].tobytes()
        if packed != self._packed:
            self._packed = packed
        # Requests that begin together have equal rows, which then are one object.
        return self._packed

    def mask(self, slots: NDArray[Any] | list[int]) -> NDArray[np.bool_]:
        """Return whether each slot is among these, [slots of the table]."""
        mask = np.zeros(len(self.info), bool)
        mask[slots] = True
        return mask

    def slots(self) -> NDArray[np.intp]:
        """Return the live slots in ascending order."""
        return np.flatnonzero(self.live)

    def requests(self) -> Iterator[tuple[int, OpenedRequest]]:
        for slot in self.slots():
            info = self.info[slot]
            assert info is not None
            yield int(slot), info

    def waits_since_ms(self) -> dict[Identity, float]:
        """Return the time at which each request was opened that waits for its first token."""
        waits = (self.think_tokens == 0) & (self.output_tokens == 0)
        return {info.identity: float(self.token_ms[slot]) for slot, info in self.requests() if waits[slot]}

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot of the live request with this id, None if there is none."""
        return next((slot for slot, info in self.requests() if info.request_id == request_id), None)

    def set_window(self, tokens: int) -> None:
        """Set the length of the entropy windows; a change of the length empties all windows."""
        if tokens != self.window.shape[1]:
            self.window = _zeros_on_demand((len(self.info), tokens), np.dtype(np.float32))
            self.column_bytes = ROW_BYTES * len(self.info) + self.window.nbytes
            self.entropy_sum[:] = self.entropy_window_sum[:] = 0.0
            self.entropy_count[:] = 0
            self.boundary_rpdi[:] = np.nan

    def end_report(self) -> None:
        """Forget the rows of the newest report; those of an engine of 64 requests take some 0.2 MB."""
        # Milliseconds before the answer tokens of the report; and its rows, from which the state of requests within the
        # report is computed.
        self.intervals, self.history = NO_INTERVALS, NO_HISTORY

    def add_tokens(self, columns: agent_pb2.TokenColumns, at_ms: float | NDArray[np.float64] = 0.0) -> int:
        """Take in a report's token rows and return how many rows belonged to live requests.

        at_ms: time at which each row came, [rows] or one for all. Raises BadReport if the columns differ in length or
        if a slot has too many rows.
        """
        rows = rows_of(columns, self.live, at_ms)
        s, last = rows.s, rows.last
        # Copies of the slots' rows, as words: one to read from, one to change and to write back at once.
        held = self._row_words[s]
        now, held_bytes = held.copy(), held.view(np.uint8)
        newest, numbers = now.view(np.uint8), now.view(np.uint32)
        self.intervals = intervals(rows, held_bytes[:, NEWEST_TOKEN], held.view(np.float64)[:, TOKEN_MS])
        known = self._known_ends(rows, held_bytes, newest)
        measured = rows.thinking & np.isfinite(rows.entropy_nats)
        counts = running_counts(rows, known, measured)
        around = counts.take(rows.edges, axis=0)
        sums = window_entropies(rows, measured.nonzero()[0], around[:-1], (held, now), self.window)
        np.add(counted := now[:, COUNT_WORDS], around[1:] - around[:-1], out=counted)
        if rows.flags_seen >> TAKE_BACK_SHIFT:
            # A faulty agent may take back more tokens than it counted, so the counts are kept from becoming negative.
            np.maximum(now[:, TOKEN_COUNT_WORDS], 0, out=now[:, TOKEN_COUNT_WORDS])
        self.history = History(rows, held, now, counts, sums)
        if len(known):
            before, width = self._end_words[slot := rows.slot.take(known)], self.window.shape[1]
            self.history.ends = values_at_ends(self.history, known, before, width)
            # If a slot occurs several times, NumPy keeps the values that are written last, which are the newest.
            self._end_words[slot] = self.history.ends.newest
        if rows.flags_seen & FLAG_END:
            # The agent drops a rank with each phase, also if the request is back in that phase within the report.
            self.ranked_phase[rows.slot[(rows.flags & FLAG_END) != 0]] = UNRANKED
        newest[:, PHASE] = rows.phase_after.take(last)
        newest[:, NEWEST_TOKEN] = token_kinds(rows, last)
        numbers[:, NEWEST_SIGNALS] = rows.newest_signals()
        now.view(np.float64)[:, TOKEN_MS] = rows.at_ms.take(last)
        self._row_words[s] = now
        if any_in(self.preempted):
            self.preempted[s] = False
        return len(rows.slot)

    @staticmethod
    def _known_ends(rows: TokenRows, held: NDArray[np.uint8], now: NDArray[np.uint8]) -> NDArray[np.intp]:
        """Return the rows that report the end marker's rank at a sentence end, and note which requests are at one.

        The rank at a sentence end is the rank in the distribution of the next token, so the next token's row reports
        it; and that row says if the sentence goes on. held, now: bytes of the slots' rows before and after the report.
        """
        if rows.flags_seen & FLAG_BOUNDARY:
            ends = rows.thinks & ((rows.flags & FLAG_BOUNDARY) != 0)
            now[:, AT_BOUNDARY] = ends.take(rows.last)
            is_known = rows.before(ends, held[:, AT_BOUNDARY])
        elif any_in(ends := held[:, AT_BOUNDARY] != 0):
            now[:, AT_BOUNDARY] = False
            is_known = np.zeros(len(rows.slot), bool)
            is_known[rows.first] = ends
        else:
            now[:, BOUNDARY_NOW] = False
            return NONE
        is_known &= rows.thinks
        is_known &= rows.end_rank > 0
        if rows.flags_seen & FLAG_GOES_ON:
            is_known &= ~sentence_goes_on(rows.flags)
        now[:, BOUNDARY_NOW] = is_known.take(rows.last)
        return is_known.nonzero()[0]

    # ------------------------------------------------------------------------------------- reported by the agent

    def take_joined(self, columns: agent_pb2.JoinedColumns) -> None:
        """Note which live requests have joined their first step, and keep their queueing times in `joined`.

        Raises BadReport if the columns differ in length.
        """
        if len(columns.slot) != len(columns.queueing_ms):
            raise BadReport("joined columns must have one length")
        live = [row for row in zip(columns.slot, columns.queueing_ms, strict=True) if self.holds(row[0])]
        for slot, _ in live:
            self.queued[slot] = False
        slots, queueing_ms = (
            np.array([row for row in live if is_measured("joined.queueing_ms", row[1])]).reshape(-1, 2).T
        )
        self.joined = Joined(slots.astype(np.int64), queueing_ms)

    def set_loops(self, slots: NDArray[np.int64], periods: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Note the cycles in which the thinking of these slots ends, [loops]; all other slots have none."""
        if self.has_loops:
            self.loop_period[:] = self.loop_tokens[:] = 0
        self.loop_period[slots], self.loop_tokens[slots] = periods, tokens
        self.has_loops = len(slots) > 0

    def forget_loops(self) -> None:
        """Note that no request repeats itself as of the newest report."""
        if self.has_loops:
            self.set_loops(NONE, NONE, NONE)

    def note_think_end(self, slot: int, forced: bool, kind: int) -> None:
        """Note that the request's thinking has ended.

        forced: whether the agent forced the end. kind: NATURAL_END or FORCED_END.
        """
        self.reentered[slot] |= self.ended[slot]
        if not self.first_end[slot]:
            self.first_end[slot] = kind
        self.ended[slot], self.forced[slot] = True, forced

    def note_eat(self, slots: NDArray[np.int64], newest: NDArray[np.float64], think_tokens: NDArray[np.int64]) -> None:
        """Note an EAT sample of each slot, the slots different from each other.

        newest: the sample, and the moving mean and variance that include it, [slots, 3]. think_tokens: thinking tokens
        at which the sample was measured, [slots].
        """
        held = self._eat_words[slots]
        values = np.where((self.eat_count[slots] > 0)[:, None], held.take(EAT_SHIFTED, axis=1), held)
        values[:, :3] = newest
        self._eat_words[slots] = values
        self.eat_count[slots] += 1
        self.eat_think_tokens[slots] = think_tokens

    # ------------------------------------------------------------------------------------- decisions about requests

    def set_ranks(self, ranks: NDArray[np.int64]) -> None:
        """Note the ranks of all requests, which are in force on the agent once it has the plan. ranks: [slots]."""
        self.rank[:], self.ranked_phase[:] = ranks, self.phase

    def forget_ranks(self) -> None:
        """Forget the ranks that are in force on the agent, so that all ranks are sent again."""
        self.rank[:], self.ranked_phase[:] = UNTOLD, self.phase

    def note_cap(self, slot: int, cap: int, shadow: bool, reserve: int) -> None:
        """Note the cap that holds for a request, NO_CAP for none, and the answer reserve, 0 for none. shadow: whether
        the agent only counts both."""
        self.max_think_tokens[slot], self.cap_shadow[slot] = cap, shadow
        self.answer_reserve_tokens[slot] = reserve

    def own_cap(self, slot: int) -> int:
        """Return the cap that the client has set for a request, NO_CAP for none."""
        own = info.max_think_tokens if (info := self.info[slot]) is not None else None
        return NO_CAP if own is None else own

    def cap_in_force(self, slot: int) -> int:
        """Return the cap that the agent enforces for a request, NO_CAP for none: the smaller of the request's own, and
        of the one that was decided, unless that is in shadow."""
        own, decided = self.own_cap(slot), int(self.max_think_tokens[slot])
        if decided < 0 or self.cap_shadow[slot]:
            return own
        return decided if own == NO_CAP else min(own, decided)

    def shadow_cap(self, slot: int) -> int:
        """Return the cap in shadow of a request, NO_CAP for none. The request's own cap is never in shadow."""
        decided = int(self.max_think_tokens[slot])
        return decided if self.cap_shadow[slot] and not NO_CAP < self.own_cap(slot) <= decided else NO_CAP

    def note_end(self, slot: int, reason: int, shadow: bool) -> None:
        """Note the rule that ends a request's thinking. reason: the rule's ForceReason. shadow: the rule is in shadow,
        and only its firing is noted, in the bit with the reason's number."""
        if shadow:
            self.shadow_decided[slot] |= 1 << reason
        else:
            self.end_decided[slot] = reason

    def restore_end(self, slot: int, reason: int) -> None:
        """Note an end of thinking that the engine still carries out, unless the request has a newer one."""
        self.end_decided[slot] = self.end_decided[slot] or reason

    def forget_ends(self) -> None:
        """Forget the rules that ended thinking or fired in shadow, so that all rules are asked again, but for the ends
        that a snapshot has listed under way."""
        listed = self.listed_ends()
        kept = self.end_decided[listed]
        self.end_decided[:] = self.shadow_decided[:] = 0
        self.end_decided[listed] = kept

    def listed_ends(self) -> list[int]:
        """Return the slots of the requests whose forced end a snapshot has listed under way and that have not ended."""
        ending = [slot for slot in self.end_decided.nonzero()[0].tolist() if not self.ended[slot]]
        return [slot for slot in ending if (info := self.info[slot]) is not None and info.ending]
