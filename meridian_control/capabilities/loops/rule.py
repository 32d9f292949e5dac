"""Decides which requests' thinking ends because it repeats itself. All functions are pure; they read policy and table.

The rule reads exact cycles of tokens. The agent finds them, and ends the report with the step in which it found one.
The control plane asks the rule once per report, at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.model import Policy


def loops(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the slots whose thinking ends now because it repeats itself, [ends].

    No thinking floor holds except the request's own: a loop adds nothing, however early it begins. among: [slots] with
    the requests that the policy holds for, all requests if absent.
    """
    loop = policy.loop
    if not loop.enabled or not len(table.loop_tokens.nonzero()[0]):
        return np.zeros(0, np.intp)
    ends = (table.loop_tokens >= loop.min_tokens) & (table.loop_tokens >= loop.min_rounds * table.loop_period)
    ends &= table.thinking & (table.end_decided == 0) & (table.think_tokens >= table.own_min_think_tokens)
    if loop.shadow:
        # A rule in shadow fires once per request.
        ends &= (table.shadow_decided & (1 << agent_pb2.FORCE_REASON_LOOP)) == 0
    return np.flatnonzero(ends if among is None else ends & among)
