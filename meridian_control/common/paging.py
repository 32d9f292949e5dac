"""Checks page sizes and page tokens of list methods (AIP-158), and bounds the bytes of a page. All functions are
pure."""

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import TypeVar

from google.protobuf.message import Message

from meridian_control.common.errors import InvalidRequest

Entry = TypeVar("Entry")

PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000


def checked(size: int, token: str, most: int = 10**9 - 1) -> tuple[int, int | None]:
    """Return the largest number of entries in a page, and the number in the page token, None for the first page.

    most: largest number of a token. Raises InvalidRequest.
    """
    if token and (not re.fullmatch(f"[0-9]{{1,{len(str(most))}}}", token) or int(token) > most):
        raise _unknown(token)
    return _limit(size), int(token) if token else None


def newest_page(entries: Sequence[Entry], limit: int, number: Callable[[Entry], int]) -> tuple[Sequence[Entry], str]:
    """Return the first `limit` entries of a list in which numbers fall, and the token of the next page, which is the
    number of the last of these entries; it is empty if nothing is left."""
    return entries[:limit], str(number(entries[limit - 1])) if len(entries) > limit else ""


def page(entries: Sequence[Entry], key: Callable[[Entry], tuple[str, str]], size: int, token: str) -> tuple[int, int]:
    """Return begin and end of a page in a list that is sorted by `key`. Raises InvalidRequest.

    A token names the last entry that was shown instead of its place, because entries come and go between two pages.
    """
    begin = 0
    if token:
        try:
            *last, shown = json.loads(urlsafe_b64decode(token))
            first, second = map(str, last)
            begin = bisect_left(entries, (first, second), key=key) + max(0, int(shown))
            # Some of the shown entries with this key may be gone.
            begin = min(begin, bisect_right(entries, (first, second), key=key))
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise _unknown(token) from None
    return begin, min(len(entries), begin + _limit(size))


def token_after(entries: Sequence[Entry], key: Callable[[Entry], tuple[str, str]], end: int) -> str:
    """Return the token of the page that begins at `end`, empty if nothing is left. The token counts the shown entries
    that have the key of the last one."""
    if end >= len(entries):
        return ""
    last = key(entries[end - 1])
    text = json.dumps([*last, end - bisect_left(entries, last, key=key)])
    return urlsafe_b64encode(text.encode()).decode()


def _limit(size: int) -> int:
    if size < 0:
        raise InvalidRequest("page_size", f"must be at least 0; got {size}")
    return min(size or PAGE_SIZE, MAX_PAGE_SIZE)


def _unknown(token: str) -> InvalidRequest:
    return InvalidRequest("page_token", f"must be a token that the server has returned; got {token[:20]!r}")


def fitting(entries: Sequence[Message], most_bytes: int) -> int:
    """Return how many of the first entries of a list fit into a message of `most_bytes`; at least one, if there is
    one."""
    sizes = accumulate(entry.ByteSize() + 8 for entry in entries)
    return max(min(1, len(entries)), sum(1 for _ in takewhile(lambda size: size <= most_bytes, sizes)))
