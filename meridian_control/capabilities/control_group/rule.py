"""Decides which requests belong to the control group, which nothing shortens, what holds for them, and which requests
are compared with the calibration; and finds the kind of shortening that ends a treated request's thinking. Functions
are pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.policy import effects
from meridian_control.policy.effects import only_gives_up, probe_lead_tokens, probes_may_end
from meridian_control.policy.shortening_kinds import CAP, DEFAULT_CAP, ENTROPY, LOOP, SOFT_CLOSE, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.shortening import Held
    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import EntropyPolicy, SchedulerPolicy

SPAN = 1 << 64


def held_out(request_id: str, share: float) -> bool:
    """Return whether a request is in the control group of the share `share`, 0 to 1.

    The hash depends on the id alone, so all replicas agree. It is the one by which agents choose the requests that they
    measure in shadow; it differs from the hashes that choose the decision log's sample and the halves of a calibration.
    A larger group contains each smaller one.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"control-group").digest()
    return int.from_bytes(digest) < share * SPAN


def compared_signals(
    policy: Policy, own: Policy, own_floor: int, described: Iterable[str], *, control: bool
) -> frozenset[str]:
    """Return the signals of a request whose first value is compared with the policy's calibration.

    The section must be in force, and the request's rules and floor must be those that were calibrated. If a rule in
    force reads another signal, the rule may end thinking before the first value, so only the control group is compared.
    own: the policy with the overrides that match the request. own_floor: the request's own smallest number of thinking
    tokens. described: the signals that the policy describes. control: whether the request is in the control group.
    """
    entropy, floor = policy.entropy, policy.scheduler.min_think_tokens
    same = own is policy or (own.entropy == entropy and own.scheduler.min_think_tokens == floor)
    if entropy.shadow or not (entropy.enabled and same and own_floor <= floor):
        return frozenset()
    acting = _signals_of_rules(entropy)
    return frozenset(signal for signal in described if control or acting <= {signal})


def _signals_of_rules(entropy: EntropyPolicy) -> set[str]:
    """Return the signals by which the section's rules may end thinking."""
    rules = {
        "eat": probes_may_end(entropy),
        "rank": bool(entropy.rank_conditions),
        "rpdi": bool(entropy.rpdi_threshold),
    }
    return {signal for signal, may_end in rules.items() if may_end}


def sampled_from(policy: Policy) -> int:
    """Return the number of thinking tokens from which on a rule may read an EAT sample.

    A sample shortly before the floor counts too, because a rule may end thinking at the floor by such a sample.
    """
    floor = policy.scheduler.min_think_tokens
    if only_gives_up(policy.entropy):
        # Treated requests are probed no sooner, and the control group is.
        floor = max(floor, policy.entropy.give_up_tokens)
    return floor - probe_lead_tokens(policy.entropy)


def unshortened(policy: Policy) -> Policy:
    """Return the policy that holds for a request of the control group, with all that would end its thinking in shadow.

    policy: the one that would hold for the request if it were treated.
    """
    scheduler = policy.scheduler.model_copy(update={"shadow": True})
    entropy, loop = (part.model_copy(update={"shadow": True}) for part in (policy.entropy, policy.loop))
    return policy.model_copy(update={"scheduler": scheduler, "entropy": entropy, "loop": loop})


def unshortened_cap(scheduler: SchedulerPolicy) -> SchedulerPolicy:
    """Return the section with the default cap, if its own cap is lower."""
    return scheduler.model_copy(update={"max_think_tokens": max(scheduler.max_think_tokens, DEFAULT_CAP)})


def kind_of_cap(held: Held, opened: OpenedRequest, *, extended: bool) -> tuple[int, Kind | None]:
    """Return the cap of a treated request, and the kind of shortening that sets it; None if it is the client's own cap,
    or one of the policy that is no lower than the default."""
    scheduler, own, by = held.treated.scheduler, held.own.scheduler, held.by
    cap = effects.cap(scheduler, opened, extended, own if by is not None else None)
    if by is not None and cap < effects.cap(own, opened, extended):
        return cap, by.cap.kind
    if own.max_think_tokens >= DEFAULT_CAP or (opened.max_think_tokens is not None and cap == opened.max_think_tokens):
        return cap, None
    return cap, CAP


def kind_of_rule(held: Held, reason: str) -> Kind | None:
    """Return the kind of shortening to which a rule belongs that is in force for treated requests; None if the rule is
    in shadow for them, or is not part of the policy."""
    policy, by = held.treated, held.by
    if reason in ENTROPY_REASONS:
        return None if effects.in_shadow(policy, reason) else ENTROPY
    if reason == "soft_close" and not effects.in_shadow(policy, reason):
        own = held.own.scheduler.soft_think_tokens
        by_entry = by is not None and (not own or policy.scheduler.soft_think_tokens < own)
        return by.soft.kind if by is not None and by_entry else SOFT_CLOSE
    if reason == "loop" and not effects.in_shadow(policy, reason):
        return LOOP
    return Kind(reason) if reason in policy.extension else None
