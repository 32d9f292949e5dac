"""The live requests of one engine, as NumPy columns indexed by slot.

Owns counts, phases and raw signals; the rules read it, the session writes it. Pure: no I/O, no clock, no policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PROMPT, THINK, OUTPUT = agent_pb2.PHASE_PROMPT, agent_pb2.PHASE_THINK, agent_pb2.PHASE_OUTPUT
# What the phases of a newer agent count as here.
UNKNOWN = agent_pb2.PHASE_UNSPECIFIED

# Row flags of TokenColumns.
FLAG_MARKER, FLAG_END, FLAG_FROM_OUTPUT, FLAG_FORCED, FLAG_BY_CAP, TAKE_BACK_SHIFT = 1, 2, 4, 8, 16, 8
FLAG_BOUNDARY = 32 | 64

# Sentence ends whose end-marker rank is remembered.
RANK_HISTORY = 8

# Slots are dense by contract; one beyond this is a broken or hostile agent.
MAX_SLOTS = 1 << 16

# A request's newest token: none in a report yet, an answer's, an end of thinking, any other.
NO_TOKEN, ANSWER_TOKEN, THINK_END, OTHER_TOKEN = range(4)

# More rows of one slot in one report come from no engine, however many steps it merges.
MAX_ROWS_PER_SLOT = 1 << 14
# Largest count of tokens, and longest text, of a request that is opened.
MAX_COUNT, MAX_TEXT = 2**31 - 1, 1024
COUNTS = ("prompt_tokens", "think_tokens", "output_tokens")
TEXTS = ("request_id", "model", "tenant", "slo_class", "effort")

# What the agent was told of a request: nothing yet, or that it has no cap.
UNTOLD, NO_CAP = -1, -2

# name: (dtype, value of a row that is opened)
COLUMNS: dict[str, tuple[Any, Any]] = {
    "live": (bool, True),
    "phase": (np.uint8, 0),
    # Which of the session's policies holds for the request.
    "group": (np.int64, 0),
    # The request's own floor.
    "own_min_think_tokens": (np.int64, 0),
    "prompt_tokens": (np.int64, 0),
    "think_tokens": (np.int64, 0),
    "output_tokens": (np.int64, 0),
    "preempted": (bool, False),
    # When its newest token was reported, or it was opened: milliseconds on the session's clock.
    "token_ms": (np.float64, 0.0),
    "newest_token": (np.uint8, NO_TOKEN),
    # Newest token's signals.
    "entropy_nats": (np.float32, np.nan),
    "end_rank": (np.uint32, 0),
    "end_logprob_nats": (np.float32, np.nan),
    # Token entropies of the thinking so far, for RPDI.
    "entropy_sum": (np.float64, 0.0),
    "entropy_window_sum": (np.float64, 0.0),
    "entropy_count": (np.int64, 0),
    # Whether the newest token ended a sentence; whether the rank at a sentence end came to be known in the newest
    # report; how many are known.
    "at_boundary": (bool, False),
    "boundary_now": (bool, False),
    "boundary_count": (np.int64, 0),
    # EAT samples and their exponential moving mean and variance.
    "eat_nats": (np.float64, np.nan),
    "eat_ema_nats": (np.float64, np.nan),
    "eat_ema_variance": (np.float64, 0.0),
    "eat_count": (np.int64, 0),
    "next_probe_tokens": (np.int64, 0),
    "probe_open": (bool, False),
    # The newest probe found that the answer would be empty; the cap was probed for that; the cap was extended for it.
    "empty_answer": (bool, False),
    "cap_probed": (bool, False),
    "extended": (bool, False),
    # Decisions: what the agent was last told.
    "rank": (np.int64, UNTOLD),
    "tier": (np.uint8, 0),
    "max_think_tokens": (np.int64, UNTOLD),
    "cap_shadow": (bool, False),
    # Thinking has ended at least once; the newest end was forced.
    "ended": (bool, False),
    "forced": (bool, False),
    # The rule that decided to end this request's thinking, as a ForceReason.
    "end_decided": (np.uint8, 0),
    # The rules in shadow that did, a bit for each ForceReason.
    "shadow_decided": (np.uint8, 0),
}


class RequestTable:
    """Columns over slots; `table.phase[slot]`. Capacity doubles as slots appear and is never given back."""

    live: NDArray[np.bool_]
    phase: NDArray[np.uint8]
    group: NDArray[np.int64]
    own_min_think_tokens: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    think_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    preempted: NDArray[np.bool_]
    token_ms: NDArray[np.float64]
    newest_token: NDArray[np.uint8]
    entropy_nats: NDArray[np.float32]
    end_rank: NDArray[np.uint32]
    end_logprob_nats: NDArray[np.float32]
    entropy_sum: NDArray[np.float64]
    entropy_window_sum: NDArray[np.float64]
    entropy_count: NDArray[np.int64]
    at_boundary: NDArray[np.bool_]
    boundary_now: NDArray[np.bool_]
    boundary_count: NDArray[np.int64]
    eat_nats: NDArray[np.float64]
    eat_ema_nats: NDArray[np.float64]
    eat_ema_variance: NDArray[np.float64]
    eat_count: NDArray[np.int64]
    next_probe_tokens: NDArray[np.int64]
    probe_open: NDArray[np.bool_]
    empty_answer: NDArray[np.bool_]
    cap_probed: NDArray[np.bool_]
    extended: NDArray[np.bool_]
    rank: NDArray[np.int64]
    tier: NDArray[np.uint8]
    max_think_tokens: NDArray[np.int64]
    cap_shadow: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    forced: NDArray[np.bool_]
    end_decided: NDArray[np.uint8]
    shadow_decided: NDArray[np.uint8]

    def __init__(self, window_tokens: int, capacity: int = 64) -> None:
        self.window = np.zeros((0, window_tokens), np.float32)
        # End-marker ranks at the sentence ends of the thinking, newest first.
        self.boundary_ranks = np.zeros((0, RANK_HISTORY), np.int64)
        # Of the newest report: milliseconds between two answer tokens, and from an end of thinking to the answer.
        self.output_itl_ms = self.ttot_ms = np.zeros(0)
        self.info: list[agent_pb2.RequestOpened | None] = []
        self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        old = len(self.info)
        for name, (dtype, _) in COLUMNS.items():
            column = np.zeros(capacity, dtype)
            if old:
                column[:old] = getattr(self, name)
            setattr(self, name, column)
        # Memory that nobody has written to is not there yet: rows of free slots are not copied.
        live = self.live[:old].nonzero()[0]
        for name in ("window", "boundary_ranks"):
            rows = getattr(self, name)
            grown = np.zeros((capacity, rows.shape[1]), rows.dtype)
            grown[live] = rows[live]
            setattr(self, name, grown)
        self.info += [None] * (capacity - old)

    def open(self, opened: agent_pb2.RequestOpened, now_ms: float = 0.0) -> None:
        """Begin a row. Raises ValueError for a slot, a count or a text out of range."""
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
            self._resize(1 << slot.bit_length())
        for name, (_, value) in COLUMNS.items():
            getattr(self, name)[slot] = value
        self.phase[slot] = opened.phase if 0 <= opened.phase <= OUTPUT else UNKNOWN
        self.token_ms[slot] = now_ms
        self.prompt_tokens[slot] = opened.prompt_tokens
        self.think_tokens[slot] = opened.think_tokens
        self.output_tokens[slot] = opened.output_tokens
        self.preempted[slot] = opened.preempted
        self.own_min_think_tokens[slot] = opened.min_think_tokens
        self.end_decided[slot] = agent_pb2.FORCE_REASON_HARD_CAP if opened.forced else 0
        self.ended[slot] = self.forced[slot] = opened.forced
        self.info[slot] = opened

    def close(self, slot: int) -> None:
        if self.holds(slot):
            self.live[slot] = False
            self.info[slot] = None

    def holds(self, slot: int) -> bool:
        return slot < len(self.info) and bool(self.live[slot])

    def clear(self) -> None:
        for slot in self.slots():
            self.close(int(slot))

    def slots(self) -> NDArray[np.intp]:
        """Live slots, ascending."""
        return np.flatnonzero(self.live)

    def set_window(self, tokens: int) -> None:
        """Change the length of the local entropy window; the windows begin anew."""
        if tokens != self.window.shape[1]:
            self.window = np.zeros((len(self.info), tokens), np.float32)
            self.entropy_sum[:] = self.entropy_window_sum[:] = 0.0
            self.entropy_count[:] = 0

    def add_tokens(self, columns: agent_pb2.TokenColumns, now_ms: float = 0.0) -> int:
        """Account a report's token rows, which came at `now_ms`; returns how many belonged to live requests.

        Raises ValueError when the columns differ in length, and for too many rows of a slot.
        """
        slot, phase, flags, entropy, end_rank, end_logprob = _arrays(columns)
        known = slot < len(self.info)
        known[known] = self.live[slot[known]]
        if not known.all():
            slot, phase, flags = slot[known], phase[known], flags[known]
            entropy, end_rank, end_logprob = entropy[known], end_rank[known], end_logprob[known]
        self.boundary_now[:] = False
        self._intervals(slot, phase, flags, now_ms)
        self.token_ms[slot] = now_ms
        for at in _without_repeats(slot):
            s = slot[at]
            self._boundaries(s, phase[at], flags[at], end_rank[at])
            self._count(s, phase[at], flags[at])
            self._signals(s, phase[at], flags[at], entropy[at])
            self.entropy_nats[s], self.end_rank[s], self.end_logprob_nats[s] = (
                entropy[at],
                end_rank[at],
                end_logprob[at],
            )
        return len(slot)

    def _intervals(self, slot: NDArray[Any], phase: NDArray[Any], flags: NDArray[Any], now_ms: float) -> None:
        """Tokens of one request are taken to have come evenly spread since its report before. What came before its
        first token is not known to be a token's time, so the report with that one gives no interval."""
        order = np.argsort(slot, kind="stable")
        slot, phase, flags = slot[order], phase[order], flags[order]
        answer = (phase == OUTPUT) & ((flags & FLAG_MARKER) == 0)
        kind = np.where(flags & FLAG_END, THINK_END, np.where(answer, ANSWER_TOKEN, OTHER_TOKEN))
        first = np.flatnonzero(np.diff(slot, prepend=-1))
        count, s = np.diff(first, append=len(slot)), slot[first]
        before = np.roll(kind, 1)
        before[first] = self.newest_token[s]
        interval_ms = np.repeat((now_ms - self.token_ms[s]) / count, count)
        answer &= np.repeat(self.newest_token[s] != NO_TOKEN, count)
        self.output_itl_ms = interval_ms[answer & (before == ANSWER_TOKEN)]
        self.ttot_ms = interval_ms[answer & (before == THINK_END)]
        self.newest_token[s] = kind[first + count - 1]

    def _count(self, s: NDArray[Any], phase: NDArray[Any], flags: NDArray[Any]) -> None:
        text = (flags & FLAG_MARKER) == 0
        back = flags >> TAKE_BACK_SHIFT
        from_output = (flags & FLAG_FROM_OUTPUT) != 0
        think = (text & (phase == THINK)) - np.where(from_output, 0, back)
        output = (text & (phase == OUTPUT)) - np.where(from_output, back, 0)
        # No agent takes back more than it counted, but one may say so.
        self.think_tokens[s] = np.maximum(self.think_tokens[s] + think, 0)
        self.output_tokens[s] = np.maximum(self.output_tokens[s] + output, 0)
        self.phase[s] = np.where(flags & FLAG_END, OUTPUT, phase)
        self.preempted[s] = False

    def _boundaries(self, s: NDArray[Any], phase: NDArray[Any], flags: NDArray[Any], end_rank: NDArray[Any]) -> None:
        """The rank at a sentence end is the one the next token was drawn under: it is known a token later."""
        known = self.at_boundary[s] & (phase == THINK) & (end_rank > 0)
        ended, ranks = s[known], end_rank[known]
        self.boundary_ranks[ended, 1:] = self.boundary_ranks[ended, :-1]
        self.boundary_ranks[ended, 0] = ranks
        self.boundary_count[ended] += 1
        self.boundary_now[ended] = True
        self.at_boundary[s] = (phase == THINK) & ((flags & FLAG_BOUNDARY) != 0)

    def _signals(self, s: NDArray[Any], phase: NDArray[Any], flags: NDArray[Any], entropy: NDArray[Any]) -> None:
        measured = (phase == THINK) & ((flags & FLAG_MARKER) == 0) & np.isfinite(entropy)
        # Doubles: what is added to the window's sum is taken out again exactly.
        s, entropy = s[measured], entropy[measured].astype(np.float64)
        count, width = self.entropy_count[s], self.window.shape[1]
        at = count % width
        # What lies in the row before it is full is of the slot's last request.
        self.entropy_window_sum[s] += entropy - np.where(count < width, 0.0, self.window[s, at])
        self.entropy_sum[s] += entropy
        self.window[s, at] = entropy
        self.entropy_count[s] += 1

    def requests(self) -> Iterator[tuple[int, agent_pb2.RequestOpened]]:
        for slot in self.slots():
            info = self.info[slot]
            assert info is not None
            yield int(slot), info


