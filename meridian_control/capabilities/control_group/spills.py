"""Compares what becomes of requests after forced ends of thinking with natural ends in the control group.

An end spills if the request thinks again, or if its answer is unusually long. The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.common.histogram import Histogram
from meridian_control.common.inference import share_difference

if TYPE_CHECKING:
    from meridian.v1 import fleet_pb2

    from meridian_control.common.inference import Estimate

# An answer is unusually long if it is longer than this share of the answers after natural ends.
USUAL_SHARE = 0.95
# Confidence of the intervals. Alerts look at them all the time, so it is higher than that of other intervals.
CONFIDENCE = 0.99


def estimate(savings: fleet_pb2.Savings, min_ends: int) -> None:
    """Fill in which answers are unusually long, and how many more forced ends than natural ones have such an answer or
    spill. The estimates stay absent if a side has fewer than `min_ends` ends."""
    forced, natural = savings.forced_ends, savings.natural_ends
    if min(forced.ends, natural.ends) < min_ends:
        return
    usual = Histogram.of(natural.answer_tokens)
    limit = usual.upper_quantile(USUAL_SHARE)
    savings.long_answer_tokens = int(limit)
    for side in (forced, natural):
        side.long_answers = Histogram.of(side.answer_tokens).above(limit)
    for interval, more in ((savings.long_answers, 0), (savings.spills, 1)):
        first, second = ((side.long_answers + more * side.reentries, side.ends) for side in (forced, natural))
        set_range(interval, share_difference(first, second, CONFIDENCE))


def set_range(message: fleet_pb2.Range, estimated: Estimate | None) -> None:
    """Fill in an estimate; the message stays absent if there is none."""
    if estimated is not None:
        message.value, message.low, message.high = estimated.value, estimated.low, estimated.high
        message.SetInParent()
