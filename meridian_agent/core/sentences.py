"""Decides which tokens of a request's thinking end a sentence.

The rules are those of Unicode Standard Annex #29, sentence boundaries, with additions for English abbreviations, list
numbers, line feeds, Markdown and LaTeX. Whether a full stop ends a sentence may depend on the text before it and on
what follows, so a finite machine that reads tokens makes the judgement. A token that may end a sentence gets
FLAG_SENTENCE at once, and the token after it gets FLAG_GOES_ON if that shows that the sentence goes on, or that the
later token, such as a closing bracket, belongs to its end. The judgement depends on nothing but the sequence of tokens.

`table_of` builds the machine from the texts of a vocabulary once, at the start: it reads the text of each token from
every state of the machine of characters, and gives all tokens that do the same the same class. A step then costs two
look-ups for a token. Pure; knows neither vLLM nor a tokenizer. Only the engine-core thread advances states; the link's
thread reads the flags of states that are past.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meridian_agent.core.phases import FLAG_GOES_ON, FLAG_PARAGRAPH, FLAG_SENTENCE
from meridian_agent.core.sentence_properties import CONTINUATIONS, FULL_STOPS, TERMINATORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

# The flags that a row reports.
ROW_FLAGS = FLAG_SENTENCE | FLAG_PARAGRAPH | FLAG_GOES_ON
# Flags that only the agent reads. CERTAIN: whatever follows, the token ends a sentence, or belongs to the end of one.
# ENDED, ENDED_PARAGRAPH: the token shows that the token before it has ended a sentence, or a paragraph. LIKELY: the
# token ends a sentence for certain, or with a sign behind a word, so that no number, initial or known abbreviation goes
# on after it. DIVIDES: an end of thinking after the token would divide a number or an abbreviation.
CERTAIN, ENDED, ENDED_PARAGRAPH, LIKELY, DIVIDES = 1, 2, 4, 8, 128

# Words whose full stop ends no sentence; those of the second text only before a number.
ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof St Jr Sr Rev Gen Lt Col Capt Hon Gov Sen Rep Mt Messrs vs etc cf viz approx resp ca al et incl "
    "excl Inc Ltd Corp dept univ Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec Ph bzw usw ggf evtl vgl Vgl Hr Fr "
    "bspw inkl exkl zzgl Str Nr Sra Srta Dra EE UU Mme Mlle"
)
# Words before which an upper-case letter or a German ordinal and its full stop end a sentence; before any other word
# they may be an initial (`J. Smith`) or an ordinal (`am 3. Mai`). These words begin many sentences, and no name.
STARTERS = (
    "The This That These Those There Then Thus Therefore They Their It Its He She We You Your If In Is So But And Or "
    "For Now Not No Next Let Wait Hmm Hence However Here How What When Where Which Who Why While With Also After "
    "Although As At Because Both By Since To Yes My On One Our Option Okay OK First Second Finally "
    "Es Er Sie Wir Ich Und Aber Oder Also Dann Damit Daher Dies Diese Dieser Dieses Nun Nein Ja Jetzt Wenn Weil "
    "Il Elle Nous Donc Mais Ensuite Et El Ella Por Pero Entonces Los Las Les"
)
# German words before ordinals, which nouns with a capital follow (`im 19. Jahrhundert`).
ARTICLES = (
    "der die das dem den des am im vom zum zur beim ab bis seit dieser dieses diesem diesen jeder jedes jedem jeden"
)
BEFORE_NUMBERS = "No no Nos Fig fig Figs Eq eq Eqs Sec sec Ch ch Vol vol p pp Art Abb Tab Thm Prop"


def _characters(spans: str) -> frozenset[str]:
    """Return the characters of a table of `sentence_properties`."""
    ends = [span.partition("-") for span in spans.split()]
    return frozenset(chr(c) for first, _, last in ends for c in range(int(first, 16), int(last or first, 16) + 1))


KNOWN_WORDS = frozenset(ABBREVIATIONS.split()), frozenset(BEFORE_NUMBERS.split())
KNOWN_STARTERS, KNOWN_ARTICLES = frozenset(STARTERS.split()), frozenset(ARTICLES.split())
STOPS, CONTINUES = _characters(FULL_STOPS) | {"…", "‥"}, _characters(CONTINUATIONS)
MARKS = _characters(TERMINATORS)
LINE_ENDS = frozenset("\n\r\x85\u2028\u2029")
# Signs that Markdown and LaTeX write behind the end of a sentence, beside Unicode's closing brackets and quotes.
CLOSERS = frozenset("\"'*_`$\\~")
# Signs that may stand before the number of a list's item.
BULLETS = frozenset("#+>|•·")


class Symbol(IntEnum):
    """What the machine of characters reads: a character, or a run of letters or of digits."""

    LINE_END = auto()
    SPACE = auto()
    # A terminator; ASCII's `!` and `?`, which code writes in the middle of expressions, are MARK.
    TERMINATOR = auto()
    MARK = auto()
    STOP = auto()
    CLOSER = auto()
    # An opening bracket or quote, which Unicode counts among the closing ones.
    OPENER = auto()
    CONTINUES = auto()
    NUMBER = auto()
    LOWER = auto()
    UPPER = auto()
    # Letters of scripts without case.
    LETTERS = auto()
    LOWER_LETTER = auto()
    UPPER_LETTER = auto()
    ABBREVIATION = auto()
    LOWER_ABBREVIATION = auto()
    BEFORE_NUMBER = auto()
    LOWER_BEFORE_NUMBER = auto()
    # A word that begins many sentences; a German article; and one with a capital, which begins sentences.
    STARTER = auto()
    LOWER_ARTICLE = auto()
    ARTICLE = auto()
    BULLET = auto()
    # A mathematical sign, with which no sentence begins; `>`, `|` and `+` are BULLET.
    OPERATOR = auto()
    OTHER = auto()
    # A special token of the vocabulary, such as a marker.
    SPECIAL = auto()


S = Symbol
LOWERS = {S.LOWER, S.LOWER_LETTER, S.LOWER_ABBREVIATION, S.LOWER_BEFORE_NUMBER, S.LOWER_ARTICLE}
WORDS = {S.UPPER, S.UPPER_LETTER, S.ABBREVIATION, S.BEFORE_NUMBER, S.STARTER, S.ARTICLE} | LOWERS


class Place(IntEnum):
    """What the machine of characters knows about the text so far."""

    # Nothing of the coming sentence has come; a number there, and its full stop, is an item of a list.
    START = 0
    START_NUMBER = auto()
    ITEM = auto()
    # Inside a sentence, after a word, a number, or another character.
    INSIDE = auto()
    WORD = auto()
    NUMBER = auto()
    ABBREVIATION = auto()
    BEFORE_NUMBER = auto()
    LOWER_LETTER = auto()
    UPPER_LETTER = auto()
    # A letter after another one and its full stop (`e.g.`), or an upper-case letter with which a line or a sentence
    # begins, such as an item of a list: the next full stop ends no sentence.
    SHORT_LETTER = auto()
    # A German article, the same with a space, and the number after it.
    ARTICLE = auto()
    BEFORE_ORDINAL = auto()
    ORDINAL = auto()
    # After a full stop that ends no sentence.
    SHORTENED = auto()
    # From here on a sentence may have ended: after a terminator, `!` or `?`, a full stop, that of a number, that of a
    # word which a number follows, that of a single letter, or that of an upper-case letter or a German ordinal; and the
    # same with spaces.
    AFTER_TERMINATOR = auto()
    AFTER_MARK = auto()
    AFTER_STOP = auto()
    AFTER_NUMBER = auto()
    AFTER_BEFORE_NUMBER = auto()
    AFTER_LETTER = auto()
    AFTER_INITIAL = auto()
    SPACED = auto()
    SPACED_MARK = auto()
    SPACED_STOP = auto()
    SPACED_LETTER = auto()
    SPACED_INITIAL = auto()
    SPACED_BEFORE_NUMBER = auto()
    AFTER_LINE = auto()
    AFTER_PARAGRAPH = auto()


P = Place
PENDING = frozenset(range(P.AFTER_TERMINATOR, len(Place)))
# The places at which a sentence has ended whatever follows, because no number and no abbreviation goes on there.
SURE = {P.AFTER_TERMINATOR, P.SPACED, P.AFTER_LINE, P.AFTER_PARAGRAPH}
PROBABLE = {*SURE, P.AFTER_MARK, P.AFTER_STOP, P.SPACED_MARK, P.SPACED_STOP}
# The places within a number or an abbreviation. A single letter is more often a word than the beginning of one.
DIVIDED = {
    *(P.START_NUMBER, P.ITEM, P.NUMBER, P.AFTER_NUMBER, P.ABBREVIATION, P.SHORTENED, P.AFTER_LETTER),
    *(P.BEFORE_NUMBER, P.AFTER_BEFORE_NUMBER, P.SPACED_BEFORE_NUMBER, P.ORDINAL, P.AFTER_INITIAL, P.SPACED_INITIAL),
}
WITH_SPACES = {
    P.AFTER_TERMINATOR: P.SPACED,
    P.AFTER_MARK: P.SPACED_MARK,
    P.AFTER_STOP: P.SPACED_STOP,
    P.AFTER_NUMBER: P.SPACED_STOP,
    P.AFTER_LETTER: P.SPACED_LETTER,
    P.AFTER_INITIAL: P.SPACED_INITIAL,
    P.AFTER_BEFORE_NUMBER: P.SPACED_BEFORE_NUMBER,
}
AFTER_STOP_OF = {
    P.ABBREVIATION: P.SHORTENED,
    P.SHORT_LETTER: P.SHORTENED,
    P.UPPER_LETTER: P.AFTER_INITIAL,
    P.ORDINAL: P.AFTER_INITIAL,
    P.BEFORE_NUMBER: P.AFTER_BEFORE_NUMBER,
    P.NUMBER: P.AFTER_NUMBER,
    P.LOWER_LETTER: P.AFTER_LETTER,
    P.START_NUMBER: P.ITEM,
    # A full stop where a sentence begins ends none.
    P.START: P.INSIDE,
}
FIRST_WORDS = {
    S.LOWER_LETTER: P.LOWER_LETTER,
    S.UPPER_LETTER: P.UPPER_LETTER,
    S.ABBREVIATION: P.ABBREVIATION,
    S.LOWER_ABBREVIATION: P.ABBREVIATION,
    S.BEFORE_NUMBER: P.BEFORE_NUMBER,
    S.LOWER_BEFORE_NUMBER: P.BEFORE_NUMBER,
    S.ARTICLE: P.ARTICLE,
    S.LOWER_ARTICLE: P.ARTICLE,
}
# What goes on with an abbreviation after its full stop and a space.
SHORTENS = {P.SPACED_BEFORE_NUMBER: {S.NUMBER, S.OPENER, S.CLOSER}}
# The places at which the text goes on with the same word or number.
IN_WORD = {P.WORD, P.ABBREVIATION, P.BEFORE_NUMBER, P.LOWER_LETTER, P.UPPER_LETTER, P.SHORT_LETTER, P.ARTICLE}
NUMBERS = {P.NUMBER, P.START_NUMBER, P.ORDINAL}


def _inside(place: Place, symbol: Symbol) -> Place:  # noqa: PLR0911, PLR0912
    """Return the place after a symbol at a place where no end of a sentence is pending."""
    at_start = place in (P.START, P.ITEM)
    if symbol is S.LINE_END:
        return P.START if place is P.START else P.AFTER_LINE
    if symbol is S.SPECIAL:
        return P.START
    if symbol is S.STOP:
        return AFTER_STOP_OF.get(place, P.AFTER_STOP)
    if symbol in (S.TERMINATOR, S.MARK):
        return P.INSIDE if place is P.START else P.AFTER_TERMINATOR if symbol is S.TERMINATOR else P.AFTER_MARK
    if symbol is S.NUMBER:
        if place in IN_WORD:
            return P.WORD
        if place in (P.BEFORE_ORDINAL, P.ORDINAL):
            return P.ORDINAL
        return P.START_NUMBER if at_start or place is P.START_NUMBER else P.NUMBER
    if symbol in WORDS:
        if place in IN_WORD or place in NUMBERS or place is P.ITEM:
            return P.WORD
        if place is P.SHORTENED:
            return P.SHORT_LETTER
        if at_start and symbol is S.UPPER_LETTER:
            return P.SHORT_LETTER
        return FIRST_WORDS.get(symbol, P.WORD)
    if symbol is S.LETTERS:
        return P.WORD
    if symbol is S.SPACE and place in (P.ARTICLE, P.BEFORE_ORDINAL):
        return P.BEFORE_ORDINAL
    if at_start and symbol in (S.SPACE, S.CLOSER, S.OPENER, S.BULLET, S.CONTINUES):
        return P.START
    return P.START_NUMBER if place is P.START_NUMBER and symbol is S.CLOSER else P.INSIDE


class Fate(IntEnum):
    """What a symbol says about a pending end of a sentence: the sentence has ended before the symbol, the end includes
    the symbol, spaces do not say, or the sentence goes on."""

    ENDED = 0
    INCLUDES = 1
    OPEN = 2
    GOES_ON = 3


def _after_end(place: Place, symbol: Symbol) -> tuple[Fate, Place]:  # noqa: PLR0911
    """Return what a symbol says about the end that is pending at a place, and the place after it. The rules are named
    as in the annex."""
    line = place in (P.AFTER_LINE, P.AFTER_PARAGRAPH)
    if symbol is S.LINE_END:  # SB9 to SB11; a further line feed ends a paragraph.
        return Fate.INCLUDES, P.AFTER_PARAGRAPH if line else P.AFTER_LINE
    ended = Fate.ENDED, _inside(P.START, symbol)
    if line or symbol is S.SPECIAL:  # SB4
        return ended
    spaced = place not in WITH_SPACES
    if symbol is S.SPACE:  # SB9, SB10
        return Fate.OPEN, WITH_SPACES.get(place, place)
    if symbol in (S.STOP, S.TERMINATOR, S.MARK):  # SB8a
        new = P.AFTER_TERMINATOR if S.TERMINATOR is symbol else P.AFTER_STOP if symbol is S.STOP else P.AFTER_MARK
        return Fate.INCLUDES, new
    if symbol is S.CONTINUES:  # SB8a
        return Fate.GOES_ON, P.INSIDE
    if symbol in (S.CLOSER, S.OPENER) and not spaced:  # SB9
        # Scripts without spaces between sentences also begin with a quote; and German quotes end with an opening one.
        return ended if symbol is S.OPENER and place is P.AFTER_TERMINATOR else (Fate.INCLUDES, place)
    goes_on = Fate.GOES_ON, _inside(P.INSIDE, symbol)
    if place is P.SPACED_INITIAL:
        return ended if symbol in (S.STARTER, S.ARTICLE) else goes_on
    if spaced:
        if place is not P.SPACED and symbol in (S.OPERATOR, S.BULLET):  # `n! = 6`
            return goes_on
        stop = place not in (P.SPACED, P.SPACED_MARK)
        # SB8; an abbreviation and the number after it; and one of several letters with spaces between them.
        if place is P.SPACED_LETTER and symbol is S.UPPER_LETTER:
            return Fate.GOES_ON, P.SHORT_LETTER
        return goes_on if stop and (symbol in LOWERS or symbol in SHORTENS.get(place, ())) else ended
    if place is P.AFTER_TERMINATOR or symbol is S.LETTERS:  # SB11
        return ended
    if place in (P.AFTER_LETTER, P.AFTER_INITIAL) and symbol in (S.LOWER_LETTER, S.UPPER_LETTER):
        return Fate.GOES_ON, P.SHORT_LETTER if place is P.AFTER_LETTER else P.UPPER_LETTER
    # SB6, SB7, SB8. Neither a number, a word nor a sign follows the end of a sentence without a space.
    return goes_on


class Reading(NamedTuple):
    """The state of the machine of characters within a token. own: the pending end begins in this token. flags: of the
    token so far."""

    place: Place
    own: bool = False
    flags: int = 0


def _read(reading: Reading, symbol: Symbol) -> Reading:
    place, own, flags = reading
    if place not in PENDING:
        new = _inside(place, symbol)
        return Reading(new, new in PENDING, flags)
    fate, new = _after_end(place, symbol)
    if fate is Fate.ENDED:
        if own:
            flags |= FLAG_SENTENCE | CERTAIN | LIKELY | (FLAG_PARAGRAPH if place is P.AFTER_PARAGRAPH else 0)
        else:
            flags |= ENDED | (ENDED_PARAGRAPH if place is P.AFTER_PARAGRAPH else 0)
        return Reading(new, new in PENDING, flags)
    if fate is Fate.OPEN:
        return Reading(new, own, flags)
    if not own:
        flags |= FLAG_GOES_ON
    return Reading(new, fate is Fate.INCLUDES, flags)


def _over(reading: Reading) -> tuple[Place, int]:
    """Return the place after a whole token, and the token's flags."""
    place, own, flags = reading
    flags |= DIVIDES if place in DIVIDED else 0
    if place in PENDING:
        # If an end was pending before a token of spaces, it includes them.
        flags |= FLAG_SENTENCE | (0 if own else FLAG_GOES_ON)
        if place is P.AFTER_PARAGRAPH:
            flags |= FLAG_PARAGRAPH
        flags &= ~(CERTAIN | LIKELY)
        flags |= (CERTAIN if place in SURE else 0) | (LIKELY if place in PROBABLE else 0)
    return place, flags


