"""Finds a request by the id that its client knows, and decides which ids are in a sample. All functions are pure.

vLLM 0.30 to 0.33 make the engine's id of a request from what the client sees, in this order:

- the client's own id (`X-Request-Id` or `request_id` in the body), or a random one, after a prefix for the API:
  `chatcmpl-`, `cmpl-` or `generate-tokens-`; the Responses API puts no prefix before the id, which is `resp_...` unless
  the client chose it. This is the id in the answer;
- the number of the prompt: `-0` for completions, `_0` for the turns of a response and for chats of several prompts;
  beams have `-`, 32 random characters and `-beam-0`;
- `-` and eight random characters;
- with n above 1, the number of the choice in front: `1_`.
"""

from __future__ import annotations

import re
from zlib import crc32

from meridian_control.common.plain_text import printable

# Number of characters from which on agents leave out the middle of an id, and what they put in its place.
MAX_ID, LEFT_OUT = 256, "..."
# Prefixes that vLLM's server puts before the id that a client has given.
PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")
_CHOICE = re.compile(r"\d+_(?=.)")
# The API server's own prefixes tell a later choice from an id that only begins like one.
_LATER_CHOICE = re.compile(rf"0*[1-9]\d*_(?:{'|'.join(PREFIXES)})")
_PROMPT = re.compile(r"(?<=.)(?:_\d+|-[0-9a-f]{32}-beam-\d+)$")
# Only completions number their prompts with a hyphen, which may be a part of the client's own id elsewhere.
_PROMPT_OF_COMPLETION = re.compile(r"(?<=^cmpl-)(.+)-\d+$")


def shortened(request_id: str) -> set[str]:
    """Return the ids by which a client may know a request: the parts of `request_id` that are left without what vLLM
    has added, one addition after the other."""
    names = {request_id, without_choice(request_id)}
    names |= {name.rpartition("-")[0] for name in names}
    names |= {_PROMPT_OF_COMPLETION.sub(r"\1", _PROMPT.sub("", name)) for name in names}
    names |= {name.removeprefix(prefix) for name in names for prefix in PREFIXES}
    return names - {"", request_id}


def without_choice(request_id: str) -> str:
    """Return what the ids of a prompt's choices have in common; the id itself if it has no number of a choice."""
    match = _CHOICE.match(request_id)
    return request_id[match.end() :] if match else request_id


def is_later_choice(request_id: str) -> bool:
    """Return whether a request is another choice than the first of its prompt."""
    return _LATER_CHOICE.match(request_id) is not None


def is_called(own: str, request_id: str) -> bool:
    """Return whether `request_id` is a request's own id or the client's part of that id. Either may have control
    characters or their escapes, because agents of 0.3.0 report ids as the client wrote them."""
    own, request_id = printable(own), printable(request_id)
    if request_id == own or (request_id in own and request_id in shortened(own)):
        return True
    # A client's id has the middle that the agent has left out of a long one.
    if len(own) < MAX_ID or LEFT_OUT not in own:
        return False
    first = own[: own.rindex(LEFT_OUT)]
    if request_id.startswith(first + LEFT_OUT):
        return False
    names = {first, *shortened(f"{first}-")}
    return any(len(name) > MAX_ID // 2 and request_id.startswith(name) for name in names)


def sampled(request_id: str, ratio: float) -> bool:
    """Return whether a request is in the sample of the share `ratio`, 0 to 1. A larger sample contains each smaller
    one."""
    return ratio >= 1 or crc32(request_id.encode()) < ratio * (1 << 32)
