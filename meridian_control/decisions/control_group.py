"""Decides which requests belong to the control group, in which the entropy rules are in shadow, and which requests are
compared with the calibration. Functions are pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from meridian_control.decisions.probe_timing import only_gives_up, probe_lead_tokens, probes_may_end

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import EntropyPolicy
    from meridian_control.policy.shortening_schema import PressurePolicy

SPAN = 1 << 64


def held_out(request_id: str, share: float) -> bool:
    """Return whether a request is in the control group of the share `share`, 0 to 1.

    The hash depends on the id alone, so all replicas agree. It differs from the hashes that choose the decision log's
    sample and the halves of a calibration. A larger group contains each smaller one.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"control-group").digest()
    return int.from_bytes(digest) < share * SPAN


def has_control_group(entropy: EntropyPolicy, pressure: Iterable[PressurePolicy]) -> bool:
    """Return whether the entropy rules are or may come into force for some requests and are in shadow for the control
    group. pressure: the entries that match the request."""
    may_rule = not entropy.shadow or rule_under_pressure(pressure)
    return entropy.enabled and may_rule and entropy.holdout_share > 0


def rule_under_pressure(pressure: Iterable[PressurePolicy]) -> bool:
    """Return whether one of these entries puts the entropy rules in force."""
    return any(entry.entropy_in_force and not entry.shadow for entry in pressure)


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
        "margin": bool(entropy.margin_threshold_nats),
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


def in_shadow(policy: Policy) -> Policy:
    """Return the policy with its entropy rules in shadow, also those of overrides, and under pressure."""
    overrides = tuple(map(_shadowed, policy.override))
    pressure = tuple(entry.model_copy(update={"entropy_in_force": False}) for entry in policy.pressure)
    made: Policy = _shadowed(policy).model_copy(update={"override": overrides, "pressure": pressure})
    return made


def _shadowed(part: Any) -> Any:
    """Return a policy or an override with its entropy section in shadow, unless the override leaves that open."""
    if part.entropy.shadow is None:
        return part
    return part.model_copy(update={"entropy": part.entropy.model_copy(update={"shadow": True})})
