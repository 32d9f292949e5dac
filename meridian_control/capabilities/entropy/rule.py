"""Decides which requests have thought enough. All functions are pure; they read the table or moments within a report.

Each rule is asked at each sentence end with the state at that sentence end, even if the report has later rows.

If several rules fire for a request at the same token, the order of precedence is EAT, rank, RPDI, give-up, soft
close. A rule in shadow fires once per request and keeps no other rule from firing. The hard cap is sent ahead and the
agent applies it, so that the cap is exact to the token and holds without a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import REASONS
from meridian_control.common.masks import any_in
from meridian_control.engine.history import THINK_TOKENS
from meridian_control.engine.moments import joined, sentence_ends
from meridian_control.engine.token_rows import differs
from meridian_control.policy.effects import extends_empty_answers, in_shadow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from meridian_control.engine.history import Unsampled
    from meridian_control.engine.moments import Moments, Seen
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import EntropyPolicy, SchedulerPolicy


def ends(
    policy: Policy, seen: Seen, among: NDArray[np.bool_] | None = None, probes_agree: bool = True
) -> list[tuple[int, agent_pb2.ForceReason.ValueType]]:
    """Return the requests whose thinking a rule ends now, each with the reason.

    A request appears at most once for rules in force, and at most once for each rule in shadow. seen: the table, or
    moments of its requests; of several moments of a request, the first at which a rule fires counts. The returned
    numbers are indices in `seen`. among: mask of the requests for which this policy holds, [slots] or [moments]; all if
    None. probes_agree: False if no rule that reads nothing but probes holds for any request in `seen`.
    """
    firings, candidates = list[tuple[int, int, int, agent_pb2.ForceReason.ValueType, bool]](), None
    for precedence, (reason, fires) in enumerate(_rules(policy, seen, probes_agree)):
        # In most reports no rule fires for any request.
        if not any_in(fires):
            continue
        if candidates is None:
            candidates = _candidates(policy, seen, among)
        shadow = in_shadow(policy, REASONS[reason])
        fired = (candidates & fires).nonzero()[0]
        if shadow and len(fired):
            fired = fired[(seen.shadow_decided[fired] & (1 << reason)) == 0]
        if len(fired):
            fired = fired[differs(seen.slot[fired])]
        firings += [(int(seen.slot[index]), index, precedence, reason, shadow) for index in fired.tolist()]
    return _first(firings)


def _candidates(policy: Policy, seen: Seen, among: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Return which of the requests think and have no end decided by a rule in force."""
    candidates: NDArray[np.bool_] = seen.thinking & (seen.end_decided == 0)
    if among is not None:
        candidates &= among
    if extends_empty_answers(policy):
        candidates &= ~seen.empty_answer
    return candidates


def moments(
    groups: Iterable[tuple[Policy, NDArray[np.bool_] | None]], table: RequestTable
) -> tuple[Moments, list[bool]]:
    """Return the moments of the newest report at which rules are asked, and for each policy whether a rule that reads
    nothing but probes holds for any request.

    Rules are asked at each sentence end, at each EAT measurement, and when a request for which a rule on probes holds
    passes its floor. groups: each policy with a mask of the requests for which the policy holds, [slots].
    """
    at_ends, agree = sentence_ends(table), list[bool]()
    parts: list[tuple[NDArray[Any], ...]] = []
    for policy, among in groups:
        now, before = _agreeing(policy.entropy, table)
        agree.append(any_in(now) or any_in(before))
        if agree[-1]:
            parts += _probes_may_fire(policy, table, among, now, before)
    if not parts:
        return at_ends, agree
    return joined(table, [(at_ends.slot, at_ends.row, at_ends.step), *parts]), agree


