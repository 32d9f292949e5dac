"""Checks page sizes and page tokens of list methods (AIP-158), and bounds the bytes of a page. All functions are
pure."""

import re
from collections.abc import Sequence
from itertools import accumulate, takewhile

from google.protobuf.message import Message

from meridian_control.common.errors import InvalidRequest

PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000


def checked(size: int, token: str, most: int = 10**9 - 1) -> tuple[int, int | None]:
    """Return the largest number of entries in a page, and the number in the page token, None for the first page.

    most: largest number of a token. Raises InvalidRequest.
    """
    if size < 0:
        raise InvalidRequest("page_size", f"must be at least 0; got {size}")
    if token and (not re.fullmatch(f"[0-9]{{1,{len(str(most))}}}", token) or int(token) > most):
        raise InvalidRequest("page_token", f"must be a token that the server has returned; got {token!r}")
    return min(size or PAGE_SIZE, MAX_PAGE_SIZE), int(token) if token else None


def page(count: int, size: int, token: str) -> tuple[int, int, str]:
    """Return begin, end and next page token of a page in a list of `count` items. Raises InvalidRequest."""
    limit, begin = checked(size, token)
    end = min(count, (begin or 0) + limit)
    return begin or 0, end, str(end) if end < count else ""


def fitting(entries: Sequence[Message], most_bytes: int) -> int:
    """Return how many of the first entries of a list fit into a message of `most_bytes`; at least one, if there is
    one."""
    sizes = accumulate(entry.ByteSize() + 8 for entry in entries)
    return max(min(1, len(entries)), sum(1 for _ in takewhile(lambda size: size <= most_bytes, sizes)))
