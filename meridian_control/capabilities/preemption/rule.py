"""Decides which thinking requests may be preempted for waiting ones. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from meridian_control.engine.effective_policies import Among
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.model import Policy

# Reasons for which a request waits.
NO_PLACE, NO_KV_BLOCKS = "no_place", "no_kv_blocks"


def victims(
    groups: Iterable[tuple[Policy, Among]], table: RequestTable, ending: Sequence[int] = ()
) -> NDArray[np.intp]:
    """Return the slots of the requests that may be preempted, those with the fewest tokens first.

    These are requests that think and have thought long enough. Requests that may preempt others themselves are among
    them only if there are no others. groups: each policy that holds for some request, with a mask of these requests.
    ending: slots of the requests whose forced end is under way.
    """
    running = table.thinking & ~table.preempted
    running[list(ending)] = False
    lower, same = np.zeros(len(running), bool), np.zeros(len(running), bool)
    for policy, among in groups:
        own = policy.preemption
        chosen = running & (table.think_tokens >= own.preemptible_from_tokens)
        (same if own.may_preempt else lower)[:] |= chosen if among is None else chosen & among
    slots = np.flatnonzero(lower if lower.any() else same)
    tokens = (table.prompt_tokens + table.think_tokens + table.output_tokens)[slots]
    return slots[np.argsort(tokens, kind="stable")]


def waits_for(running: int, max_running: int) -> str:
    """Return the reason for which requests wait. running, max_running: requests that the engine runs, and may run, 0
    if that is not known."""
    return NO_PLACE if 0 < max_running <= running else NO_KV_BLOCKS
