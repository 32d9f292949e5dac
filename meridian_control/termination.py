"""Who thinks on and who has thought enough. Pure functions of policy and table.

Precedence when several rules fire for a request in the same step: EAT, rank, RPDI, soft close. A rule in shadow fires
once for a request and keeps no other from firing. The hard cap is sent ahead and kept by the agent, so that it is exact
to the token and holds without a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.requests import THINK
from meridian_control.signals import rpdi

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from meridian_control.policy import Policy
    from meridian_control.requests import RequestTable
    from meridian_control.sections import EntropyPolicy, SchedulerPolicy

# Thinking tokens before the cap at which a probe finds out whether the answer would be empty.
EXTENSION_LEAD_TOKENS = 64


def cap(policy: SchedulerPolicy, opened: agent_pb2.RequestOpened, extended: bool = False) -> int:
    """A request's hard cap: its own wish, clamped by policy. An extension never exceeds the request's own wish."""
    limit = policy.max_think_tokens + (policy.empty_answer_extension_tokens if extended else 0)
    return min(opened.max_think_tokens, limit) if opened.HasField("max_think_tokens") else limit


def _of_any_request(policy: Policy) -> tuple[list[Any], list[Any]]:
    """The policy's entropy and scheduler sections, and those of its overrides, where what is not set is None."""
    sections: list[Any] = [policy, *policy.override]
    return [s.entropy for s in sections], [s.scheduler for s in sections]


def needs_signals(policy: Policy) -> bool:
    """Whether any rule, of any request, reads what the workers measure."""
    entropy, scheduler = _of_any_request(policy)
    reads = any(s.soft_think_tokens or s.empty_answer_extension_tokens for s in scheduler)
    return any(e.enabled for e in entropy) or (policy.scheduler.enabled and reads)


def reads_sentence_ends(policy: Policy) -> bool:
    """Whether a rule, of any request, reads the end marker's rank at each sentence end, and not only at the newest."""
    entropy, scheduler = _of_any_request(policy)
    ranked = any(e.enabled for e in entropy) and any(e.rank_conditions or e.eat_probe_max_rank for e in entropy)
    return ranked or (policy.scheduler.enabled and any(s.soft_think_tokens for s in scheduler))


def probes_within(policy: Policy, tokens: int) -> bool:
    """Whether probes, of any request, may follow each other in fewer tokens, where nobody waits for their results."""
    entropy, _ = _of_any_request(policy)
    dense = any((e.eat_probe_interval_tokens or tokens) < tokens for e in entropy)
    unheld = any(e.shadow or e.eat_hold_ms == 0 for e in entropy)
    return any(e.enabled for e in entropy) and dense and unheld


def ends(
    policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None
) -> list[tuple[int, agent_pb2.ForceReason.ValueType]]:
    """Requests whose thinking a rule ends now, with the reason; each at most once, and once for each rule in shadow.

    among: [slots] the requests this policy holds for; all of them when absent.
    """
    candidates = table.live & (table.phase == THINK) & (table.end_decided == 0)
    if among is not None:
        candidates &= among
    if policy.scheduler.empty_answer_extension_tokens:
        candidates &= ~table.empty_answer
    found = []
    for reason, fires in _rules(policy, table):
        shadow = is_shadowed(policy, reason)
        told = (table.shadow_decided & (1 << reason)) != 0 if shadow else np.zeros_like(fires)
        ended = np.flatnonzero(candidates & fires & ~told)
        candidates[ended] = shadow
        found += [(int(slot), reason) for slot in ended]
    return found


def is_shadowed(policy: Policy, reason: agent_pb2.ForceReason.ValueType) -> bool:
    """Whether a rule's decisions are only counted."""
    section = policy.scheduler if reason == agent_pb2.FORCE_REASON_SOFT_CLOSE else policy.entropy
    return section.shadow


