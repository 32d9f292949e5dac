"""Decides when requests are probed. All functions are pure; they read the table or moments within a report.

The module owns the gates and intervals of EAT probes. Rules that read the probes' results are in `rule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.masks import any_in
from meridian_control.engine.history import OUTPUT_TOKENS, THINK_TOKENS
from meridian_control.engine.moments import Moments, sentence_ends
from meridian_control.engine.token_rows import differs
from meridian_control.policy.effects import (
    EXTENSION_LEAD_TOKENS,
    eat_may_end,
    extends_empty_answers,
    is_gated,
    only_gives_up,
    probe_lead_tokens,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import EntropyPolicy

# A probe near the cap that the engine refuses, as under load, is asked for again after this many thinking tokens.
CAP_PROBE_INTERVAL_TOKENS = 16


def _may_be_probed(table: RequestTable, among: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    allowed: NDArray[np.bool_] = table.thinking & ~table.probe_open
    if any_in(table.preempted):
        allowed &= ~table.preempted
    return allowed if among is None else allowed & among


def probes_due(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the slots whose EAT probe is due: one per interval, early enough that EAT is warm at the floor.

    If the policy gates probes, only requests are due that just passed a sentence end at which the gate was open.
    """
    entropy = policy.entropy
    if not entropy.enabled:
        return np.zeros(0, np.intp)
    due = _wait_for_probe(entropy, table, among) & (table.think_tokens >= _probed_from(policy, table))
    if is_gated(entropy):
        due &= table.boundary_now & (table.boundary_ranks[:, 0] <= entropy.eat_probe_max_rank)
    return due.nonzero()[0]


def probes_came_due(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> Moments | None:
    """Return the moments of the newest report at which EAT probes came due; None if no probe is due."""
    entropy, history = policy.entropy, table.history
    if not entropy.enabled:
        return None
    since, waits = _probed_from(policy, table), _wait_for_probe(entropy, table, among)
    if is_gated(entropy):
        ends, due = sentence_ends(table), np.zeros(0, np.intp)
        row = ends.row[(ends.boundary_ranks[:, 0] <= entropy.eat_probe_max_rank) & waits.take(ends.slot)]
    else:
        is_due = waits & (table.think_tokens >= since)
        due = row = is_due.nonzero()[0]
        if len(due):
            row = is_due.take(history.rows.slot).nonzero()[0]
    if not (len(row) or len(due)):
        return None
    slot, think_tokens = history.rows.slot.take(row), history.count(THINK_TOKENS, row)
    passed = (think_tokens >= since.take(slot)) & (history.rows.phase_after.take(row) == agent_pb2.PHASE_THINK)
    # If the outcome of the previous probe came in this report, the next probe is due after that outcome.
    if not history.probed.keys().isdisjoint(due.tolist() or slot.tolist()):
        free_in = np.full(len(waits), -1)
        free_in[list(history.probed)] = list(history.probed.values())
        passed &= history.step.take(row) >= free_in.take(slot)
    index = passed.nonzero()[0]
    index = index[differs(slot[index])]
    row, slot, think_tokens = row[index], slot[index], think_tokens[index]
    if len(row) >= len(due):
        output_tokens = history.count(OUTPUT_TOKENS, row)
        return Moments(table, slot, row, think_tokens=think_tokens, output_tokens=output_tokens)
    # The other probes came due at the end of the report.
    newest = history.newest_rows(due)
    newest[due.searchsorted(slot)] = row
    return Moments(table, due, newest)


def _wait_for_probe(policy: EntropyPolicy, table: RequestTable, among: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Whether a request may be probed now, unless each rule that reads probes has already fired in shadow for it and
    its later probes are not needed."""
    rules = 1 << agent_pb2.FORCE_REASON_GIVE_UP if policy.give_up_tokens else 0
    if not rules or eat_may_end(policy):
        rules |= 1 << agent_pb2.FORCE_REASON_EAT
    waits: NDArray[np.bool_] = _may_be_probed(table, among) & (table.end_decided == 0)
    measured = (table.shadow_decided & rules) == rules
    # Probes of the control group go on until thinking ends, to find out whether the trial answer stays. In shadow
    # self-calibration needs the same of all requests, because a sample without these requests would be biased.
    if any_in(measured) and not (policy.shadow and policy.self_calibration):
        waits &= table.control | ~measured
    return waits


def _probed_from(policy: Policy, table: RequestTable) -> NDArray[np.int64]:
    """Return the number of thinking tokens at which each request's next probe is due, at least 1, [slots]."""
    lead, floor = probe_lead_tokens(policy.entropy), policy.scheduler.min_think_tokens
    since: NDArray[np.int64] = np.maximum(table.own_min_think_tokens - lead, max(1, floor - lead))
    if only_gives_up(policy.entropy):
        # The control group needs earlier probes, because they judge the other rules.
        since = np.where(table.control, since, np.maximum(since, policy.entropy.give_up_tokens - lead))
    return np.maximum(since, table.probed_tokens + policy.entropy.eat_probe_interval_tokens)


def cap_probes_due(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the slots so near their cap that a probe asks whether the answer would be empty, until one has told."""
    if not extends_empty_answers(policy):
        return np.zeros(0, np.intp)
    near = (table.max_think_tokens >= 0) & (table.think_tokens >= table.max_think_tokens - EXTENSION_LEAD_TOKENS)
    may = _may_be_probed(table, among) & (table.think_tokens >= table.next_cap_probe_tokens)
    return np.flatnonzero(may & near & ~table.cap_probed)