# ------------------------------------------------------------------------------------------------- texts into symbols

PIECES = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+|\r\n|.", re.DOTALL)


@lru_cache(maxsize=4096)
def _character(c: str) -> Symbol | None:  # noqa: PLR0911
    """Return the symbol of a character that is neither a letter nor a digit; None for one that has no effect, such as a
    combining mark (SB5)."""
    if c in LINE_ENDS:
        return S.LINE_END
    if c in STOPS:
        return S.STOP
    if c in MARKS:
        return S.MARK if c in "!?" else S.TERMINATOR
    if c in CONTINUES:
        return S.CONTINUES
    if c in CLOSERS or (category := unicodedata.category(c)) in ("Pe", "Pf"):
        return S.CLOSER
    if category in ("Ps", "Pi"):
        return S.OPENER
    if c.isspace():
        return S.SPACE
    if category in ("Mn", "Mc", "Me", "Cf"):
        return None
    if c in BULLETS:
        return S.BULLET
    return S.NUMBER if category in ("Nd", "Nl", "No") else S.OPERATOR if category == "Sm" else S.OTHER


def _word(piece: str) -> Symbol:  # noqa: PLR0911
    """Return the symbol of a run of letters."""
    first, (abbreviations, before_numbers) = piece[0], KNOWN_WORDS
    lower = first.islower()
    if not (lower or first.isupper() or first.istitle()):
        return S.LETTERS
    if piece in before_numbers:
        return S.LOWER_BEFORE_NUMBER if lower else S.BEFORE_NUMBER
    if piece in abbreviations:
        return S.LOWER_ABBREVIATION if lower else S.ABBREVIATION
    if piece in KNOWN_ARTICLES:
        return S.LOWER_ARTICLE
    if piece.lower() in KNOWN_ARTICLES and piece.istitle():
        return S.ARTICLE
    if piece in KNOWN_STARTERS:
        return S.STARTER
    if len(piece) == 1 and piece != "I":
        return S.LOWER_LETTER if lower else S.UPPER_LETTER
    return S.LOWER if lower else S.UPPER