def _agreeing(policy: EntropyPolicy, table: RequestTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether a rule that reads nothing but probes holds, now and before the report's samples, [slots] each."""
    if not policy.enabled:
        return (nowhere := np.zeros(len(table.slot), bool)), nowhere
    now, unsampled = _probes_agree(policy, table), table.history.unsampled
    return now, now if unsampled is None else _probes_agree(policy, unsampled)


def _probes_may_fire(
    policy: Policy,
    table: RequestTable,
    among: NDArray[np.bool_] | None,
    now: NDArray[np.bool_],
    before: NDArray[np.bool_],
) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield slots, rows and steps at which a rule on probes may fire although there is no sentence end. now, before: as
    `_agreeing` returns them."""
    history, slot, may = table.history, table.history.rows.slot, table.live & (table.end_decided == 0)
    if among is not None:
        may &= among
    now, before = now & may, before & may
    if not (any_in(now) or any_in(before)):
        return
    agrees, after = now.take(slot), np.ones(len(slot), bool)
    if (unsampled := history.unsampled) is not None:
        if len(measured := (now & (unsampled.steps >= 0)).nonzero()[0]):
            steps = unsampled.steps.take(measured)
            yield measured, history.newest_rows(measured, steps), steps
        after = history.step[:-1] >= unsampled.steps.take(slot)
        agrees = np.where(after, agrees, before.take(slot))
    row = (agrees & (history.rows.phase_after == agent_pb2.PHASE_THINK)).nonzero()[0]
    floor = np.maximum(policy.scheduler.min_think_tokens, table.own_min_think_tokens)
    row = row[history.count(THINK_TOKENS, row) >= floor.take(slot.take(row))]
    row = row[differs(slot[row]) | differs(after[row])]
    if len(row):
        yield slot[row], row, history.step[row]


def _first(
    firings: list[tuple[int, int, int, agent_pb2.ForceReason.ValueType, bool]],
) -> list[tuple[int, agent_pb2.ForceReason.ValueType]]:
    """Return for each slot the rules that fired in shadow, up to the first rule in force that fired, and that rule.

    The rules of a request come in the order in which they fired. firings: slot, index, precedence, reason and whether
    the rule is in shadow, for each rule that fired.
    """
    kept, over = [], -1
    for slot, index, _, reason, shadow in sorted(firings):
        if slot != over:
            kept.append((index, reason))
            over = over if shadow else slot
    return kept


def _rules(
    policy: Policy, seen: Seen, probes_agree: bool
) -> Iterator[tuple[agent_pb2.ForceReason.ValueType, NDArray[np.bool_]]]:
    """Yield the enabled rules in their order of precedence, each with a mask over `seen` of where the rule fires."""
    entropy, scheduler = policy.entropy, policy.scheduler
    for reason, at_ends, fires in _entropy_rules(entropy, seen, probes_agree) if entropy.enabled else ():
        if any_in(fires):
            above_floor = seen.think_tokens >= np.maximum(scheduler.min_think_tokens, seen.own_min_think_tokens)
            yield reason, fires & above_floor & seen.boundary_now if at_ends else fires & above_floor
    if scheduler.enabled and scheduler.soft_think_tokens:
        yield agent_pb2.FORCE_REASON_SOFT_CLOSE, soft_closed(scheduler, seen)


def _entropy_rules(
    entropy: EntropyPolicy, seen: Seen, probes_agree: bool
) -> Iterator[tuple[agent_pb2.ForceReason.ValueType, bool, NDArray[np.bool_]]]:
    """Yield the rules of an enabled entropy section, each with whether it holds at sentence ends only and with a mask
    of where it fires, floors aside."""
    if probes_agree:
        yield agent_pb2.FORCE_REASON_EAT, False, eat_converged(entropy, seen)
    if entropy.rank_conditions:
        yield agent_pb2.FORCE_REASON_RANK, True, rank_reached(entropy, seen)
    if entropy.rpdi_threshold:
        yield agent_pb2.FORCE_REASON_RPDI, True, rpdi_exceeded(entropy, seen)
    if entropy.give_up_tokens and probes_agree:
        yield agent_pb2.FORCE_REASON_GIVE_UP, False, given_up(entropy, seen)


def eat_converged(policy: EntropyPolicy, seen: Seen | Unsampled) -> NDArray[np.bool_]:
    """Whether EAT is flat *and* low, now and after as many earlier samples as confirmation asks for. EAT that is flat
    at a high level has not converged."""
    earlier = policy.confirm_sentence_ends - 1
    converged: NDArray[np.bool_] = seen.eat_ema_nats < policy.eat_level_threshold_nats
    if not any_in(converged):
        return converged
    converged &= seen.eat_ema_variance < policy.eat_ema_variance_threshold
    converged &= seen.eat_count >= policy.eat_warmup_samples + earlier
    if earlier:
        was_flat = seen.earlier_eat_ema_variance[:, :earlier] < policy.eat_ema_variance_threshold
        was_low = seen.earlier_eat_ema_nats[:, :earlier] < policy.eat_level_threshold_nats
        converged &= (was_flat & was_low).all(axis=1)
    return converged


def given_up(policy: EntropyPolicy, seen: Seen | Unsampled) -> NDArray[np.bool_]:
    """Whether EAT was still high at a probe from `give_up_tokens` thinking tokens on, so that more thinking is not
    expected to decide the answer (the second threshold of Conformal Thinking, arXiv 2602.03814).

    A probe before that does not count, so that a request whose probes were not placed is never given up. The rule must
    be on.
    """
    late = (seen.eat_think_tokens >= policy.give_up_tokens) & (seen.eat_count >= policy.eat_warmup_samples)
    high: NDArray[np.bool_] = late & (seen.eat_ema_nats >= policy.give_up_eat_nats)
    return high


def _probes_agree(policy: EntropyPolicy, seen: Seen | Unsampled) -> NDArray[np.bool_]:
    """Whether a rule that reads nothing but probes holds."""
    agree = eat_converged(policy, seen)
    return agree | given_up(policy, seen) if policy.give_up_tokens else agree


def rpdi_exceeded(policy: EntropyPolicy, seen: Seen) -> NDArray[np.bool_]:
    """Whether the newest tokens are more uncertain than all of the thinking, at this sentence end and at as many
    earlier ones as confirmation asks for. The rule must be on."""
    return _at_all(seen.boundary_rpdi[:, : policy.confirm_sentence_ends] > policy.rpdi_threshold)


def _at_all(held: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each request whether a condition held at all of its newest sentence ends, [requests].

    held: whether the condition held at each of these sentence ends, [requests, ends].
    """
    at_all: NDArray[np.bool_] = held[:, 0] if held.shape[1] == 1 else held.all(axis=1)  # type: ignore[assignment]
    return at_all


def rank_reached(policy: EntropyPolicy, seen: Seen) -> NDArray[np.bool_]:
    """Whether any rank condition holds, at each of the newest sentence ends that confirmation asks for.

    A condition holds at a sentence end if the end marker's rank was at most its limit there and at each of the earlier
    sentence ends that the condition lists.
    """
    reached = _rank_reached(policy, seen, 0)
    for age in range(1, policy.confirm_sentence_ends):
        if not reached.any():
            break
        reached &= _rank_reached(policy, seen, age)
    return reached


def _rank_reached(policy: EntropyPolicy, seen: Seen, age: int) -> NDArray[np.bool_]:
    """Whether any rank condition held at the sentence end that `age` others follow."""
    reached = np.zeros(len(seen.slot), bool)
    for condition in policy.rank_conditions:
        end = age + len(condition.max_ranks)
        if not (seen.boundary_ranks[:, age] <= condition.max_ranks[0]).any():
            continue
        low = (seen.boundary_ranks[:, age:end] <= np.array(condition.max_ranks)).all(axis=1)
        reached |= low & (seen.boundary_count >= end)
    return reached


def soft_closed(policy: SchedulerPolicy, seen: Seen) -> NDArray[np.bool_]:
    """Whether a request past its soft budget is at a sentence end with the end marker among the likeliest tokens."""
    over = seen.boundary_now & (seen.think_tokens >= np.maximum(policy.soft_think_tokens, seen.own_min_think_tokens))
    likely: NDArray[np.bool_] = seen.boundary_ranks[:, 0] <= policy.soft_close_rank
    return over & likely
