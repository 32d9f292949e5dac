"""What the rules of a policy may do, and what they read, as far as the policy alone decides it.

All functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.policy.shortening_kinds import DEFAULT_CAP

if TYPE_CHECKING:
    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import EntropyPolicy, FallbackPolicy, KvMemoryPolicy, SchedulerPolicy

# A probe asks whether the answer would be empty when the request is this many thinking tokens before its cap.
EXTENSION_LEAD_TOKENS = 64


def cap(
    policy: SchedulerPolicy,
    opened: OpenedRequest,
    extended: bool = False,
    unshortened: SchedulerPolicy | None = None,
) -> int:
    """Return the request's hard cap: the smaller of the policy's cap and the request's own.

    An extension raises the policy's cap, but never above the request's own cap. unshortened: the values before a
    budget or pressure shortened them, if one did; neither lowers the cap below the request's own floor.
    """
    extension = policy.empty_answer_extension_tokens if extended else 0
    limit = policy.max_think_tokens + extension
    if unshortened is not None:
        limit = min(unshortened.max_think_tokens + extension, max(limit, opened.min_think_tokens))
    return limit if opened.max_think_tokens is None else min(opened.max_think_tokens, limit)


def extends_empty_answers(own: Policy) -> bool:
    """Whether a request's thinking goes on while its answer would be empty. own: the policy that holds for it."""
    return bool(own.scheduler.enabled and own.scheduler.empty_answer_extension_tokens)


def answer_reserve(policy: Policy, opened: OpenedRequest) -> int:
    """Return the request's answer reserve in tokens, 0 for none."""
    scheduler = policy.scheduler
    return scheduler.answer_reserve_tokens if opened.chat or scheduler.answer_reserve_for == "all" else 0


def _of_any_request(policy: Policy, section: str) -> list[Any]:
    """Return a section of the policy, and that section of its overrides, in which unset fields are None."""
    return [getattr(variant, section) for variant in (policy, *policy.override)]


def shortest_lease_s(*sections: FallbackPolicy | SchedulerPolicy | EntropyPolicy | KvMemoryPolicy) -> float:
    """Return the shortest lease of these sections in seconds; only `fallback` always has one."""
    return min(section.lease_ms for section in sections if section.lease_ms) / 1000


def least_cap(policy: Policy) -> int:
    """Return the smallest cap, in thinking tokens, that the policy or one of its overrides sets."""
    caps: list[int | None] = [section.max_think_tokens for section in _of_any_request(policy, "scheduler")]
    return min(limit for limit in caps if limit is not None)


def needs_signals(policy: Policy) -> bool:
    """Whether a rule that may apply to some request reads signals that the workers measure."""
    return any(e.enabled for e in _of_any_request(policy, "entropy")) or _scheduler_reads(policy)


def _scheduler_reads(policy: Policy) -> bool:
    """Whether a rule of the scheduler section that may apply to some request reads signals."""
    scheduler = _of_any_request(policy, "scheduler")
    reads = any(s.soft_think_tokens or s.empty_answer_extension_tokens for s in scheduler)
    return bool(policy.scheduler.enabled and (reads or staged_in_force(policy)))


def self_calibrates(own: Policy) -> bool:
    """Whether the control plane looks for a rule by itself for a request. own: the policy that holds for it."""
    return own.entropy.enabled and own.entropy.self_calibration


def any_self_calibrates(policy: Policy) -> bool:
    """Whether the control plane looks for a rule by itself for some request."""
    return any(e.self_calibration for e in _of_any_request(policy, "entropy"))


def measured_share(policy: Policy) -> float:
    """Return the share of requests whose signals are measured: all if a rule in force may read them for some request,
    else the policy's sample, and for self-calibration no less than the control group."""
    if _entropy_in_force(policy) or _scheduler_reads(policy):
        return 1.0
    recorded = policy.entropy.holdout_share if any_self_calibrates(policy) else 0.0
    return max(policy.telemetry.shadow_sample_ratio, recorded)


def needs_independent_sample(policy: Policy) -> bool:
    """Whether something is decided from the sample of measured requests as from independent requests: a rule by
    self-calibration, or the harm of what shortens thinking, which the sample's part of the control group shows.

    The function reads the sections one by one, so it is also true for a cap whose section is in shadow.
    """
    shortens = in_force(policy) or loops_in_force(policy) or least_cap(policy) < DEFAULT_CAP
    return shortens or bool(policy.extensions_on(shadow=False)) or any_self_calibrates(policy)


def reads_every_token(policy: Policy) -> bool:
    """Whether the entropy of every thinking token is read: by a rule that may apply to some request, or by calibration,
    because a section in shadow may be recorded. Everything else reads signals at sentence ends only."""
    entropy = _of_any_request(policy, "entropy")
    reads = any(e.rpdi_threshold or e.shadow for e in entropy)
    return reads and any(e.enabled for e in entropy)


