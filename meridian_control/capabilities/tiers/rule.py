"""Decides which KV blocks are evicted first. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable


def newly_unreachable(capabilities: agent_pb2.Capabilities, table: RequestTable) -> NDArray[np.intp]:
    """Return thinking slots that have another tier and whose finished blocks later prompts may be unable to hit; the
    agent decides so for each request when it ends."""
    if not (capabilities.reclaim and capabilities.template_strips_think):
        return np.zeros(0, np.intp)
    unmarked: NDArray[np.bool_] = table.thinking & (table.tier != agent_pb2.EVICTION_TIER_UNREACHABLE)
    return unmarked.nonzero()[0]


def unreachable(table: RequestTable) -> NDArray[np.intp]:
    """Return the slots whose blocks have been given up, in force or in shadow."""
    return np.flatnonzero(table.live & (table.tier == agent_pb2.EVICTION_TIER_UNREACHABLE))