def symbols_of(text: str) -> tuple[Symbol, ...]:
    """Return what the machine of characters reads in a text."""
    symbols = list[Symbol]()
    for piece in PIECES.findall(text):
        if piece[0].isalpha():
            symbols.append(_word(piece))
        elif (symbol := S.NUMBER if piece[0].isdecimal() else _character(piece[0])) is not None:
            symbols.append(symbol)
    return tuple(symbols)


# ------------------------------------------------------------------------------------------------------- vocabularies

# The terminators that a byte-level vocabulary may split, by their bytes.
SPLIT = {c.encode(): _character(c) for c in MARKS | STOPS if ord(c) > 127}
PREFIXES = frozenset(spelled[:n] for spelled in SPLIT for n in range(1, len(spelled)))


class TokenText(NamedTuple):
    """The text of a token. head, tail: bytes before and after the text that are parts of characters. special: the token
    is no text."""

    text: str
    head: bytes = b""
    tail: bytes = b""
    special: bool = False


def split_bytes(raw: bytes) -> TokenText:
    """Return the text of a token by its bytes, of which the first and the last may be parts of characters."""
    head = next((n for n, byte in enumerate(raw) if byte & 0xC0 != 0x80), len(raw))
    lead = next((n for n in range(len(raw) - 1, max(head, len(raw) - 4) - 1, -1) if raw[n] >= 0xC0), len(raw))
    width = 0 if lead == len(raw) else 2 if raw[lead] < 0xE0 else 3 if raw[lead] < 0xF0 else 4
    tail = lead if lead + width > len(raw) else len(raw)
    return TokenText(raw[head:tail].decode("utf-8", "replace"), raw[:head], raw[tail:])


