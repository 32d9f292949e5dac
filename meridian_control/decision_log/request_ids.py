"""Strips vLLM's additions from request ids, and decides which ids are in a sample. All functions are pure."""

from zlib import crc32

# Prefixes that vLLM's server puts before the id that a client has given.
PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")


def shortened(request_id: str) -> set[str]:
    """Return the ids that a client may have given: `request_id` without vLLM's prefix, suffix, or both."""
    bare = request_id.rpartition("-")[0]
    given = {name.removeprefix(prefix) for name in (request_id, bare) for prefix in PREFIXES}
    return {bare, *given} - {"", request_id}


def is_called(own: str, request_id: str) -> bool:
    """Return whether `request_id` is a request's own id or the client's part of that id."""
    return request_id == own or (request_id in own and request_id in shortened(own))


def sampled(request_id: str, ratio: float) -> bool:
    """Return whether a request is in the sample of the share `ratio`, 0 to 1. A larger sample contains each smaller
    one."""
    return ratio >= 1 or crc32(request_id.encode()) < ratio * (1 << 32)
