"""Tables of sentences for made-up vocabularies, in which a token ends sentences or does not, whatever stands around it;
and the ends that a table finds in a sequence of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from meridian_agent.core.phases import FLAG_GOES_ON, FLAG_SENTENCE
from meridian_agent.core.sentences import CERTAIN, LIKELY, SentenceTable


def ends_by_id(flags: bytes) -> SentenceTable:
    """Return the table in which the token with this id has these row flags. flags: by token id."""
    kinds = [0, *sorted(set(flags) - {0})]
    width = len(kinds)
    states = b"".join(bytes([kind | (CERTAIN | LIKELY if kind else 0)]) + bytes(width - 1) for kind in kinds)
    after = array("I", [number * width for number in range(width)] * width)
    return SentenceTable(array("H", [*map(kinds.index, flags), 0]), after, states, bytes(map(bool, flags)))


def flags_of(table: SentenceTable, tokens: Sequence[int]) -> list[int]:
    """Return the flags of each token of a thinking that begins with the first one."""
    state, flags = 0, list[int]()
    for token in tokens:
        state = table.step(state, token)
        flags.append(table.flags[state])
    return flags


def ends_of(flags: Sequence[int]) -> list[int]:
    """Return the places of the tokens that end a sentence."""
    goes_on = [bool(f & FLAG_GOES_ON) for f in [*flags[1:], 0]]
    return [at for at, flag in enumerate(flags) if flag & FLAG_SENTENCE and not goes_on[at]]