class _Kind(NamedTuple):
    """What the machine reads of a token; the fields are like those of TokenText."""

    symbols: tuple[Symbol, ...]
    head: bytes = b""
    tail: bytes = b""
    special: bool = False


# A state of the machine of tokens: a place, and the first bytes of a character that is not complete.
State = tuple[Place, bytes]


def _advance(state: State, token: _Kind) -> tuple[State, int]:
    """Return the state after a token that is read in a state, and the token's flags."""
    place, begun = state
    reading = Reading(place)
    if begun:
        spelled = begun + token.head
        if token.head and not (token.symbols or token.tail) and spelled in PREFIXES:
            return (place, spelled), 0
        # A character that is no terminator counts as a letter.
        reading = _read(reading, SPLIT.get(spelled) or S.LETTERS)
    if token.special:
        reading = _read(reading, S.SPECIAL)
    for symbol in token.symbols:
        reading = _read(reading, symbol)
    if not token.tail:
        place, flags = _over(reading)
        return (place, b""), flags
    # What begins is not known yet. An end before it counts as one, as before a letter.
    after = _read(reading, S.LETTERS) if reading.place in PENDING else reading
    at_start = reading.place in PENDING or reading.place is P.START
    if token.tail in PREFIXES:
        return (P.START if at_start else P.INSIDE, token.tail), after.flags
    return (P.WORD, b""), after.flags


