"""The metric of preemptions: its entry in the catalogue."""

from meridian_control.capabilities.preemption.stream import PREEMPTED_FOR_TOTAL
from meridian_control.common.metric_entry import counter

ENTRIES = (
    counter(
        PREEMPTED_FOR_TOTAL,
        (),
        "Thinking requests that were preempted for waiting ones.",
        "Rises steadily: too few places or KV blocks; add engines, or let fewer requests preempt others.",
    ),
)
