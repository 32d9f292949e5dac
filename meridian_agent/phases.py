"""The phase machine: which tokens open and close thinking, and what phase each token of a request belongs to.

Pure: token ids in, phases out. Knows neither vLLM nor text. Used on the engine-core thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Phase(IntEnum):
    """The values of meridian.v1.Phase."""

    PROMPT = 1
    THINK = 2
    OUTPUT = 3


class Event(IntEnum):
    TEXT = 0
    START = 1
    END = 2


# Every state x event. A text token in PROMPT means the model answers directly; a start marker in OUTPUT is re-entry.
TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.PROMPT, Event.TEXT): Phase.OUTPUT,
    (Phase.PROMPT, Event.START): Phase.THINK,
    (Phase.PROMPT, Event.END): Phase.OUTPUT,
    (Phase.THINK, Event.TEXT): Phase.THINK,
    (Phase.THINK, Event.START): Phase.THINK,
    (Phase.THINK, Event.END): Phase.OUTPUT,
    (Phase.OUTPUT, Event.TEXT): Phase.OUTPUT,
    (Phase.OUTPUT, Event.START): Phase.THINK,
    (Phase.OUTPUT, Event.END): Phase.OUTPUT,
}

# Row flags of meridian.v1.TokenColumns. The bits from TAKE_BACK_SHIFT up say how many earlier tokens, counted as output
# with FLAG_FROM_OUTPUT and else as thinking, turn out to belong to the marker.
FLAG_MARKER = 1
FLAG_END = 2
FLAG_FROM_OUTPUT = 4
FLAG_FORCED = 8
FLAG_BY_CAP = 16
FLAG_SENTENCE = 32
FLAG_PARAGRAPH = 64
TAKE_BACK_SHIFT = 8
# Tokens that are looked through at once for a marker: of a prompt, and of what was generated.
SCAN_TOKENS, TEXT_TOKENS = 4096, 64


@dataclass(frozen=True)
class Markers:
    """The token sequences that open and close thinking; several spellings of each are allowed.

    closing: text that a forced end writes before the marker, so that the model reads why it stops.
    answer_prefix: text that a probe appends after the marker.
    Raises ValueError when a sequence is empty, the same sequence opens and closes, or the closing text holds one.
    """

    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...] = ()
    answer_prefix: tuple[int, ...] = ()
    by_last: dict[int, tuple[tuple[tuple[int, ...], Event], ...]] = field(init=False, compare=False, repr=False)
    longest: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ends:
            raise ValueError("no end-of-thinking marker")
        named = [(m, Event.START) for m in self.starts] + [(m, Event.END) for m in self.ends]
        if any(not m for m, _ in named) or set(self.starts) & set(self.ends):
            raise ValueError("a thinking marker is empty, or opens and closes at once")
        table: dict[int, tuple[tuple[tuple[int, ...], Event], ...]] = {}
        # Longest first, so that a marker that ends in another one wins.
        for marker, event in sorted(named, key=lambda m: -len(m[0])):
            table[marker[-1]] = (*table.get(marker[-1], ()), (marker, event))
        object.__setattr__(self, "by_last", table)
        object.__setattr__(self, "longest", max(len(m) for m, _ in named))
        tokens = list(self.closing + self.ends[0])
        if any(self.match(tokens[:n])[0] is not Event.TEXT for n in range(1, len(tokens))):
            raise ValueError("the closing text holds a thinking marker")

    @property
    def end(self) -> tuple[int, ...]:
        """The marker that a forced end writes."""
        return self.ends[0]

    @property
    def probe(self) -> tuple[int, ...]:
        """The tokens that an EAT probe appends."""
        return self.end + self.answer_prefix

    @property
    def ending(self) -> tuple[int, ...]:
        """The tokens that a forced end writes: the closing text, which counts as thinking, and the marker."""
        return self.closing + self.end

    def ending_after(self, tail: Sequence[int]) -> tuple[int, ...]:
        """What a forced end writes after these text tokens, the newest of them last.

        Where they begin an end marker, its rest: what has the model's own beginning twice reads as neither marker nor
        text. Where they begin a start marker only, that is completed first, for the same reason.
        """
        end, start = _longest_begun(self.ends, tail), _longest_begun(self.starts, tail)
        if end[0] and end[0] >= start[0]:
            return end[1]
        return start[1] + self.ending

    def is_text(self, token: int, phase: Phase) -> bool:
        """Whether a token surely is text that leaves the phase as it is; False does not mean that it is not."""
        return self.longest == 1 and token not in self.by_last and phase is not Phase.PROMPT

    def match(self, tokens: list[int]) -> tuple[Event, int]:
        """The event that the last of these tokens completes, and the marker's length (0 for TEXT)."""
        for marker, event in self.by_last.get(tokens[-1], ()):
            if len(marker) <= len(tokens) and tuple(tokens[-len(marker) :]) == marker:
                return event, len(marker)
        return Event.TEXT, 0

    def last_event(self, tokens: Sequence[int], start: int = 0, stop: int | None = None) -> tuple[Event, int]:
        """The last marker that ends in tokens[start:stop], and how many of `tokens` follow it; (TEXT, 0) for none.

        Reads from the end, a part at a time: where a prompt ends in a marker, its length does not matter.
        """
        stop = len(tokens) if stop is None else stop
        for end in range(stop, start, -SCAN_TOKENS):
            begin = max(start, end - SCAN_TOKENS)
            if self.by_last.keys().isdisjoint(tokens[begin:end]):
                continue
            for position in range(end - 1, begin - 1, -1):
                if tokens[position] in self.by_last:
                    found, _ = self.match(list(tokens[max(0, position + 1 - self.longest) : position + 1]))
                    if found is not Event.TEXT:
                        return found, len(tokens) - 1 - position
        return Event.TEXT, 0


