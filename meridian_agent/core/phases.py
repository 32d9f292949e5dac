"""Decides which tokens open and close thinking, and which phase each token of a request belongs to.

Pure: maps token ids to phases. Knows neither vLLM nor text. Runs on the engine-core thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.bad_settings import BadSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Phase(IntEnum):
    """The values of meridian.v1.Phase. A request is UNKNOWN while the engine's thinking markers are not known, and from
    a prompt of embeddings on until it generates a marker."""

    UNKNOWN = agent_pb2.PHASE_UNSPECIFIED
    PROMPT = agent_pb2.PHASE_PROMPT
    THINK = agent_pb2.PHASE_THINK
    OUTPUT = agent_pb2.PHASE_OUTPUT


class TokenEvent(IntEnum):
    TEXT = 0
    START = 1
    END = 2


# The next phase for every pair of phase and event. A text token in PROMPT means that the model answers without
# thinking; a start marker in OUTPUT means that the model thinks again. A request whose prompt the agent cannot read
# leaves UNKNOWN with the first marker that the model writes.
TRANSITIONS: dict[tuple[Phase, TokenEvent], Phase] = {
    (Phase.UNKNOWN, TokenEvent.TEXT): Phase.UNKNOWN,
    (Phase.UNKNOWN, TokenEvent.START): Phase.THINK,
    (Phase.UNKNOWN, TokenEvent.END): Phase.OUTPUT,
    (Phase.PROMPT, TokenEvent.TEXT): Phase.OUTPUT,
    (Phase.PROMPT, TokenEvent.START): Phase.THINK,
    (Phase.PROMPT, TokenEvent.END): Phase.OUTPUT,
    (Phase.THINK, TokenEvent.TEXT): Phase.THINK,
    (Phase.THINK, TokenEvent.START): Phase.THINK,
    (Phase.THINK, TokenEvent.END): Phase.OUTPUT,
    (Phase.OUTPUT, TokenEvent.TEXT): Phase.OUTPUT,
    (Phase.OUTPUT, TokenEvent.START): Phase.THINK,
    (Phase.OUTPUT, TokenEvent.END): Phase.OUTPUT,
}

# The row flags of meridian.v1.TokenFlag, under short names.
FLAG_MARKER = agent_pb2.TOKEN_FLAG_MARKER
FLAG_END = agent_pb2.TOKEN_FLAG_END
FLAG_FROM_OUTPUT = agent_pb2.TOKEN_FLAG_FROM_OUTPUT
FLAG_FORCED = agent_pb2.TOKEN_FLAG_FORCED
FLAG_BY_CAP = agent_pb2.TOKEN_FLAG_BY_CAP
FLAG_BY_RESERVE = agent_pb2.TOKEN_FLAG_BY_RESERVE
FLAG_SENTENCE = agent_pb2.TOKEN_FLAG_SENTENCE
FLAG_PARAGRAPH = agent_pb2.TOKEN_FLAG_PARAGRAPH
FLAG_GOES_ON = agent_pb2.TOKEN_FLAG_SENTENCE_GOES_ON
TAKE_BACK_SHIFT = int(agent_pb2.TOKEN_FLAG_TAKE_BACK).bit_length() - 1
# Number of tokens that are searched at once for the last token of a marker.
PART_TOKENS = 256
# Costs, in tokens of text, if a part has tokens that may end a marker: for each token of the part to find these places,
# and for each place to compare it with the markers.
WALK_TOKENS, LOOK_TOKENS = 2, 128


@dataclass(slots=True)
class Work:
    """The number of tokens of text that may still be read in this step. The last read may bring it below 0."""

    left: int


# A number of tokens that no search reaches.
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Markers:
    """The token sequences that open and close thinking; several spellings of each are allowed.

    closing: text that a forced end writes before the marker, so that the model reads why it stops.
    answer_prefix: text that a probe appends after the marker.
    own_ends: (start, end) pairs for starts that only one of the ends closes.
    unknown: why the markers of this engine are not known; empty if they are known.
    turn_ends: tokens that end a turn of a chat, and with it thinking that the turn has opened.
    call_ends: those of them that end a call of a tool, which may stand within thinking.
    texts: the starts and ends as text.
    calls: further sequences that close thinking, because a call of a tool begins; a forced end neither writes one nor
    goes on with one.
    Raises BadSettings if a sequence is empty, if the same sequence opens and closes, if the closing text contains a
    marker, or if `own_ends` names a sequence that is in neither `starts` nor `ends`.
    """

    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...] = ()
    answer_prefix: tuple[int, ...] = ()
    own_ends: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    unknown: str = ""
    turn_ends: frozenset[int] = frozenset()
    call_ends: frozenset[int] = frozenset()
    texts: frozenset[str] = frozenset()
    calls: tuple[tuple[int, ...], ...] = ()
    by_last: dict[int, tuple[tuple[tuple[int, ...], TokenEvent], ...]] = field(init=False, compare=False, repr=False)
    longest: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ends:
            raise BadSettings("no end-of-thinking marker")
        named = [(m, TokenEvent.START) for m in self.starts]
        named += [(m, TokenEvent.END) for m in (*self.ends, *self.calls)]
        if any(not m for m, _ in named) or set(self.starts) & set(self.ends):
            raise BadSettings("a thinking marker is empty, or opens and closes at once")
        table: dict[int, tuple[tuple[tuple[int, ...], TokenEvent], ...]] = {}
        # The longest marker comes first, so that it wins over a shorter marker that is its end.
        for marker, event in sorted(named, key=lambda m: -len(m[0])):
            table[marker[-1]] = (*table.get(marker[-1], ()), (marker, event))
        object.__setattr__(self, "by_last", table)
        object.__setattr__(self, "longest", max(len(m) for m, _ in named))
        if any(start not in self.starts or end not in self.ends for start, end in self.own_ends):
            raise BadSettings("own_ends names a sequence that is no thinking marker")
        for end in {self.ends[0], *(end for _, end in self.own_ends)}:
            tokens = list(self.closing + end)
            if any(self.match(tokens[:n])[0] is not TokenEvent.TEXT for n in range(1, len(tokens))):
                raise BadSettings("the closing text holds a thinking marker")

    @property
    def known(self) -> bool:
        """Whether this engine's thinking markers are known."""
        return not self.unknown

    @property
    def end(self) -> tuple[int, ...]:
        """The marker that a forced end writes, unless the start marker of the thinking has an end marker of its own."""
        return self.ends[0]

    @property
    def probe(self) -> tuple[int, ...]:
        """The tokens that an EAT probe appends, unless the start marker of the thinking has an end marker of its
        own."""
        return self.end + self.answer_prefix

    @property
    def ending(self) -> tuple[int, ...]:
        """The tokens that a forced end writes: the closing text, which counts as thinking, and the end marker, unless
        the start marker of the thinking has an end marker of its own."""
        return self.closing + self.end

    def end_of(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """Return the marker that ends thinking which `start` opened; an empty `start` stands for any start marker."""
        return next((end for own, end in self.own_ends if own == start), self.end)

    def ending_of(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that a forced end writes into thinking which `start` opened."""
        return self.closing + self.end_of(start)

    def probe_of(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that an EAT probe appends to thinking which `start` opened."""
        return self.end_of(start) + self.answer_prefix

    def ending_after(self, tail: Sequence[int], start: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the tokens that a forced end writes after the text tokens of `tail`. start: the marker that opened the
        thinking.

        If the text ends in the beginning of an end marker, the result is the rest of that marker, because a beginning
        followed by a whole marker would read as neither marker nor text. If the text ends in the beginning of a start
        marker only, the start marker is completed first, for the same reason.
        """
        own = self.end_of(start)
        end = _longest_begun((own,) if self.own_ends else self.ends, tail)
        opening = _longest_begun(self.starts, tail)
        if end[0] and end[0] >= opening[0]:
            return end[1]
        return opening[1] + self.ending_of(start)

    def start_before(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the start marker that these tokens end with; empty if there is none."""
        event, length = self.match(list(tokens)) if tokens else (TokenEvent.TEXT, 0)
        return tuple(tokens[-length:]) if event is TokenEvent.START else ()

    def is_text(self, token: int, phase: Phase) -> bool:
        """Return whether a token is certainly text that does not change the phase; False means that it may still be
        such text."""
        return self.longest == 1 and token not in self.by_last and phase is not Phase.PROMPT

    def match(self, tokens: list[int]) -> tuple[TokenEvent, int]:
        """Return the event that the last of these tokens completes, and the marker's length (0 for TEXT)."""
        for marker, event in self.by_last.get(tokens[-1], ()):
            if len(marker) <= len(tokens) and tuple(tokens[-len(marker) :]) == marker:
                return event, len(marker)
        return TokenEvent.TEXT, 0

    def last_event(self, tokens: Sequence[int]) -> tuple[TokenEvent, int]:
        """Return the kind of the last marker in these tokens, and the number of tokens after it; (TEXT, 0) if there is
        none."""
        event, at = self.search_back(tokens, len(tokens), Work(NO_LIMIT))
        return (event, len(tokens) - at) if event is not TokenEvent.TEXT else (event, 0)

    def search_back(self, tokens: Sequence[int], stop: int, work: Work) -> tuple[TokenEvent, int]:
        """Return the kind of the last marker in tokens[:stop], and its end. Without a marker, or if `work` runs out
        first, return TEXT and the place that the search has reached.

        The search runs backwards, a part at a time, so the length of a prompt that ends in a marker does not matter.
        """
        while stop > 0 and work.left > 0:
            begin = max(0, stop - min(PART_TOKENS, work.left))
            part = tokens[begin:stop]
            work.left -= len(part)
            if not self.by_last.keys().isdisjoint(part):
                work.left -= WALK_TOKENS * len(part)
                for position in [i for i in range(stop - 1, begin - 1, -1) if part[i - begin] in self.by_last]:
                    event, _ = self.match(list(tokens[max(0, position + 1 - self.longest) : position + 1]))
                    if event is not TokenEvent.TEXT:
                        return event, position + 1
                    work.left -= LOOK_TOKENS
                    if work.left <= 0:
                        return TokenEvent.TEXT, position
            stop = begin
        return TokenEvent.TEXT, stop


def no_markers(why: str) -> Markers:
    """Return the markers of an engine whose thinking markers are not known, so that no token counts as a marker. why:
    the reason, for people to read."""
    return Markers((), ((-1,),), unknown=why)


NO_MARKERS = no_markers("no thinking markers are known")


def _begun(marker: tuple[int, ...], tail: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return how many of the marker's first tokens `tail` ends with, fewer than the whole marker, and the rest of the
    marker; (0, ()) if `tail` ends with none."""
    most = min(len(marker) - 1, len(tail))
    length = next((n for n in range(most, 0, -1) if tuple(tail[-n:]) == marker[:n]), 0)
    return length, marker[length:] if length else ()


def _longest_begun(markers: Iterable[tuple[int, ...]], tail: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    return max((_begun(m, tail) for m in markers), key=lambda begun: begun[0], default=(0, ()))


# Largest number of tokens (the template's newlines) after a marker that the generation prompt writes. With more of them
# after an end marker, an earlier turn has closed its thinking; with more after a start marker, thinking has content.
TAIL_TOKENS = 3


def after_prompt(event: TokenEvent, after: int, supports_think_disable: bool) -> Phase:
    """Return the phase in which a prompt leaves a request: open (THINK), closed by the template (OUTPUT) or undecided
    (PROMPT). The arguments are the prompt's last marker and the number of tokens after it."""
    if event is TokenEvent.START:
        return Phase.THINK
    if event is TokenEvent.END and after <= TAIL_TOKENS and supports_think_disable:
        return Phase.OUTPUT
    return Phase.PROMPT


@dataclass(slots=True)
class PhaseState:
    """The phase and the token counts of one request. Markers count as neither thinking nor output."""

    phase: Phase
    think_tokens: int = 0
    output_tokens: int = 0
    ends: int = 0
    # Newest tokens of prompt and output, as many as the longest marker has.
    tail: list[int] = field(default_factory=list)
    # Number of text tokens since the last marker; only these tokens can turn out to be the beginning of the next
    # marker.
    text_run: int = 0
    # The start marker that opened the newest thinking; empty before the first.
    start: tuple[int, ...] = ()
    # Number of generated tokens that belong to markers.
    marker_tokens: int = 0
    # Number of tokens generated while the phase was not known.
    unknown_tokens: int = 0
    # Whether the prompt's open thinking has content, so that the request goes on with an earlier one's thinking.
    continues: bool = False
    # The newest end marker within an answer, if no start marker came before; empty if there is none.
    stray_end: tuple[int, ...] = ()

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the request has generated."""
        return self.think_tokens + self.output_tokens + self.marker_tokens + self.unknown_tokens

    def copy(self) -> PhaseState:
        """Return a state that advances apart from this one."""
        return replace(self, tail=list(self.tail))

    def feed(self, token: int, markers: Markers) -> tuple[Phase, int]:
        """Advance by one token; return the phase that the token belongs to, and its row flags."""
        if markers.longest == 1:
            completed = markers.by_last.get(token)
            if completed is None:
                return self._text()
            return self._marker(completed[0][1], (token,))
        self.tail.append(token)
        if len(self.tail) > markers.longest:
            del self.tail[0]
        event, length = markers.match(self.tail)
        return self._text() if event is TokenEvent.TEXT else self._marker(event, tuple(self.tail[-length:]))

    def feed_some(self, tokens: Sequence[int], at: int, markers: Markers, work: Work) -> int:
        """Advance by tokens[at:], without phases and flags of each token, until `work` runs out; return the place that
        was reached.

        Text is counted a part at a time; only tokens that may end a marker are handled one by one.
        """
        while at < len(tokens) and work.left > 0:
            part, done = tokens[at : at + PART_TOKENS], 0
            work.left -= len(part)
            if not markers.by_last.keys().isdisjoint(part):
                work.left -= WALK_TOKENS * len(part)
                for place in [i for i, token in enumerate(part) if token in markers.by_last]:
                    self._feed_text(part[done:place], markers)
                    self.feed(part[place], markers)
                    done = place + 1
                    work.left -= LOOK_TOKENS
                    if work.left <= 0:
                        return at + done
            self._feed_text(part[done:], markers)
            at += len(part)
        return at

    def _feed_text(self, tokens: Sequence[int], markers: Markers) -> None:
        """Advance by tokens that end no marker."""
        if not tokens:
            return
        self.text_run += len(tokens)
        if self.phase is Phase.THINK:
            self.think_tokens += len(tokens)
        elif self.phase is Phase.UNKNOWN:
            self.unknown_tokens += len(tokens)
        else:
            self.phase = Phase.OUTPUT
            self.output_tokens += len(tokens)
        if markers.longest > 1:
            self.tail = [*self.tail, *tokens][-markers.longest :]

    def ending(self, markers: Markers) -> tuple[int, ...]:
        """Return the tokens that a forced end would write now."""
        own = min(self.text_run, len(self.tail))
        return markers.ending_after(self.tail[len(self.tail) - own :], self.start)

    def opening(self, markers: Markers) -> tuple[int, ...]:
        """Return the rest of a start marker that the newest tokens may have begun; empty if they have not."""
        own = min(self.text_run, len(self.tail))
        return _longest_begun(markers.starts, self.tail[len(self.tail) - own :])[1]

    def may_be_in_marker(self, markers: Markers) -> bool:
        """Return whether the newest tokens are the beginning of a marker of several tokens."""
        return self.ending(markers) != markers.ending_of(self.start)

    def _text(self) -> tuple[Phase, int]:
        self.text_run += 1
        if self.phase is Phase.THINK:
            self.think_tokens += 1
            return Phase.THINK, 0
        if self.phase is Phase.UNKNOWN:
            self.unknown_tokens += 1
            return Phase.UNKNOWN, 0
        self.phase = Phase.OUTPUT
        self.output_tokens += 1
        return Phase.OUTPUT, 0

    def _marker(self, event: TokenEvent, marker: tuple[int, ...]) -> tuple[Phase, int]:
        length = len(marker)
        if event is TokenEvent.START:
            self.start = marker
        elif not self.start and self.output_tokens >= length:
            self.stray_end = marker
        before, self.phase = self.phase, TRANSITIONS[self.phase, event]
        closes = before is Phase.THINK and self.phase is Phase.OUTPUT
        self.ends += closes
        flags = FLAG_MARKER | (FLAG_END if closes else 0) | self._take_back(before, length - 1)
        return (before if closes else self.phase), flags

    def _take_back(self, before: Phase, length: int) -> int:
        """Uncount the marker's earlier tokens, which were counted as text when they were generated; return row
        flags."""
        length, self.text_run = min(length, self.text_run), 0
        self.marker_tokens += length + 1
        if before is Phase.THINK:
            self.think_tokens -= length
            return length << TAKE_BACK_SHIFT
        if before is Phase.UNKNOWN:
            self.unknown_tokens -= length
            return 0
        self.output_tokens -= length
        return length << TAKE_BACK_SHIFT | FLAG_FROM_OUTPUT


def begin(markers: Markers, prompt: list[int], supports_think_disable: bool) -> PhaseState:
    """Return the state in which a prompt leaves a request; the first generated tokens may complete a marker that the
    prompt began."""
    return begin_after(markers, prompt, *markers.last_event(prompt), supports_think_disable)


def begin_after(
    markers: Markers, prompt: list[int], event: TokenEvent, after: int, supports_think_disable: bool
) -> PhaseState:
    """Return the state in which a prompt leaves a request, from the prompt's last marker and the number of tokens after
    it."""
    kept = markers.longest - 1
    if event is TokenEvent.START and not markers.turn_ends.isdisjoint(prompt[len(prompt) - after :]):
        # Somebody wrote the marker in an earlier turn, such as a user who asks about it.
        event = TokenEvent.TEXT
    phase = after_prompt(event, after, supports_think_disable) if markers.known else Phase.UNKNOWN
    stop = len(prompt) - after
    start = markers.start_before(prompt[max(0, stop - markers.longest) : stop]) if event is TokenEvent.START else ()
    continues = event is TokenEvent.START and after > TAIL_TOKENS
    return PhaseState(phase, tail=list(prompt[-kept:]) if kept else [], start=start, continues=continues)


def begin_unread() -> PhaseState:
    """Return the state in which a prompt of embeddings leaves a request: nothing is known of its tokens."""
    return PhaseState(Phase.UNKNOWN)
