"""Decides which requests' thinking ends because it repeats itself. All functions are pure; they read policy and table.

The rule `loop` reads exact cycles of tokens. The rule `near_loop` reads how many of the newest tokens repeat earlier
thinking. The agent finds both, and ends the report with the step in which it found one. The control plane asks both
rules once per report, at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decisions.signals import rpdi

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.policy.model import Policy


def loops(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the slots whose thinking ends now because it repeats itself, [found].

    No thinking floor holds except the request's own: a loop adds nothing, however early it begins. among: [slots] with
    the requests that the policy holds for, all requests if absent.
    """
    loop = policy.loop
    if not loop.enabled or not len(table.loop_tokens.nonzero()[0]):
        return np.zeros(0, np.intp)
    found = (table.loop_tokens >= loop.min_tokens) & (table.loop_tokens >= loop.min_rounds * table.loop_period)
    return _open(table, found, among, agent_pb2.FORCE_REASON_LOOP, loop.shadow)


def near_loops(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the slots whose thinking ends now because it repeats itself except for a counter or a name, [found].

    Enough of the newest tokens must repeat earlier thinking, and RPDI must show that entropy has collapsed: RPDI is the
    mean entropy of the newest window over the mean of all thinking. While RPDI is not known, the rule does not fire,
    unless entropy_collapse_ratio is 0. Floors and among: as in `loops`.
    """
    loop = policy.loop
    if not (loop.enabled and loop.near_repeated_tokens) or not len(table.repeated_tokens.nonzero()[0]):
        return np.zeros(0, np.intp)
    found = table.repeated_tokens >= loop.near_repeated_tokens
    if loop.entropy_collapse_ratio and found.any():
        found &= rpdi(table) <= loop.entropy_collapse_ratio
    return _open(table, found, among, agent_pb2.FORCE_REASON_NEAR_LOOP, loop.shadow or loop.near_shadow)


def _open(
    table: RequestTable,
    found: NDArray[np.bool_],
    among: NDArray[np.bool_] | None,
    reason: agent_pb2.ForceReason.ValueType,
    shadow: bool,
) -> NDArray[np.intp]:
    """Return the found slots whose thinking goes on above the request's own floor and for which the rule has not fired
    in shadow."""
    found = found & table.thinking & (table.end_decided == 0) & (table.think_tokens >= table.own_min_think_tokens)
    if shadow:
        found &= (table.shadow_decided & (1 << reason)) == 0
    return np.flatnonzero(found if among is None else found & among)
