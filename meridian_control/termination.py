"""Who thinks on and who has thought enough. Pure functions of policy and table.

Precedence when several rules fire for a request in the same step: EAT, then RPDI. The hard cap is sent ahead and kept
by the agent, so that it is exact to the token and holds without a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.requests import THINK
from meridian_control.signals import rpdi, warmup_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.policy import EntropyPolicy, Policy, SchedulerPolicy
    from meridian_control.requests import RequestTable


def cap(policy: SchedulerPolicy, opened: agent_pb2.RequestOpened) -> int:
    """A request's hard cap: its own wish, clamped by policy."""
    if opened.HasField("max_think_tokens"):
        return min(opened.max_think_tokens, policy.max_think_tokens)
    return policy.max_think_tokens


def ends(policy: Policy, table: RequestTable) -> list[tuple[int, agent_pb2.ForceReason.ValueType]]:
    """Requests whose thinking an entropy rule ends now, with the reason; each at most once."""
    if not policy.entropy.enabled:
        return []
    open_to_end = table.live & (table.phase == THINK) & (table.end_decided == 0)
    open_to_end &= table.think_tokens >= policy.scheduler.min_think_tokens
    eat = open_to_end & eat_converged(policy.entropy, table)
    derailed = open_to_end & ~eat & rpdi_exceeded(policy.entropy, table)
    return [
        *((int(s), agent_pb2.FORCE_REASON_EAT) for s in np.flatnonzero(eat)),
        *((int(s), agent_pb2.FORCE_REASON_RPDI) for s in np.flatnonzero(derailed)),
    ]


def eat_converged(policy: EntropyPolicy, table: RequestTable) -> NDArray[np.bool_]:
    """EAT is flat *and* low: a trace that is flat at a high level has not converged."""
    warm = table.eat_count >= warmup_samples(policy.ema_alpha)
    flat = table.eat_ema_variance < policy.eat_ema_variance_threshold
    low: NDArray[np.bool_] = table.eat_ema_nats < policy.eat_level_threshold_nats
    return warm & flat & low


def rpdi_exceeded(policy: EntropyPolicy, table: RequestTable) -> NDArray[np.bool_]:
    """Recent tokens are more uncertain than the thinking as a whole; a threshold of 0 switches the rule off."""
    if policy.rpdi_threshold == 0:
        return np.zeros_like(table.live)
    with np.errstate(invalid="ignore"):
        return rpdi(table) > policy.rpdi_threshold


def probes_due(policy: Policy, table: RequestTable) -> NDArray[np.intp]:
    """Slots whose EAT is to be measured now: every interval, early enough to be warm at the floor."""
    if not policy.entropy.enabled:
        return np.zeros(0, np.intp)
    lead = warmup_samples(policy.entropy.ema_alpha) * policy.entropy.eat_probe_interval_tokens
    due = table.live & (table.phase == THINK) & (table.end_decided == 0) & ~table.probe_open & ~table.preempted
    due &= table.think_tokens >= np.maximum(table.next_probe_tokens, policy.scheduler.min_think_tokens - lead)
    due &= table.think_tokens > 0
    return np.flatnonzero(due)