@dataclass(frozen=True, slots=True)
class SentenceTable:
    """The machine of one vocabulary. A state is a number, 0 where thinking begins.

    classes: by token id the token's class; the last entry is that of all other ids, -1 included. after: by the sum of a
    state and a class, the state after the token. flags: by state, the flags of the token after which the machine is in
    it. may_end: by token id 1 if the token may end a sentence by itself, 2 if it may belong to the end of one that a
    token before it has begun, else 0; empty if the vocabulary is not known.
    """

    classes: array[int]
    after: array[int]
    flags: bytes
    may_end: bytes = b""
    _classes: NDArray[np.uint16] = field(init=False, repr=False, compare=False)
    _after: NDArray[np.uint32] = field(init=False, repr=False, compare=False)
    _flags: NDArray[np.uint8] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_classes", np.frombuffer(self.classes, np.uint16))
        object.__setattr__(self, "_after", np.frombuffer(self.after, np.uint32))
        object.__setattr__(self, "_flags", np.frombuffer(self.flags, np.uint8))

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        known = self.classes
        return self.after[state + known[token if token < len(known) else -1]]

    def may_have_ended(self, before: int, newest: int) -> bool:
        """Return False if the flags of the newest token of a request certainly tell of no end of a sentence. before:
        the token before it."""
        # The first token after a pending end shows that the sentence has ended.
        known, number = self.may_end, len(self.may_end)
        return (newest < number and known[newest] != 0) or (before < number and known[before] != 0)

    def classes_of(self, tokens: Sequence[int]) -> NDArray[np.uint16]:
        """Return the classes of tokens, [tokens]."""
        ids = np.array(tokens, np.intp)
        # A negative number stands for no token.
        np.minimum(ids, len(self.classes) - 1, out=ids)
        return self._classes.take(ids)

    def steps(self, states: NDArray[np.uint32], classes: NDArray[np.uint16]) -> NDArray[np.uint32]:
        """Return the states after one more token each. classes: those of the tokens."""
        return self._after.take(states + classes)

    def flags_of(self, states: NDArray[np.uint32]) -> bytes:
        """Return the flags of the tokens after which the machine is in these states."""
        return self._flags.take(states).tobytes()

    def row_flags(self, states: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the flags of the rows of the tokens after which the machine is in these states."""
        return (self._flags.take(states) & ROW_FLAGS).astype(np.uint32)

    def ends(self, states: NDArray[np.uint32], flags: int) -> NDArray[np.intp]:
        """Return the indices of the states whose tokens have any of the flags."""
        return (self._flags.take(states) & flags).nonzero()[0]

    def state_of(self, tokens: Sequence[int]) -> int:
        """Return the state after all tokens of a request's thinking."""
        state = 0
        for token in tokens:
            state = self.step(state, token)
        return state


def table_of(texts: Iterable[TokenText]) -> SentenceTable:
    """Return the machine of a vocabulary. texts: of the tokens, by id."""
    numbers, kinds = dict[_Kind, int](), array("H")
    # The last one is the kind of a token that is in no vocabulary, which counts as a word.
    for text, head, tail, special in (*texts, TokenText("a word")):
        kinds.append(numbers.setdefault(_Kind(symbols_of(text), head, tail, special), len(numbers)))
    classes = dict[_Function, int]()
    class_of = [classes.setdefault(_function(kind), len(classes)) for kind in numbers]
    of_kind = bytes(function.may_end for function in classes)
    class_ids = array("H", (class_of[kind] for kind in kinds))
    return _numbered(list(classes), class_ids, bytes(of_kind[number] for number in class_ids[:-1]))


class _Function(NamedTuple):
    """What the tokens of one class do. by_place: the state after the token, and the token's flags, by the place before
    it. completes: the same by state, where the token completes or goes on with the bytes of a terminator; in each other
    state with such bytes these were those of a letter."""

    by_place: tuple[tuple[State, int], ...]
    completes: tuple[tuple[State, tuple[State, int]], ...]

    def of(self, state: State) -> tuple[State, int]:
        place, begun = state
        return dict(self.completes).get(state, self.by_place[P.WORD]) if begun else self.by_place[place]

    @property
    def may_end(self) -> int:
        """As in SentenceTable.may_end."""
        alone = [flags for place, (_, flags) in enumerate(self.by_place) if place not in PENDING]
        if any(flags & FLAG_SENTENCE for flags in (*alone, *(flags for _, (_, flags) in self.completes))):
            return 1
        return 2 if any(flags & FLAG_SENTENCE for _, flags in self.by_place) else 0


def _function(token: _Kind) -> _Function:
    begun = [prefix for prefix in PREFIXES if (prefix + token.head) in SPLIT or (prefix + token.head) in PREFIXES]
    states = [(place, prefix) for prefix in (begun if token.head else ()) for place in (P.START, P.INSIDE)]
    by_place = tuple(_advance((place, b""), token) for place in Place)
    return _Function(by_place, tuple((state, _advance(state, token)) for state in states))


def _numbered(functions: list[_Function], classes: array[int], may_end: bytes) -> SentenceTable:
    """Return the table of these classes. A state of the table is a state of the machine together with the flags of the
    token that has led to it; its number is a multiple of the number of classes."""
    numbers: dict[tuple[State, int], int] = {((P.START, b""), 0): 0}
    after, width, places = array("I"), len(functions), [((P.START, b""), 0)]
    for state, _ in places:
        for function in functions:
            result = function.of(state)
            if result not in numbers:
                numbers[result] = len(numbers) * width
                places.append(result)
            after.append(numbers[result])
    flags = b"".join(bytes([f]) + bytes(width - 1) for _, f in places)
    return SentenceTable(classes, after, flags, may_end)


def newest_end(flags: int, enough: int = CERTAIN) -> tuple[int, int] | None:
    """Return the number of tokens after the newest end of a sentence, which is 0 or 1, and the row flags of the token
    that ends it; None if the flags, those of a request's newest token, tell of no end. enough: the flag with which the
    newest token itself counts as an end: CERTAIN, LIKELY or FLAG_SENTENCE."""
    if flags & enough:
        return 0, flags & (FLAG_SENTENCE | FLAG_PARAGRAPH)
    if flags & ENDED:
        return 1, FLAG_SENTENCE | (FLAG_PARAGRAPH if flags & ENDED_PARAGRAPH else 0)
    return None


# The machine of an engine whose vocabulary is not known, in which no token ends a sentence.
NO_SENTENCES = SentenceTable(array("H", [0]), array("I", [0]), b"\0")


class States:
    """States of a table, one for each row or token of a step, which are computed when somebody first reads them.

    Both threads may read them, because the computation is the same whoever does it. before: the states from which
    `compute` derives them; None if they are given as `known`.
    """

    __slots__ = ("_before", "_compute", "_known")

    def __init__(
        self,
        known: NDArray[np.uint32] | None,
        before: States | None = None,
        compute: Callable[[NDArray[np.uint32]], NDArray[np.uint32]] | None = None,
    ) -> None:
        self._known, self._before, self._compute = known, before, compute

    def get(self) -> NDArray[np.uint32]:
        """Return the states, in an array that nobody changes."""
        before, compute = self._before, self._compute
        if self._known is None:
            assert before is not None
            assert compute is not None
            self._known = compute(before.get())
        # What the states came from is released, in this order, because the other thread may be here too.
        self._before = self._compute = None
        return self._known


class StepStates(States):
    """The states after a step that brought each row one token. Those of a chain of steps, each from the one before, are
    computed together, because most of the time goes into calls of NumPy."""

    __slots__ = ("_table", "_tokens")

    def __init__(self, before: States, table: SentenceTable, tokens: Sequence[int]) -> None:
        super().__init__(None, before)
        self._table, self._tokens = table, tokens

    def get(self) -> NDArray[np.uint32]:
        # The other thread may compute and release some of the steps at the same time; then the rest is looked at again.
        while (known := self._known) is None:
            steps: list[StepStates] = []
            at: States | None = self
            while isinstance(at, StepStates) and at._known is None:
                steps.append(at)
                at = at._before
            if at is not None:
                self._read(at.get(), steps[::-1])
        return known

    def _read(self, states: NDArray[np.uint32], steps: Sequence[StepStates]) -> None:
        """Compute the states after each of the steps. states: those before the first step."""
        classes = self._table.classes_of([token for step in steps for token in step._tokens]).reshape(len(steps), -1)
        for step, of_step in zip(steps, classes, strict=True):
            step._known = states = self._table.steps(states, of_step)
            step._before = None


# The states of no tokens.
NO_STATES = States(np.zeros(0, np.uint32))