def _rules(policy: Policy, table: RequestTable) -> Iterator[tuple[agent_pb2.ForceReason.ValueType, NDArray[np.bool_]]]:
    """The rules that are on, in their order of precedence, each with the requests it fires for, [slots]."""
    entropy, scheduler = policy.entropy, policy.scheduler
    if entropy.enabled:
        above_floor = table.think_tokens >= np.maximum(scheduler.min_think_tokens, table.own_min_think_tokens)
        at_boundary = above_floor & table.boundary_now
        yield agent_pb2.FORCE_REASON_EAT, above_floor & eat_converged(entropy, table)
        yield agent_pb2.FORCE_REASON_RANK, at_boundary & rank_reached(entropy, table)
        yield agent_pb2.FORCE_REASON_RPDI, at_boundary & rpdi_exceeded(entropy, table)
    if scheduler.enabled and scheduler.soft_think_tokens:
        yield agent_pb2.FORCE_REASON_SOFT_CLOSE, soft_closed(scheduler, table)


def eat_converged(policy: EntropyPolicy, table: RequestTable) -> NDArray[np.bool_]:
    """EAT is flat *and* low: a trace that is flat at a high level has not converged."""
    warm = table.eat_count >= policy.eat_warmup_samples
    flat = table.eat_ema_variance < policy.eat_ema_variance_threshold
    low: NDArray[np.bool_] = table.eat_ema_nats < policy.eat_level_threshold_nats
    return warm & flat & low


def rpdi_exceeded(policy: EntropyPolicy, table: RequestTable) -> NDArray[np.bool_]:
    """Recent tokens are more uncertain than the thinking as a whole; a threshold of 0 switches the rule off."""
    if policy.rpdi_threshold == 0:
        return np.zeros_like(table.live)
    with np.errstate(invalid="ignore"):
        return rpdi(table) > policy.rpdi_threshold


def rank_reached(policy: EntropyPolicy, table: RequestTable) -> NDArray[np.bool_]:
    """Any condition holds: the end marker ranked low enough at each of the newest sentence ends it looks at."""
    reached = np.zeros_like(table.live)
    for condition in policy.rank_conditions:
        depth = len(condition.max_ranks)
        low = (table.boundary_ranks[:, :depth] <= np.array(condition.max_ranks)).all(axis=1)
        reached |= low & (table.boundary_count >= depth)
    return reached


def soft_closed(policy: SchedulerPolicy, table: RequestTable) -> NDArray[np.bool_]:
    """Past the soft budget, at a sentence end, with the end marker among the likeliest tokens."""
    over = table.boundary_now & (table.think_tokens >= np.maximum(policy.soft_think_tokens, table.own_min_think_tokens))
    likely: NDArray[np.bool_] = table.boundary_ranks[:, 0] <= policy.soft_close_rank
    return over & likely


def _may_be_probed(table: RequestTable, among: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    thinking = table.live & (table.phase == THINK) & ~table.preempted & (table.think_tokens > 0)
    found: NDArray[np.bool_] = thinking & ~table.probe_open
    return found if among is None else found & among


def probes_due(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Slots whose EAT is to be measured now: every interval, early enough to be warm at the floor.

    Gated by rank, only those that just passed a sentence end where the end marker ranked low enough.
    """
    entropy = policy.entropy
    if not entropy.enabled:
        return np.zeros(0, np.intp)
    floor = np.maximum(policy.scheduler.min_think_tokens, table.own_min_think_tokens)
    lead = entropy.eat_warmup_samples * entropy.eat_probe_interval_tokens
    measured = (table.shadow_decided & (1 << agent_pb2.FORCE_REASON_EAT)) != 0
    due = _may_be_probed(table, among) & (table.end_decided == 0) & ~measured
    due &= table.think_tokens >= np.maximum(table.next_probe_tokens, floor - lead)
    if entropy.eat_probe_max_rank:
        due &= table.boundary_now & (table.boundary_ranks[:, 0] <= entropy.eat_probe_max_rank)
    return np.flatnonzero(due)


def cap_probes_due(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Slots so near their cap that it is time to look, once, whether their answer would be empty."""
    if not (policy.scheduler.enabled and policy.scheduler.empty_answer_extension_tokens):
        return np.zeros(0, np.intp)
    near = (table.max_think_tokens >= 0) & (table.think_tokens >= table.max_think_tokens - EXTENSION_LEAD_TOKENS)
    return np.flatnonzero(_may_be_probed(table, among) & near & ~table.cap_probed)
