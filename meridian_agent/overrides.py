"""What a request says of itself in `vllm_xargs`. Clients write it, so nothing in it may do harm. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TEXT = 128
# Request ids are the client's too (X-Request-Id).
MAX_ID = 256
MAX_TOKENS = 2**31 - 1


class Overrides(NamedTuple):
    """max_think_tokens: the request's own cap, None for none. complaint: what was ignored, with its value."""

    tenant: str
    slo_class: str
    max_think_tokens: int | None
    complaint: str


def read(extra_args: Mapping[str, object] | None) -> Overrides:
    """The request's own words. What is unusable is ignored and named, never raised."""
    extra = extra_args or {}
    cap, complaint = extra.get("meridian_max_think_tokens"), ""
    usable = isinstance(cap, (int, float)) and not isinstance(cap, bool) and math.isfinite(cap) and cap >= 0
    if cap is not None and not usable:
        complaint = f"meridian_max_think_tokens must be a number of tokens, at least 0; got {clean(cap)!r}"
    own = min(int(cap), MAX_TOKENS) if usable else None  # type: ignore[call-overload]
    return Overrides(
        clean(extra.get("meridian_tenant", "")), clean(extra.get("meridian_slo_class", "")), own, complaint
    )


def clean(value: object, limit: int = MAX_TEXT) -> str:
    """Valid UTF-8 text of at most `limit` characters."""
    return str(value)[:limit].encode("utf-8", "replace").decode()
