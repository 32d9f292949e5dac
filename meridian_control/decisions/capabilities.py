"""Finds what a policy asks of an engine that the engine cannot do.

Owns the rule: a field asks for a capability when its section is in force (enabled, not shadowed) and the field is set
to something other than its default; an entropy rule does when it can fire. The defaults ask for nothing, so they work
on every engine, which simply goes without. An engine that lacks what is asked for keeps the policy it has, rather than
obeying half of the new one. Pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian_control.policy.model import Override, Who

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import agent_pb2

    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import EntropyPolicy, KvMemoryPolicy, SchedulerPolicy

NEEDS = {
    "scheduler": {
        "strategy": "dispatch",
        "think_tpot_budget_ms": "dispatch",
        "output_tpot_budget_ms": "dispatch",
        "think_batch_multiplier": "dispatch",
        "min_prefill_tokens": "dispatch",
        "long_think_tokens": "dispatch",
        "max_think_tokens": "force_end",
        "soft_think_tokens": "token_entropy",
        "empty_answer_extension_tokens": "eat_probe",
    },
    "kv_memory": {"think_phase_memory_fraction": "dispatch"},
}


def missing(policy: Policy, hello: agent_pb2.Hello) -> str:
    """The demands of the policy that this engine cannot meet, for people to read; empty where it can be honoured."""
    lacking: dict[str, list[str]] = {}
    for path, capability in _asked(policy, hello):
        if not getattr(hello.capabilities, capability):
            lacking.setdefault(capability, []).append(path)
    return "; ".join(f"the engine lacks {name}, needed for {', '.join(paths)}" for name, paths in lacking.items())


def _asked(policy: Policy, hello: agent_pb2.Hello) -> Iterator[tuple[str, str]]:
    """Fields with the capability that each asks for; of overrides, those that may hold on this engine."""
    for name in NEEDS:
        yield from _set(name, getattr(policy, name), name)
    yield from _rules("entropy", policy.entropy)
    for index, override in enumerate(policy.override):
        # Adapters' names come with their requests only: of models, the engine's own counts.
        who = Who(hello.model, engine_labels=dict(hello.labels))
        if not Override(model=override.model, engine_labels=override.engine_labels).matches(who):
            continue
        if changes := _changes(override, "scheduler"):
            own = policy.scheduler.model_copy(update=changes)
            asked = _set("scheduler", own, f"override[{index}].scheduler")
            yield from ((path, capability) for path, capability in asked if path.rpartition(".")[2] in changes)
        if changes := _changes(override, "entropy"):
            yield from _rules(f"override[{index}].entropy", policy.entropy.model_copy(update=changes))


def _changes(override: Override, section: str) -> dict[str, Any]:
    return {name: value for name, value in getattr(override, section) if value is not None}


def _set(name: str, section: SchedulerPolicy | KvMemoryPolicy, path: str) -> Iterator[tuple[str, str]]:
    if not section.enabled or section.shadow:
        return
    for field, capability in NEEDS[name].items():
        value = getattr(section, field)
        # `stock` is what an engine does without dispatch.
        if value != type(section).model_fields[field].default and (field, value) != ("strategy", "stock"):
            yield f"{path}.{field}", capability


def _rules(path: str, entropy: EntropyPolicy) -> Iterator[tuple[str, str]]:
    """To be in force is not the default here: every rule that can fire asks for what it reads."""
    if not entropy.enabled or entropy.shadow:
        return
    eat = entropy.eat_level_threshold_nats and entropy.eat_ema_variance_threshold
    rules = (
        ("eat_level_threshold_nats", "eat_probe", eat),
        ("rank_conditions", "token_entropy", entropy.rank_conditions),
        ("rpdi_threshold", "token_entropy", entropy.rpdi_threshold),
    )
    for field, capability, fires in rules:
        if fires:
            yield f"{path}.{field}", capability
            yield f"{path}.{field}", "force_end"
