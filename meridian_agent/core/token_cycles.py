"""Finds exact cycles of tokens at the end of a request's thinking, which a model writes that repeats itself.

The module owns the newest tokens of each thinking request. It knows neither text nor policy, and of vLLM only that a
request lists its output tokens. It runs on the engine-core thread.

The agent looks at a request once in LOOK_TOKENS tokens. A look copies these tokens and searches the MAX_PERIOD tokens
before them for the newest SUFFIX_TOKENS. Only if these occur again are the places compared, so the time per token is
constant, whatever the length of the request.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meridian_agent.core.live_request import LiveRequest

# Longest period that the search finds, in tokens.
MAX_PERIOD = 512
# Tokens between two looks at a request.
LOOK_TOKENS = 32
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

    @property
    def rounds(self) -> int:
        return self.tokens // self.period


class TokenTail:
    """The newest tokens of one request."""

    def __init__(self) -> None:
        self._tokens = array(_CODE)
        # Tokens of the request that have been taken in.
        self.taken = 0

    def take(self, output_token_ids: Sequence[int]) -> None:
        """Take in the tokens since the last call. output_token_ids: all tokens that the request has generated."""
        total = len(output_token_ids)
        begin = max(self.taken, total - KEPT_TOKENS) if self.taken <= total else max(0, total - KEPT_TOKENS)
        if begin != self.taken:
            # Tokens are missing or were taken back, so the kept tokens no longer precede the new ones.
            del self._tokens[:]
        self._tokens.extend(output_token_ids[begin:total])
        self.taken = total
        if len(self._tokens) > 2 * KEPT_TOKENS:
            del self._tokens[:-KEPT_TOKENS]

    def cycle(self, most: int) -> TokenCycle | None:
        """Return the cycle in which the text ends; None for none.

        most: newest tokens that may belong to the cycle. A text may end in several cycles, because a long round may
        itself end in short rounds; `weight` then decides which one is returned.
        """
        most = min(most, len(self._tokens), KEPT_TOKENS)
        if most < MIN_TOKENS:
            return None
        text = self._tokens[-most:].tobytes()
        size, found, covered = len(text), None, 0
        suffix = text[size - SUFFIX_TOKENS * _SIZE :]
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
            if found is None or weight(cycle) > weight(found):
                found = cycle
        return found


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


class LoopWatch:
    """Looks for cycles in the thinking of an engine's live requests, at some of the requests in each step.

    A look at a request takes a few microseconds, so the requests take turns. The watch looks at each request after at
    most LOOK_TOKENS tokens. tokens_per_step: largest number of tokens that a step may bring a request.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._interval = max(1, LOOK_TOKENS // tokens_per_step)
        self.enabled = False
        self._turn = 0
        # By slot: the request that has it, and the request's newest tokens.
        self._tails: dict[int, tuple[LiveRequest, TokenTail]] = {}

    def look(self, by_slot: Mapping[int, LiveRequest], slots: int) -> list[tuple[int, int, int]]:
        """Look at the requests whose turn it is; return slot, period and tokens of each cycle that was found.

        slots: number of slots that were ever given to a request.
        """
        found = []
        self._turn = (self._turn + 1) % self._interval
        for slot in range(self._turn, slots, self._interval):
            live = by_slot.get(slot)
            if live is None or live.own_state.phase is not Phase.THINK or live.ending is not None:
                self._tails.pop(slot, None)
            elif (cycle := self._tail(slot, live).cycle(KEPT_TOKENS)) is not None:
                # Only where something repeats is the request's own count of tokens worked out.
                cycle = self._tails[slot][1].cycle(live.state.text_run)
                if cycle is not None:
                    found.append((slot, *cycle))
        return found

    def _tail(self, slot: int, live: LiveRequest) -> TokenTail:
        """Return the newest tokens of a request, all that it has generated taken in."""
        known = self._tails.get(slot)
        if known is None or known[0] is not live:
            known = self._tails[slot] = live, TokenTail()
        known[1].take(live.ref.output_token_ids)
        return known[1]
