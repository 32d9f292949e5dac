"""Decides which KV blocks go first, and when nothing more is admitted. Pure functions of policy and table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decisions.request_table import OUTPUT, THINK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.policy.schema import KvMemoryPolicy


def newly_unreachable(capabilities: agent_pb2.Capabilities, table: RequestTable) -> NDArray[np.intp]:
    """Requests whose finished blocks no later prompt can hit: they think, and the template strips thinking."""
    if not (capabilities.reclaim and capabilities.template_strips_think):
        return np.zeros(0, np.intp)
    return np.flatnonzero(table.live & (table.phase == THINK) & (table.tier != agent_pb2.EVICTION_TIER_UNREACHABLE))


def reusable_again(table: RequestTable) -> NDArray[np.intp]:
    """Requests whose tier is taken back once the policy's section is disabled."""
    return np.flatnonzero(table.live & (table.tier == agent_pb2.EVICTION_TIER_UNREACHABLE))


def hold_admission(policy: KvMemoryPolicy, table: RequestTable, kv_tokens: int) -> bool:
    """Whether thinking holds more than its share of `kv_tokens` cache tokens while a preempted answer waits."""
    if not policy.enabled or kv_tokens == 0:
        return False
    if not np.any(table.live & table.preempted & (table.phase == OUTPUT)):
        return False
    thinking = table.live & (table.phase == THINK) & ~table.preempted
    held = int((table.prompt_tokens + table.think_tokens + table.output_tokens)[thinking].sum())
    return held > policy.think_phase_memory_fraction * kv_tokens
