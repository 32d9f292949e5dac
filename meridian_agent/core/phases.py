"""The phase machine: which tokens open and close thinking, and what phase each token of a request belongs to.

Pure: token ids in, phases out. Knows neither vLLM nor text. Used on the engine-core thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Phase(IntEnum):
    """The values of meridian.v1.Phase. A request is UNKNOWN while nobody knows the engine's thinking markers."""

    UNKNOWN = agent_pb2.PHASE_UNSPECIFIED
    PROMPT = agent_pb2.PHASE_PROMPT
    THINK = agent_pb2.PHASE_THINK
    OUTPUT = agent_pb2.PHASE_OUTPUT


class TokenEvent(IntEnum):
    TEXT = 0
    START = 1
    END = 2


# Every state x event. A text token in PROMPT means the model answers directly; a start marker in OUTPUT is re-entry.
# Nothing leaves UNKNOWN but reading the request again with other markers.
TRANSITIONS: dict[tuple[Phase, TokenEvent], Phase] = {
    (Phase.UNKNOWN, TokenEvent.TEXT): Phase.UNKNOWN,
    (Phase.UNKNOWN, TokenEvent.START): Phase.UNKNOWN,
    (Phase.UNKNOWN, TokenEvent.END): Phase.UNKNOWN,
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
FLAG_SENTENCE = agent_pb2.TOKEN_FLAG_SENTENCE
FLAG_PARAGRAPH = agent_pb2.TOKEN_FLAG_PARAGRAPH
TAKE_BACK_SHIFT = int(agent_pb2.TOKEN_FLAG_TAKE_BACK).bit_length() - 1
# Tokens that are looked through at once for one that may end a marker.
PART_TOKENS = 256
# Where there is one, finding it takes as long as so many tokens of text for each of the part, and looking at it as long
# as so many in all.
WALK_TOKENS, LOOK_TOKENS = 2, 128


@dataclass(slots=True)
class Work:
    """The tokens of text that may still be read at once. It ends below 0 by what the last look took."""

    left: int


# For whoever reads to the end.
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Markers:
    """The token sequences that open and close thinking; several spellings of each are allowed.

    closing: text that a forced end writes before the marker, so that the model reads why it stops.
    answer_prefix: text that a probe appends after the marker.
    own_ends: (start, end) pairs for starts that only one of the ends closes.
    unknown: why no marker of this engine is known; empty where they are.
    Raises ValueError when a sequence is empty, the same sequence opens and closes, the closing text holds one, or
    `own_ends` names one that is in neither `starts` nor `ends`.
    """

    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...] = ()
    answer_prefix: tuple[int, ...] = ()
    own_ends: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    unknown: str = ""
    by_last: dict[int, tuple[tuple[tuple[int, ...], TokenEvent], ...]] = field(init=False, compare=False, repr=False)
    longest: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ends:
            raise ValueError("no end-of-thinking marker")
        named = [(m, TokenEvent.START) for m in self.starts] + [(m, TokenEvent.END) for m in self.ends]
        if any(not m for m, _ in named) or set(self.starts) & set(self.ends):
            raise ValueError("a thinking marker is empty, or opens and closes at once")
        table: dict[int, tuple[tuple[tuple[int, ...], TokenEvent], ...]] = {}
        # Longest first, so that a marker that ends in another one wins.
        for marker, event in sorted(named, key=lambda m: -len(m[0])):
            table[marker[-1]] = (*table.get(marker[-1], ()), (marker, event))
        object.__setattr__(self, "by_last", table)
        object.__setattr__(self, "longest", max(len(m) for m, _ in named))
        if any(start not in self.starts or end not in self.ends for start, end in self.own_ends):
            raise ValueError("own_ends names a sequence that is no thinking marker")
        for end in {self.ends[0], *(end for _, end in self.own_ends)}:
            tokens = list(self.closing + end)
            if any(self.match(tokens[:n])[0] is not TokenEvent.TEXT for n in range(1, len(tokens))):
                raise ValueError("the closing text holds a thinking marker")

    @property
    def known(self) -> bool:
        """Whether this engine's thinking markers are known."""
        return not self.unknown

    @property
    def end(self) -> tuple[int, ...]:
        """The marker that a forced end writes, unless the start that opened the thinking has an end of its own."""
        return self.ends[0]

    @property
    def probe(self) -> tuple[int, ...]:
        """The tokens that an EAT probe appends, with the same exception."""
        return self.end + self.answer_prefix

    @property
    def ending(self) -> tuple[int, ...]:
        """The tokens that a forced end writes, with the same exception: the closing text, which counts as thinking, and
        the marker."""
        return self.closing + self.end

    def end_of(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """The marker that ends thinking which `start` opened; an empty start stands for any."""
        return next((end for own, end in self.own_ends if own == start), self.end)

    def ending_of(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that a forced end writes into thinking which `start` opened."""
        return self.closing + self.end_of(start)

    def probe_of(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that an EAT probe appends to thinking which `start` opened."""
        return self.end_of(start) + self.answer_prefix

    def ending_after(self, tail: Sequence[int], start: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The tokens that a forced end writes after these text tokens, the newest last. start: opened the thinking.

        Where the text begins an end marker, that is the marker's rest: what has the model's own beginning twice reads
        as neither marker nor text. Where it begins a start marker only, that is completed first, for the same reason.
        """
        own = self.end_of(start)
        end = _longest_begun((own,) if self.own_ends else self.ends, tail)
        opening = _longest_begun(self.starts, tail)
        if end[0] and end[0] >= opening[0]:
            return end[1]
        return opening[1] + self.ending_of(start)

    def start_before(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The start marker that these tokens end with; empty for none."""
        event, length = self.match(list(tokens)) if tokens else (TokenEvent.TEXT, 0)
        return tuple(tokens[-length:]) if event is TokenEvent.START else ()

    def is_text(self, token: int, phase: Phase) -> bool:
        """Whether a token surely is text that leaves the phase as it is; False does not mean that it is not."""
        return self.longest == 1 and token not in self.by_last and phase is not Phase.PROMPT

    def match(self, tokens: list[int]) -> tuple[TokenEvent, int]:
        """The event that the last of these tokens completes, and the marker's length (0 for TEXT)."""
        for marker, event in self.by_last.get(tokens[-1], ()):
            if len(marker) <= len(tokens) and tuple(tokens[-len(marker) :]) == marker:
                return event, len(marker)
        return TokenEvent.TEXT, 0

    def last_event(self, tokens: Sequence[int]) -> tuple[TokenEvent, int]:
        """The last marker in these tokens, and how many of them follow it; (TEXT, 0) for none."""
        event, at = self.search_back(tokens, len(tokens), Work(NO_LIMIT))
        return (event, len(tokens) - at) if event is not TokenEvent.TEXT else (event, 0)

    def search_back(self, tokens: Sequence[int], stop: int, work: Work) -> tuple[TokenEvent, int]:
        """The last marker that ends in tokens[:stop], and where it does; TEXT and how far it was looked for if there is
        none, or the work is done.

        Reads from the end, a part at a time: where a prompt ends in a marker, its length does not matter.
        """
        while stop > 0 and work.left > 0:
            begin = max(0, stop - min(PART_TOKENS, work.left))
            part = tokens[begin:stop]
            work.left -= len(part)
            if not self.by_last.keys().isdisjoint(part):
                work.left -= WALK_TOKENS * len(part)
                for position in [i for i in range(stop - 1, begin - 1, -1) if part[i - begin] in self.by_last]:
                    found, _ = self.match(list(tokens[max(0, position + 1 - self.longest) : position + 1]))
                    if found is not TokenEvent.TEXT:
                        return found, position + 1
                    work.left -= LOOK_TOKENS
                    if work.left <= 0:
                        return TokenEvent.TEXT, position
            stop = begin
        return TokenEvent.TEXT, stop


def no_markers(why: str) -> Markers:
    """The markers of an engine whose markers nobody knows: no token is one. why: for people to read."""
    return Markers((), ((-1,),), unknown=why)


NO_MARKERS = no_markers("no thinking markers are known")


def _begun(marker: tuple[int, ...], tail: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How many of the marker's first tokens the tail ends with, less than all, and the marker's rest."""
    most = min(len(marker) - 1, len(tail))
    length = next((n for n in range(most, 0, -1) if tuple(tail[-n:]) == marker[:n]), 0)
    return length, marker[length:] if length else ()


def _longest_begun(markers: Iterable[tuple[int, ...]], tail: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    return max((_begun(m, tail) for m in markers), key=lambda begun: begun[0], default=(0, ()))


def boundary_flag(text: str) -> int:
    """Row flags of a token by its text: whether it ends a sentence (or a line), or a paragraph."""
    if "\n\n" in text:
        return FLAG_SENTENCE | FLAG_PARAGRAPH
    return FLAG_SENTENCE if "\n" in text or text.rstrip().endswith((".", "?", "!", ";")) else 0


# How many tokens (the template's newlines) may follow an end marker that closes thinking in the generation prompt.
CLOSED_TAIL_TOKENS = 3


def initial_phase(markers: Markers, prompt: list[int], supports_think_disable: bool) -> Phase:
    """The phase a prompt leaves a request in: open (THINK), closed by the template (OUTPUT) or undecided (PROMPT)."""
    return after_prompt(*markers.last_event(prompt), supports_think_disable)


def after_prompt(event: TokenEvent, after: int, supports_think_disable: bool) -> Phase:
    """The same from the prompt's last marker and how many tokens follow it."""
    if event is TokenEvent.START:
        return Phase.THINK
    if event is TokenEvent.END and after <= CLOSED_TAIL_TOKENS and supports_think_disable:
        return Phase.OUTPUT
    return Phase.PROMPT


@dataclass(slots=True)
class PhaseState:
    """One request's phase and token counts. Markers are counted as neither thinking nor output."""

    phase: Phase
    think_tokens: int = 0
    output_tokens: int = 0
    ends: int = 0
    # Newest tokens of prompt and generation, enough to hold the longest marker.
    tail: list[int] = field(default_factory=list)
    # Text tokens since the last marker: only these can turn out to belong to the next one.
    text_run: int = 0
    # The start marker that opened the newest thinking; empty before any.
    start: tuple[int, ...] = ()

    def feed(self, token: int, markers: Markers) -> tuple[Phase, int]:
        """Advance by one token; returns the phase that token belongs to and its row flags."""
        if markers.longest == 1:
            found = markers.by_last.get(token)
            if found is None:
                return self._text()
            return self._marker(found[0][1], (token,))
        self.tail.append(token)
        if len(self.tail) > markers.longest:
            del self.tail[0]
        event, length = markers.match(self.tail)
        return self._text() if event is TokenEvent.TEXT else self._marker(event, tuple(self.tail[-length:]))

    def feed_some(self, tokens: Sequence[int], at: int, markers: Markers, work: Work) -> int:
        """As `feed` for each of tokens[at:], where nobody asks for rows, until the work is done. Returns where
        it ended.

        Text is counted at once; what may end a marker is looked at by itself.
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
        """As `feed` for tokens that end no marker."""
        if not tokens:
            return
        self.text_run += len(tokens)
        if self.phase is Phase.THINK:
            self.think_tokens += len(tokens)
        elif self.phase is not Phase.UNKNOWN:
            self.phase = Phase.OUTPUT
            self.output_tokens += len(tokens)
        if markers.longest > 1:
            self.tail = [*self.tail, *tokens][-markers.longest :]

    def ending(self, markers: Markers) -> tuple[int, ...]:
        """The tokens that a forced end writes now."""
        own = min(self.text_run, len(self.tail))
        return markers.ending_after(self.tail[len(self.tail) - own :], self.start)

    def may_be_in_marker(self, markers: Markers) -> bool:
        """Whether the newest tokens begin a marker of several."""
        return self.ending(markers) != markers.ending_of(self.start)

    def _text(self) -> tuple[Phase, int]:
        self.text_run += 1
        if self.phase is Phase.THINK:
            self.think_tokens += 1
            return Phase.THINK, 0
        if self.phase is Phase.UNKNOWN:
            return Phase.UNKNOWN, 0
        self.phase = Phase.OUTPUT
        self.output_tokens += 1
        return Phase.OUTPUT, 0

    def _marker(self, event: TokenEvent, marker: tuple[int, ...]) -> tuple[Phase, int]:
        length = len(marker)
        if event is TokenEvent.START:
            self.start = marker
        before, self.phase = self.phase, TRANSITIONS[self.phase, event]
        closes = before is Phase.THINK and self.phase is Phase.OUTPUT
        self.ends += closes
        flags = FLAG_MARKER | (FLAG_END if closes else 0) | self._take_back(before, length - 1)
        return (before if event is TokenEvent.END and before is not Phase.PROMPT else self.phase), flags

    def _take_back(self, before: Phase, length: int) -> int:
        """Uncount the marker's earlier tokens, which were counted as text when they came; returns row flags."""
        length, self.text_run = min(length, self.text_run), 0
        if before is Phase.THINK:
            self.think_tokens -= length
            return length << TAKE_BACK_SHIFT
        self.output_tokens -= length
        return length << TAKE_BACK_SHIFT | FLAG_FROM_OUTPUT


def begin(markers: Markers, prompt: list[int], supports_think_disable: bool) -> PhaseState:
    """The state a prompt leaves a request in; the first generated tokens may complete a marker the prompt began."""
    return begin_after(markers, prompt, *markers.last_event(prompt), supports_think_disable)


def begin_after(
    markers: Markers, prompt: list[int], event: TokenEvent, after: int, supports_think_disable: bool
) -> PhaseState:
    """The same where the prompt's last marker, and how many tokens follow it, are known."""
    kept = markers.longest - 1
    phase = after_prompt(event, after, supports_think_disable) if markers.known else Phase.UNKNOWN
    stop = len(prompt) - after
    start = markers.start_before(prompt[max(0, stop - markers.longest) : stop]) if event is TokenEvent.START else ()
    return PhaseState(phase, tail=list(prompt[-kept:]) if kept else [], start=start)
