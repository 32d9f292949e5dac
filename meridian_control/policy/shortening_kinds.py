"""What in a policy shortens thinking, by kind; what the policy's author should be warned of; and the policy without a
kind that does harm.

The module knows no request, no usage and no measured value. All functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_control.common.harm_words import kind_text
from meridian_control.policy.schema import SchedulerPolicy
from meridian_control.policy.shortening_schema import floors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meridian_control.policy.model import Policy
    from meridian_control.policy.shortening_schema import StagedEntry


class Kind(NamedTuple):
    """A kind of shortening: entropy, soft_close, cap, loop, budget, pressure, or the name of an extension. name: that
    of the budget or of the pressure entry, empty for the other kinds."""

    kind: str
    name: str = ""

    @property
    def text(self) -> str:
        """The kind in words, as people read it."""
        return kind_text(*self)


ENTROPY, SOFT_CLOSE, CAP, LOOP = Kind("entropy"), Kind("soft_close"), Kind("cap"), Kind("loop")
# The cap of a policy that sets none. A cap shortens thinking only if it is lower.
DEFAULT_CAP: int = SchedulerPolicy.model_fields["max_think_tokens"].default


def kinds_for_request(own: Policy) -> frozenset[Kind]:
    """Return the kinds in force for a request, budgets and pressure aside. own: the policy that holds for it."""
    scheduler, acts = own.scheduler, acts_on_thinking(own)
    in_force = {
        ENTROPY: own.entropy.enabled and not own.entropy.shadow,
        SOFT_CLOSE: acts and scheduler.soft_think_tokens > 0,
        CAP: acts and scheduler.max_think_tokens < DEFAULT_CAP,
        LOOP: own.loop.enabled and not own.loop.shadow,
    }
    extensions = map(Kind, own.extensions_on(shadow=False))
    return frozenset([*(kind for kind, holds in in_force.items() if holds), *extensions])


def acts_on_thinking(policy: Policy) -> bool:
    """Whether caps, soft close, budgets and pressure have an effect, because their section is in force."""
    return policy.scheduler.enabled and not policy.scheduler.shadow


def may_shorten(own: Policy, entries: Iterable[StagedEntry]) -> bool:
    """Whether anything in force may shorten a request. own: the policy that holds for the request. entries: the budgets
    and pressure entries that match it."""
    staged_entries = tuple(entries)
    return bool(kinds_for_request(own)) or any(_in_force(own, entry) for entry in staged_entries)


def _in_force(own: Policy, entry: StagedEntry) -> bool:
    rules = own.entropy.enabled and getattr(entry, "entropy_in_force", False)
    return not entry.shadow and (acts_on_thinking(own) or rules)


def kinds_of(policy: Policy) -> list[Kind]:
    """Return all kinds that may shorten some request under a policy."""
    kinds: dict[Kind, None] = dict.fromkeys(kind for own in _variants(policy) for kind in kinds_for_request(own))
    if policy.entropy.enabled and any(entry.entropy_in_force and not entry.shadow for entry in policy.pressure):
        kinds[ENTROPY] = None
    for section in ("budget", "pressure"):
        kinds |= {Kind(section, e.name): None for e in getattr(policy, section) if _in_force(policy, e)}
    return sorted(kinds)


def _variants(policy: Policy) -> Iterator[Policy]:
    """Yield the policy, the policy with each override alone, and the policy with all overrides."""
    yield policy
    together = policy
    for override in policy.override:
        yield _with(policy, override)
        together = _with(together, override)
    if len(policy.override) > 1:
        yield together


def _with(policy: Policy, override: Any) -> Policy:
    names = ("scheduler", "entropy", "loop")
    changed = {name: getattr(policy, name).model_copy(update=override.changes(name)) for name in names}
    return policy.model_copy(update=changed)


def not_measured(policy: Policy) -> str:
    """Return why harm cannot be measured under a policy; empty if it can, or if nothing shortens thinking."""
    if not kinds_of(policy):
        return ""
    if not policy.entropy.holdout_share:
        return "entropy.holdout_share is 0, so no request is left unshortened"
    if not any(own.entropy.enabled for own in _variants(policy)):
        return "entropy.enabled is false, so no request is probed"
    return ""


def warnings(policy: Policy) -> list[str]:
    """Return what the author of a policy should know about the harm that its shortening may do."""
    texts = [f"harm is not measured: {why}"] if (why := not_measured(policy)) else []
    if not acts_on_thinking(policy) or not (calibrated := policy.scheduler.calibrated_cap_tokens):
        return texts
    below = f"below the {calibrated} that the policy's calibration found to be enough"
    caps = {"scheduler.max_think_tokens": policy.scheduler.max_think_tokens}
    for index, override in enumerate(policy.override):
        values: Any = override.scheduler
        caps[f"override[{index}].scheduler.max_think_tokens"] = values.max_think_tokens
    texts += [f"{path} is {cap}, {below}" for path, cap in caps.items() if cap is not None and cap < calibrated]
    for section in ("budget", "pressure"):
        for entry in getattr(policy, section):
            floor = max(floors_of(entry)[0], policy.scheduler.min_think_tokens)
            if not entry.shadow and floor < calibrated:
                texts.append(f"{section} {entry.name} may cut thinking to {floor} tokens, {below}")
    return texts


def without(policy: Policy, kind: Kind) -> Policy:
    """Return the policy with a kind of shortening withdrawn, also in overrides: the entropy rules and the loop rules, a
    budget or a pressure entry in shadow, or soft close off. An extension goes into shadow if its section says that it
    is not there, and else goes altogether. A cap is not withdrawn, because engines may need it."""
    if kind == ENTROPY:
        pressure = tuple(entry.model_copy(update={"entropy_in_force": False}) for entry in policy.pressure)
        return _changed(policy, "entropy", "shadow", True).model_copy(update={"pressure": pressure})
    if kind == LOOP:
        return _changed(policy, "loop", "shadow", True)
    if kind == SOFT_CLOSE:
        return _changed(policy, "scheduler", "soft_think_tokens", 0)
    if (values := policy.extension.get(kind.kind)) is not None:
        shadowed = {kind.kind: {**values, "shadow": True}} if "shadow" in values else {}
        others = {name: values for name, values in policy.extension.items() if name != kind.kind}
        return policy.model_copy(update={"extension": others | shadowed})
    if kind.kind not in ("budget", "pressure"):
        return policy
    entries = tuple(
        entry.model_copy(update={"shadow": True}) if entry.name == kind.name else entry
        for entry in getattr(policy, kind.kind)
    )
    return policy.model_copy(update={kind.kind: entries})


def _changed(policy: Policy, section: str, field: str, value: bool | int) -> Policy:
    """Return the policy with another value of a field, also in the overrides that set the field."""

    def changed(part: Any) -> Any:
        if getattr(getattr(part, section), field) is None:
            return part
        return part.model_copy(update={section: getattr(part, section).model_copy(update={field: value})})

    changed_policy: Policy = changed(policy)
    return changed_policy.model_copy(update={"override": tuple(map(changed, policy.override))})