def _arrays(columns: agent_pb2.TokenColumns) -> tuple[NDArray[Any], ...]:
    slot = np.fromiter(columns.slot, np.int64, len(columns.slot))
    phase = np.fromiter(columns.phase, np.int32, len(columns.phase))
    flags = np.fromiter(columns.flags, np.int64, len(columns.flags))
    entropy = np.fromiter(columns.entropy_nats, np.float32, len(columns.entropy_nats))
    end_rank = np.fromiter(columns.end_rank, np.uint32, len(columns.end_rank))
    end_logprob = np.fromiter(columns.end_logprob_nats, np.float32, len(columns.end_logprob_nats))
    arrays = (slot, phase, flags, entropy, end_rank, end_logprob)
    if len({len(a) for a in arrays}) != 1:
        raise ValueError(f"token columns must have one length; got {[len(a) for a in arrays]}")
    phase[(phase < 0) | (phase > OUTPUT)] = UNKNOWN
    return arrays


def _without_repeats(slot: NDArray[np.int64]) -> Iterator[NDArray[np.intp]]:
    """Row indices in passes, in order, no slot twice in one pass (merged steps and draft tokens repeat slots)."""
    if not len(slot):
        return
    by_slot = np.argsort(slot, kind="stable")
    first = np.flatnonzero(np.diff(slot[by_slot], prepend=-1))
    # How many rows of the same slot come before each.
    earlier = np.empty(len(slot), np.intp)
    earlier[by_slot] = np.arange(len(slot)) - np.repeat(first, np.diff(first, append=len(slot)))
    by_pass = np.argsort(earlier, kind="stable")
    rows_per_pass = np.bincount(earlier)
    if len(rows_per_pass) > MAX_ROWS_PER_SLOT:
        raise ValueError(f"a slot must have at most {MAX_ROWS_PER_SLOT} rows in a report; got {len(rows_per_pass)}")
    yield from np.split(by_pass, np.cumsum(rows_per_pass)[:-1])
