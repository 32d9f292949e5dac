"""Pages of a list (AIP-158): sizes and tokens checked. Pure functions."""

import re

from meridian_control.common.errors import InvalidRequest

PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000


def checked(size: int, token: str, digits: int = 9) -> tuple[int, int | None]:
    """The entries a page may have, and the number its token carries, None for the first page. Raises InvalidRequest."""
    if size < 0:
        raise InvalidRequest("page_size", f"must be at least 0; got {size}")
    if token and not re.fullmatch(f"[0-9]{{1,{digits}}}", token):
        raise InvalidRequest("page_token", f"must be one that was returned; got {token!r}")
    return min(size or PAGE_SIZE, MAX_PAGE_SIZE), int(token) if token else None


def page(count: int, size: int, token: str) -> tuple[int, int, str]:
    """Begin, end and next token of a page of `count` items. Raises InvalidRequest."""
    limit, begin = checked(size, token)
    end = min(count, (begin or 0) + limit)
    return begin or 0, end, str(end) if end < count else ""
