"""The words in which people read the harm of shortened thinking. The functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.look import percent

if TYPE_CHECKING:
    from meridian.v1 import fleet_pb2

# Causes of a revision that withdraws a kind of shortening: what it does, or a signal that has left the distribution on
# which its rules were calibrated.
HARM, DRIFT = "harm", "drift"
WORDS = {
    "entropy": "the entropy rules",
    "soft_close": "soft close",
    "cap": "the policy's cap",
    "loop": "the loop rules",
}


def kind_text(kind: str, name: str) -> str:
    """Return a kind of shortening in words. name: that of a budget or of a pressure entry."""
    return WORDS.get(kind) or f"{kind} {name}".rstrip()


def withdrew_text(cause: str) -> str:
    """Return what a revision has done by which the control plane withdrew a kind of shortening. cause: HARM or DRIFT,
    empty from an older control plane."""
    return "put the entropy rules into shadow" if cause == DRIFT else "withdrew what did harm"


def harm_text(harm: fleet_pb2.Savings | fleet_pb2.ShorteningHarm, savings: fleet_pb2.Savings) -> str:
    """Return the measured harm, of all kinds or of one, its upper bound, and the harm that the policy allows; or why
    harm is not measured under the rules of `savings`."""
    if harm.HasField("harm_ratio"):
        shares = (harm.harm_ratio.value, harm.harm_ratio.high, savings.max_loss)
        value, high, allowed = (percent(share, 2) for share in shares)
        return f"{value}, at most {high}; allowed {allowed}"
    why = "no probe came where thinking would have ended" if harm.unjudged else "no request is judged yet"
    return f"not measured: {savings.not_measured or why}"
