"""Finds thinking that repeats itself in exact cycles of tokens.

The module owns the newest tokens of each thinking request. It knows neither text nor policy, and of vLLM only that a
request lists its output tokens.

The engine-core thread chooses the requests (`LoopWatch`), and the thread that sends the records looks at them
(`LoopSearch`), at each request once in LOOK_TOKENS tokens, or in twice as many if no end of thinking follows from a
look. A look adds these tokens and searches the MAX_PERIOD tokens before them for the newest SUFFIX_TOKENS. Only if
these occur again is the text copied and are the places compared, so the time per token is constant, whatever the length
of the request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from meridian_agent.core.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meridian_agent.core.live_request import LiveRequest

# Longest period that the search finds, in tokens.
MAX_PERIOD = 512
# Tokens between two looks at a request, and requests that take their turn together: a step without a look costs little,
# and the first look in a step costs more than the next ones.
LOOK_TOKENS, TURN_REQUESTS = 32, 16
# Newest tokens that must occur again before places are compared.
SUFFIX_TOKENS = 16
# Newest tokens of a request that the agent keeps: four rounds of the longest period, and the tokens between two looks.
KEPT_TOKENS = 4 * MAX_PERIOD + 2 * LOOK_TOKENS
# Fewest rounds and fewest tokens of a cycle.
MIN_ROUNDS, MIN_TOKENS = 2, 32
# Rounds and tokens from which on a cycle certainly is a loop.
SURE_ROUNDS, SURE_TOKENS = 4, 256

# Token ids as signed 32-bit integers.
_CODE, _SIZE = "i", 4


class TokenCycle(NamedTuple):
    """A cycle in which a text ends.

    period: tokens of a round. tokens: newest tokens that repeat with this period, the first round included; at most
    KEPT_TOKENS.
    """

    period: int
    tokens: int


class TokenTail:
    """The newest tokens of one request."""

    def __init__(self) -> None:
        # Token ids of _SIZE bytes each.
        self._text = bytearray()
        # Tokens of the request that have been taken in.
        self.taken = 0

    def take(self, output_token_ids: Sequence[int], total: int | None = None) -> None:
        """Take in the tokens since the last call. output_token_ids: the tokens that the request has generated, of which
        the first `total` count, or all."""
        total = len(output_token_ids) if total is None else total
        begin = max(self.taken, total - KEPT_TOKENS) if self.taken <= total else max(0, total - KEPT_TOKENS)
        if begin != self.taken:
            # Tokens are missing or were taken back, so the kept tokens no longer precede the new ones.
            self._text.clear()
        self._text += array(_CODE, output_token_ids[begin:total])
        self.taken = total
        if len(self._text) > 2 * KEPT_TOKENS * _SIZE:
            del self._text[: -KEPT_TOKENS * _SIZE]

    def cycle(self, most: int) -> TokenCycle | None:
        """Return the cycle in which the text ends; None for none.

        most: newest tokens that may belong to the cycle. A text may end in several cycles, because a long round may
        itself end in short rounds; `weight` then decides which one is returned.
        """
        end = len(self._text)
        size = min(end, most * _SIZE, KEPT_TOKENS * _SIZE)
        suffix = self._text[-SUFFIX_TOKENS * _SIZE :]
        first = end - min(size, (MAX_PERIOD + SUFFIX_TOKENS) * _SIZE)
        if size < MIN_TOKENS * _SIZE or self._text.rfind(suffix, first, end - _SIZE) < 0:
            return None
        text, surest, covered = bytes(self._text[-size:]), None, 0
        # Bounds, in bytes, of the text in which an earlier occurrence is searched.
        first = max(0, size - (MAX_PERIOD + SUFFIX_TOKENS) * _SIZE)
        stop = size - _SIZE
        while covered < size and (at := text.rfind(suffix, first, stop)) >= 0:
            distance = size - SUFFIX_TOKENS * _SIZE - at
            stop = at + len(suffix) - 1
            # A longer period counts only if more tokens repeat with it.
            least = max(MIN_ROUNDS * distance, MIN_TOKENS * _SIZE, covered + _SIZE)
            if distance % _SIZE or least > size or not _repeats(text, distance, distance, least):
                continue
            covered = _repeated(text, distance, least)
            # If a text of p + q tokens has the periods p and q, both repeat equally far back (Fine and Wilf, 1965). So
            # a period that reaches further back is longer than the covered text less this period.
            stop = min(stop, size - covered + distance - _SIZE)
            cycle = TokenCycle(distance // _SIZE, covered // _SIZE)
            if surest is None or weight(cycle) > weight(surest):
                surest = cycle
        return surest


def weight(cycle: TokenCycle) -> float:
    """Return how certainly a cycle is a loop; from 1 on it has SURE_ROUNDS rounds and SURE_TOKENS tokens."""
    return min(cycle.tokens / cycle.period / SURE_ROUNDS, cycle.tokens / SURE_TOKENS)


def _repeats(text: bytes, distance: int, begin: int, end: int) -> bool:
    """Return whether the bytes from `end` to `begin`, counted from the text's end, repeat those `distance` before."""
    size = len(text)
    return text[size - end + distance : size - begin + distance] == text[size - end : size - begin]


