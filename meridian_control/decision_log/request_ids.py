"""Request ids: what is left of one without vLLM's additions, and which are in a sample. Pure functions of the text."""

from zlib import crc32

# Prefixes that vLLM's server puts before the id that a client gave.
PREFIXES = ("chatcmpl-", "cmpl-")


def shortened(request_id: str) -> set[str]:
    """An id without the suffix, the prefix, or both, that vLLM puts around the client's."""
    bare = request_id.rpartition("-")[0]
    prefixed = (name for name in (request_id, bare) if name.startswith(PREFIXES))
    return {bare, *(name.partition("-")[2] for name in prefixed)} - {"", request_id}


def sampled(request_id: str, ratio: float) -> bool:
    """Whether a request is in a sample of this share, 0 to 1. A larger sample holds every smaller one."""
    return crc32(request_id.encode()) < ratio * (1 << 32)
