"""Work in slices: a generator that yields wherever it may pause, and returns its result.

How much work one message makes is chosen by the agent that sends it. Whoever runs such work lets other work go on at
each pause. Work that fits in one slice never pauses.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Sliced: TypeAlias = Generator[None, None, T]

# Rows after which work pauses: about a millisecond of work.
SLICE_ROWS = 32


def at_once(work: Sliced[T]) -> T:
    """Do all of the work without a pause and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
