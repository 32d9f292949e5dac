"""Tables of sentences for made-up vocabularies, in which a token ends sentences or does not, whatever stands around
it."""

from __future__ import annotations

from array import array

from meridian_agent.core.sentences import CERTAIN, SentenceTable


def ends_by_id(flags: bytes) -> SentenceTable:
    """Return the table in which the token with this id has these row flags. flags: by token id."""
    kinds = [0, *sorted(set(flags) - {0})]
    width = len(kinds)
    states = b"".join(bytes([kind | (CERTAIN if kind else 0)]) + bytes(width - 1) for kind in kinds)
    after = array("I", [number * width for number in range(width)] * width)
    return SentenceTable(array("H", [*map(kinds.index, flags), 0]), after, states, bytes(map(bool, flags)))
