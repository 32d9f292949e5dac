"""The words in which people read the harm of shortened thinking. The functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meridian.v1 import fleet_pb2

WORDS = {
    "entropy": "the entropy rules",
    "soft_close": "soft close",
    "cap": "the policy's cap",
    "loop": "the loop rules",
}


def kind_text(kind: str, name: str) -> str:
    """Return a kind of shortening in words. name: that of a budget or of a pressure entry."""
    return WORDS.get(kind) or f"{kind} {name}"


def unmeasured_reason(harm: fleet_pb2.Savings | fleet_pb2.ShorteningHarm, savings: fleet_pb2.Savings) -> str:
    """Return why the harm of all kinds, or of one, is not measured under the rules of `savings`."""
    if savings.not_measured:
        return savings.not_measured
    return "no probe came where thinking would have ended" if harm.unjudged else "no request is judged yet"