def staged_in_force(policy: Policy) -> bool:
    """Whether a budget or pressure is in force, so that soft close may begin earlier."""
    shadows = [*(budget.shadow for budget in policy.budget), *(entry.shadow for entry in policy.pressure)]
    return not all(shadows)


def concerns_first_tokens(policy: Policy) -> bool:
    """Whether an entry may shorten a request from its beginning, a request may be handed over or preempt others, or an
    extension may do anything."""
    changes = policy.budget or policy.pressure or policy.disagg.enabled or may_preempt(policy)
    return bool(changes) or has_extension(policy)


def has_extension(policy: Policy) -> bool:
    """Whether an extension is on, in shadow or in force."""
    return any(policy.extensions_on(shadow=shadow) for shadow in (False, True))


def may_preempt(policy: Policy) -> bool:
    """Whether some waiting request may preempt others, in shadow or not."""
    return any(section.may_preempt for section in _of_any_request(policy, "preemption"))


def sets_token_times(policy: Policy) -> bool:
    """Whether the policy sets the time that a token of the answer or of thinking may take."""
    return bool(policy.scheduler.output_tpot_budget_ms or policy.scheduler.think_tpot_budget_ms)


def in_force(policy: Policy) -> bool:
    """Whether a report may lead to an end of thinking or to another cap for some request, loops aside."""
    scheduler = _of_any_request(policy, "scheduler")
    extends = policy.scheduler.enabled and any(s.empty_answer_extension_tokens for s in scheduler)
    return _entropy_in_force(policy) or extends or staged_in_force(policy)


def _entropy_in_force(policy: Policy) -> bool:
    """Whether an entropy rule may end the thinking of some request."""
    entropy = _of_any_request(policy, "entropy")
    return any(e.enabled for e in entropy) and any(e.shadow is False for e in entropy)


def reads_sentence_ends(policy: Policy) -> bool:
    """Whether a rule that may apply to some request reads the end marker's rank at sentence ends.

    A soft close by a budget or by pressure does not count: it is rare, and a report for each step would cost the
    control plane several times as much for all requests.
    """
    entropy, scheduler = _of_any_request(policy, "entropy"), _of_any_request(policy, "scheduler")
    reads = any(e.rank_conditions or is_gated(e) for e in entropy)
    rules_read = reads and any(e.enabled for e in entropy)
    return rules_read or (policy.scheduler.enabled and any(s.soft_think_tokens for s in scheduler))


def probes_within(policy: Policy, tokens: int) -> bool:
    """Whether a request may be probed at intervals of fewer than `tokens` tokens without being held for the results."""
    entropy = _of_any_request(policy, "entropy")
    dense = any((e.eat_probe_interval_tokens or tokens) < tokens for e in entropy)
    unheld = any(e.shadow or e.eat_hold_ms == 0 for e in entropy)
    return any(e.enabled for e in entropy) and dense and unheld


def is_gated(policy: Any) -> bool:
    """Whether this entropy section, of a policy or of an override, gates probes by the end marker's rank."""
    return bool(policy.eat_probe_max_rank)


def in_shadow(policy: Policy, reason: str) -> bool:
    """Return whether a rule that ends thinking, or its section, is in shadow, so that its decisions are only counted.
    reason: one of ENTROPY_REASONS, `soft_close` or `loop`."""
    if reason in ENTROPY_REASONS:
        return policy.entropy.shadow or (reason == "give_up" and policy.entropy.give_up_shadow)
    return policy.scheduler.shadow if reason == "soft_close" else policy.loop.shadow


def eat_may_end(policy: EntropyPolicy) -> bool:
    """Whether the thresholds of the EAT rule let it fire."""
    return bool(policy.eat_level_threshold_nats and policy.eat_ema_variance_threshold)


def only_gives_up(policy: EntropyPolicy) -> bool:
    """Whether the give-up rule is the only rule that reads probes."""
    return bool(policy.give_up_tokens) and not eat_may_end(policy)


def probes_may_end(policy: EntropyPolicy) -> bool:
    """Whether a rule that reads probes may end thinking, unless the whole section is in shadow."""
    gives_up = policy.give_up_tokens and not policy.give_up_shadow
    return bool(eat_may_end(policy) or gives_up)


def hold_ms(policy: EntropyPolicy) -> int:
    """Return the milliseconds for which a probed request waits for the decision: 0 if no rule in force reads probes."""
    return policy.eat_hold_ms if probes_may_end(policy) and not policy.shadow else 0


def probe_lead_tokens(policy: EntropyPolicy) -> int:
    """Return how many thinking tokens before its floor a request is probed, so that the floor finds enough samples."""
    samples = policy.eat_warmup_samples + policy.confirm_sentence_ends - 1
    return samples * policy.eat_probe_interval_tokens


def finds_loops(policy: Policy) -> bool:
    """Return whether the loop rule is on for any request."""
    return any(loop.enabled for loop in _of_any_request(policy, "loop"))


def loops_in_force(policy: Policy) -> bool:
    """Return whether a loop may end the thinking of any request."""
    return finds_loops(policy) and any(loop.shadow is False for loop in _of_any_request(policy, "loop"))