def _repeated(text: bytes, distance: int, known: int) -> int:
    """Return how many of the last bytes repeat with this distance, the first round included; `known` of them do."""
    size, step = len(text), _SIZE
    # Double the step while the text repeats, then halve it.
    while known + step <= size and _repeats(text, distance, known, known + step):
        known, step = known + step, 2 * step
    while step >= _SIZE:
        if known + step <= size and _repeats(text, distance, known, known + step):
            known += step
        step //= 2
    return known


# A look at a request: its slot and id, its newest tokens of text in one phase, the tokens that it has generated and how
# many of these count, and the slots whose requests repeat themselves, which the search brings up to date. The id is
# empty if no request with this slot thinks any more.
Look: TypeAlias = tuple[int, str, int, Sequence[int], int, set[int]]


class LoopWatch:
    """Chooses the live requests of an engine at whose thinking `LoopSearch` looks, some of them in each step.

    A look at a request takes some microseconds, so the requests take turns. The watch chooses each request after at
    most LOOK_TOKENS tokens, or twice as many if no end of thinking follows. tokens_per_step: largest number of tokens
    that a step may bring a request.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        # By turn the slots of requests that have joined a step. A slot stays until its turn finds no such request.
        self._turns = list[set[int]]()
        self.obey(find_loops=False)
        self._turn = 0
        # Slots of which the search has tokens.
        self._looked: set[int] = set()
        # Slots whose requests repeated themselves at the newest look.
        self._repeating: set[int] = set()

    def obey(self, find_loops: bool, merge_loops: bool = False) -> None:
        """Look for cycles from now on if `find_loops` is set. merge_loops: no end of thinking follows from a look."""
        self.enabled, self._merge_loops = find_loops, merge_loops
        # A request has its turn once in this many steps.
        interval = max(1, (2 if merge_loops else 1) * LOOK_TOKENS // self._tokens_per_step)
        before, self._turns = self._turns, [set() for _ in range(interval)]
        for slots in before:
            for slot in slots:
                self.begin(slot)

    def begin(self, slot: int) -> None:
        """Let the request of a slot take turns, because it has joined its first step."""
        self._turns[slot // TURN_REQUESTS % len(self._turns)].add(slot)

    def is_turn_of_any(self) -> bool:
        """Let the next requests have their turn; return whether there are any."""
        self._turn = (self._turn + 1) % len(self._turns)
        return bool(self._turns[self._turn])

    def turns_of_none(self, most: int) -> int:
        """Return the number of coming steps, up to `most`, in which no request has its turn."""
        turns, turn = self._turns, self._turn
        for steps in range(most):
            turn = (turn + 1) % len(turns)
            if turns[turn]:
                return steps
        return most

    def looks(self, by_slot: Mapping[int, LiveRequest]) -> tuple[list[Look], bool]:
        """Return the looks at the requests whose turn it is, and whether one of these requests repeated itself at the
        look before, so that an end of its thinking may follow from this one."""
        looks, repeating, slots = list[Look](), self._repeating, self._turns[self._turn]
        is_urgent = False
        for slot in sorted(slots):
            live = by_slot.get(slot)
            if live is None or live.queued_s is not None:
                slots.remove(slot)
                live = None
            if live is not None and live.own_state.phase is Phase.THINK and live.ending is None:
                tokens = live.ref.output_token_ids
                looks.append((slot, live.info.request_id, live.text_run, tokens, len(tokens), repeating))
                self._looked.add(slot)
                is_urgent = is_urgent or slot in repeating
            elif slot in self._looked:
                looks.append((slot, "", 0, (), 0, repeating))
                self._looked.remove(slot)
        return looks, is_urgent and not self._merge_loops


class LoopSearch:
    """Searches the thinking of an engine's requests for cycles, on the thread that sends the records."""

    def __init__(self) -> None:
        # Id and newest tokens of the request in each slot.
        self._tails: dict[int, tuple[str, TokenTail]] = {}

    def search(self, looks: Iterable[Look]) -> list[tuple[int, int, int]]:
        """Take these looks. Return slot, period and tokens of each cycle in them."""
        loops = list[tuple[int, int, int]]()
        for slot, request_id, text_run, tokens, total, repeating in looks:
            repeating.discard(slot)
            known, tail = self._tails.get(slot, ("", None))
            if tail is None or known != request_id:
                tail = TokenTail()
                self._tails[slot] = request_id, tail
            if not request_id:
                del self._tails[slot]
                continue
            tail.take(tokens, total)
            if (cycle := tail.cycle(text_run)) is not None:
                loops.append((slot, *cycle))
                repeating.add(slot)
        return loops