# What an engine without known markers has: nothing it generates is thinking.
NO_MARKERS = Markers((), ((-1,),))


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


def after_prompt(event: Event, after: int, supports_think_disable: bool) -> Phase:
    """The same from the prompt's last marker and how many tokens follow it."""
    if event is Event.START:
        return Phase.THINK
    if event is Event.END and after <= CLOSED_TAIL_TOKENS and supports_think_disable:
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

    def feed(self, token: int, markers: Markers) -> tuple[Phase, int]:
        """Advance by one token; returns the phase that token belongs to and its row flags."""
        if markers.longest == 1:
            found = markers.by_last.get(token)
            if found is None:
                return self._text()
            return self._marker(found[0][1], 1)
        self.tail.append(token)
        if len(self.tail) > markers.longest:
            del self.tail[0]
        event, length = markers.match(self.tail)
        return self._text() if event is Event.TEXT else self._marker(event, length)

    def feed_all(self, tokens: Sequence[int], markers: Markers) -> None:
        """As `feed` for each of them, where nobody asks for rows: text without a marker in it is counted at once."""
        for at in range(0, len(tokens), TEXT_TOKENS):
            part = tokens[at : at + TEXT_TOKENS]
            if not markers.by_last.keys().isdisjoint(part):
                for token in part:
                    self.feed(token, markers)
                continue
            self.text_run += len(part)
            if self.phase is Phase.THINK:
                self.think_tokens += len(part)
            else:
                self.phase = Phase.OUTPUT
                self.output_tokens += len(part)
            if markers.longest > 1:
                self.tail = [*self.tail, *part][-markers.longest :]

    def ending(self, markers: Markers) -> tuple[int, ...]:
        """The tokens that a forced end writes now."""
        own = min(self.text_run, len(self.tail))
        return markers.ending_after(self.tail[len(self.tail) - own :])

    def may_be_in_marker(self, markers: Markers) -> bool:
        """Whether the newest tokens begin a marker of several."""
        return self.ending(markers) != markers.ending

    def _text(self) -> tuple[Phase, int]:
        self.text_run += 1
        if self.phase is Phase.THINK:
            self.think_tokens += 1
            return Phase.THINK, 0
        self.phase = Phase.OUTPUT
        self.output_tokens += 1
        return Phase.OUTPUT, 0

    def _marker(self, event: Event, length: int) -> tuple[Phase, int]:
        before, self.phase = self.phase, TRANSITIONS[self.phase, event]
        closes = before is Phase.THINK and self.phase is Phase.OUTPUT
        self.ends += closes
        flags = FLAG_MARKER | (FLAG_END if closes else 0) | self._take_back(before, length - 1)
        return (before if event is Event.END and before is not Phase.PROMPT else self.phase), flags

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
    return PhaseState(initial_phase(markers, prompt, supports_think_disable), tail=tail_of(markers, prompt))


def tail_of(markers: Markers, prompt: list[int]) -> list[int]:
    """What of a prompt may be the beginning of a marker."""
    kept = markers.longest - 1
    return list(prompt[-kept:]) if kept else []
