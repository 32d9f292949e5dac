"""A list of tokens that counts the reads of its tokens, so that a test can bound work instead of time."""

from __future__ import annotations

from typing import Any


class Counted(list[int]):
    """A list that counts how many tokens are read from it by index or slice."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found
