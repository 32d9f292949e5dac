"""What a rule that was found by itself is in a policy: an override for one traffic. Functions are pure."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from meridian_control.policy.model import MAX_OVERRIDES, Override
from meridian_control.rollout.plan import Plan, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meridian_control.capabilities.self_calibration.learner import Rule
    from meridian_control.policy.model import Policy, Who

AUTHOR = "meridian-self-calibration"
# A rollout on at least so many engines begins with half of them; a step of a smaller one might select no engine.
HALVED_FROM, BAKE_S = 8, 600.0
# Fields of the entropy section that an override of a person may set for all requests of a traffic, because the rule
# holds with any value as it was proved with that value.
KEEPS_RULE = frozenset(
    {
        "enabled",
        "self_calibration",
        "eat_probe_interval_tokens",
        "eat_probe_placement",
        "eat_probe_max_rank",
        "eat_hold_ms",
    }
)


def override_of(traffic: str, rule: Rule) -> Override:
    """Return the override that puts a rule in force, and no other rule of the entropy section with it."""
    others = {"rpdi_threshold": 0.0, "give_up_tokens": 0}
    values = {"enabled": True, "shadow": False, **others, **rule.entropy}
    given = {"traffic": traffic, "entropy": values, "scheduler": {"min_think_tokens": rule.floor_tokens}}
    return Override.model_validate(given)


def with_override(policy: Policy, traffic: str, override: Override | None) -> Policy:
    """Return a policy with this override as the only one for the traffic, or with none. Overrides that people wrote
    come later, so that they win."""
    others = tuple(each for each in policy.override if each.traffic != traffic)
    mine = (override,) if override is not None else ()
    return policy.model_copy(update={"override": (*mine, *others)})


def has(policy: Policy, override: Override) -> bool:
    return [each for each in policy.override if each.traffic == override.traffic] == [override]


def ruled(policy: Policy) -> list[str]:
    """Return the traffics for which a policy has a rule that was found by itself, in force or not."""
    return [override.traffic for override in policy.override if override.traffic]


def probing(policy: Policy, own: Policy, who: Who, conflicts: Sequence[str] = ()) -> str:
    """Return how requests are probed, as a text that differs where EAT would. own: the policy that holds for them
    without a rule that was found by itself. conflicts: those of a whole traffic, of which some requests are probed
    otherwise."""
    entropy, model = own.entropy, policy.model.get(who.model)
    placed = entropy.eat_probe_interval_tokens, entropy.eat_probe_placement, entropy.eat_probe_max_rank
    prefix = model.eat_answer_prefix if model is not None else ""
    return json.dumps([*placed, own.scheduler.min_think_tokens, prefix, *conflicts])


def obstacle(own: Policy, conflicts: Sequence[str]) -> str:
    """Return why no rule can be found or stay in force under a policy; empty if one can. own: the policy that holds for
    the traffic without a rule that was found by itself. conflicts: those of the traffic."""
    if not own.entropy.holdout_share:
        return "entropy.holdout_share is 0, so no request is recorded"
    if own.entropy.rank_conditions:
        return "entropy.rank_conditions would come into force with the rule, and cannot be switched off for one traffic"
    if conflicts:
        return f"{conflicts[0]}, so that the rule would not hold as it is proved"
    if len(own.override) >= MAX_OVERRIDES:
        return f"the policy has {MAX_OVERRIDES} overrides, and no room for that of a rule"
    return ""


def conflicts(own: Policy, who: Who) -> list[str]:
    """Return in words which values of people's overrides would change a rule, or the probes of some requests only."""
    found = []
    for override in own.override:
        globs = (override.model, who.model), (override.slo_class, who.slo_class)
        if override.traffic or not all(not glob or fnmatchcase(name, glob) for glob, name in globs):
            continue
        for_some = override.tenant or override.effort or override.engine_labels
        kept, changes = frozenset[str]() if for_some else KEEPS_RULE, override.changes("entropy")
        # Requests without entropy rules are not recorded, and have no rule.
        names = [f"entropy.{name}" for name in changes if name not in kept and changes != {"enabled": False}]
        names += ["scheduler.min_think_tokens"] * ("min_think_tokens" in override.changes("scheduler"))
        if names:
            keys = ("model", "tenant", "slo_class", "effort", "engine_labels")
            facts = ", ".join(f"{key} {_spelled(value)}" for key in keys if (value := getattr(override, key)))
            found.append(f"the override for {facts or 'all requests'} sets {', '.join(names)}")
    return found


def _spelled(value: str | Mapping[str, str]) -> str:
    return value if isinstance(value, str) else " ".join(f"{name}={label}" for name, label in value.items())


def plan_for(engines: int) -> Plan:
    """Return the plan of a rule's rollout on so many engines."""
    steps = (50.0, 100.0) if engines >= HALVED_FROM else (100.0,)
    return Plan(step=tuple(Step(percent=percent, bake_s=BAKE_S) for percent in steps))
