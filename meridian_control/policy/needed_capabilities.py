"""Finds the fields of a policy that need a capability which an engine lacks.

A field needs a capability if its section is in force (enabled, not in shadow) and the field differs from its default.
An entropy rule needs a capability if the rule can fire, and a pool of `disagg` needs one of each of its engines. A
limit of the section `engine` needs an engine that can change it. The default policy needs none, so it works on every
engine. An engine that lacks a needed capability keeps its policy, because obeying half of the new policy would be
worse. All functions are pure.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian.v1 import agent_pb2

from meridian_control.policy.effects import eat_may_end
from meridian_control.policy.model import Who
from meridian_control.policy.shortening_schema import PressurePolicy

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from meridian_control.policy.disagg_schema import DisaggPolicy
    from meridian_control.policy.model import Override, Policy
    from meridian_control.policy.schema import EntropyPolicy, KvMemoryPolicy, LoopPolicy, SchedulerPolicy
    from meridian_control.policy.shortening_schema import StagedEntry

NEEDS = {
    "scheduler": {
        "strategy": "dispatch",
        "think_tpot_budget_ms": "dispatch",
        "output_tpot_budget_ms": "dispatch",
        "think_batch_multiplier": "dispatch",
        "min_prefill_tokens": "dispatch",
        "long_think_tokens": "dispatch",
        "max_think_tokens": "force_end",
        "answer_reserve_tokens": "force_end",
        "answer_reserve_for": "force_end",
        "soft_think_tokens": "token_entropy",
        "empty_answer_extension_tokens": "eat_probe",
    },
    "kv_memory": {"think_phase_memory_fraction": "dispatch"},
}

# Signs of a glob.
GLOB = re.compile(r"[*?[]")
# Field of Hello with the engine's own reason for lacking a capability.
REASONS = {"preempt": "no_preempt", "hand_over": "no_hand_over", "answer_handed_over": "no_answer_handed_over"}


def missing(policy: Policy, hello: agent_pb2.Hello) -> str:
    """Describe, for people, the fields that need capabilities which this engine lacks; empty if there are none."""
    answers = _answers_of(policy)
    key = _read_of(hello, answers.label_names)
    if (answer := answers.by_engine.get(key)) is None:
        if len(answers.by_engine) >= MAX_ANSWERS:
            answers.by_engine.clear()
        answer = answers.by_engine[key] = _missing(policy, hello)
    return answer


class _Answers(NamedTuple):
    """The answers of `missing` for one policy, by what is read of an engine's Hello. An answer takes hundreds of
    milliseconds for a policy with many overrides, and the engines of a fleet are much alike.

    label_names: names of the labels that the policy reads.
    """

    policy: Policy
    label_names: frozenset[str]
    by_engine: dict[bytes, str]


# The answers for the newest policies, which are the policy in force and the candidate of a rollout.
_kept: list[_Answers] = []
MAX_POLICIES, MAX_ANSWERS = 2, 256


def _answers_of(policy: Policy) -> _Answers:
    for answers in _kept:
        if answers.policy is policy:
            return answers
    selectors = policy.disagg.thinking_pool, policy.disagg.answering_pool, *(o.engine_labels for o in policy.override)
    _kept.append(_Answers(policy, frozenset().union(*selectors), {}))
    del _kept[:-MAX_POLICIES]
    return _kept[-1]


def _read_of(hello: agent_pb2.Hello, label_names: frozenset[str]) -> bytes:
    """Return all that this module reads of a Hello, of its labels those with these names."""
    read = agent_pb2.Hello(
        model=hello.model,
        model_fingerprint=hello.model_fingerprint,
        labels={name: hello.labels[name] for name in label_names if name in hello.labels},
        capabilities=hello.capabilities,
        engine_limits=hello.engine_limits,
        **{field: getattr(hello, field) for field in REASONS.values()},
    )
    return read.SerializeToString(deterministic=True)


def _missing(policy: Policy, hello: agent_pb2.Hello) -> str:
    lacking: dict[str, dict[str, None]] = {}
    for path, capability in _asked(policy, hello):
        if not getattr(hello.capabilities, capability):
            lacking.setdefault(capability, {})[path] = None
    unmet = [
        f"the engine lacks {name}, needed for {', '.join(paths)}{_reason(hello, name)}"
        for name, paths in lacking.items()
    ]
    return "; ".join([*unmet, *_fixed_limits(policy, hello)])


def _reason(hello: agent_pb2.Hello, capability: str) -> str:
    reason = getattr(hello, REASONS[capability]) if capability in REASONS else ""
    return f": {reason}" if reason else ""


def _fixed_limits(policy: Policy, hello: agent_pb2.Hello) -> Iterator[str]:
    """Describe the limits that the policy sets and this engine cannot change."""
    for name in policy.engine_limits(hello.labels):
        known = hello.engine_limits.HasField(name)  # type: ignore[arg-type]
        limit: agent_pb2.EngineLimit = getattr(hello.engine_limits, name)
        if refusal := limit.refusal if known else "its agent does not know this limit":
            yield f"the engine cannot change engine.{name}: {refusal}"


def _asked(policy: Policy, hello: agent_pb2.Hello) -> Iterator[tuple[str, str]]:
    """Yield each field with the capability that it needs, including the overrides that may apply on this engine."""
    for name in NEEDS:
        yield from _set(name, getattr(policy, name), name)
    yield from _rules("entropy", policy.entropy)
    yield from _loop_rule("loop", policy.loop)
    yield from _handovers(policy.disagg, hello)
    yield from _shorteners(policy, hello)
    yield from _preempts("preemption", policy.preemption, policy)
    # Overrides that switch the same rules on and off are checked together with others as one is.
    earlier: dict[Hashable, list[_Changes]] = {}
    for index, override in enumerate(policy.override):
        # The names of adapters are only known from their requests, so only the engine's own model is compared.
        is_of_model = not override.model or fnmatchcase(hello.model, override.model)
        if not (is_of_model and override.may_match_on(hello.labels, hello.model_fingerprint)):
            continue
        if changes := override.changes("scheduler"):
            own = policy.scheduler.model_copy(update=changes)
            asked = _set("scheduler", own, f"override[{index}].scheduler")
            yield from ((path, capability) for path, capability in asked if path.rpartition(".")[2] in changes)
        one = _Changes(_globs(override), override.changes("entropy"), override.changes("loop"))
        for together in (one, *_pairs(one, earlier.values())):
            if one.entropy:
                yield from _rules(f"override[{index}].entropy", policy.entropy.model_copy(update=together.entropy))
            loop = policy.loop.model_copy(update=together.loop)
            if one.loop and loop != policy.loop:
                yield from _loop_rule(f"override[{index}].loop", loop)
        # The fields that are set, each with whether it is any but 0 or false, decide which rules can fire.
        switched = tuple(frozenset((name, bool(value)) for name, value in changes.items()) for changes in one[1:])
        earlier.setdefault(switched, []).append(one)
        yield from _preempts(f"override[{index}].preemption", override.preemption, policy)


class _Changes(NamedTuple):
    """The changes of an override, and the globs that the names of a request must fit for them."""

    globs: dict[str, str]
    entropy: dict[str, Any]
    loop: dict[str, Any]


def _globs(override: Override) -> dict[str, str]:
    asked = {name: getattr(override, name) for name in ("model", "tenant", "slo_class", "effort")}
    globs = {name: glob for name, glob in asked.items() if glob}
    if override.traffic:
        who = Who.of_traffic(override.traffic)
        globs |= {"model": who.model, "slo_class": who.slo_class}
    return globs


def _pairs(one: _Changes, earlier: Iterable[list[_Changes]]) -> Iterator[_Changes]:
    """Yield the changes of an override with those of earlier ones that may hold for one request with it, of each list
    with the first one."""
    for alike in earlier:
        adds = alike[0].entropy.keys() - one.entropy.keys() or alike[0].loop.keys() - one.loop.keys()
        for before in alike if adds else ():
            if all(_meet(glob, before.globs[name]) for name, glob in one.globs.items() if name in before.globs):
                yield _Changes(one.globs, before.entropy | one.entropy, before.loop | one.loop)
                break


def _meet(one: str, other: str) -> bool:
    """Whether one name may fit both globs. Two that have signs are compared up to their first ones."""
    if not GLOB.search(one):
        return fnmatchcase(one, other)
    if not GLOB.search(other):
        return fnmatchcase(other, one)
    prefixes = GLOB.split(one)[0], GLOB.split(other)[0]
    return prefixes[0].startswith(prefixes[1]) or prefixes[1].startswith(prefixes[0])


def _set(name: str, section: SchedulerPolicy | KvMemoryPolicy, path: str) -> Iterator[tuple[str, str]]:
    if not section.enabled or section.shadow:
        return
    for field, capability in NEEDS[name].items():
        value = getattr(section, field)
        # An engine without the dispatch capability already behaves as strategy `stock` asks.
        if value != type(section).model_fields[field].default and (field, value) != ("strategy", "stock"):
            yield f"{path}.{field}", capability


def _rules(path: str, entropy: EntropyPolicy) -> Iterator[tuple[str, str]]:
    """Yield what each entropy rule that can fire needs, even if its fields have their defaults."""
    if not entropy.enabled or entropy.shadow:
        return
    gives_up = entropy.give_up_tokens and not entropy.give_up_shadow
    rules = (
        ("eat_level_threshold_nats", "eat_probe", eat_may_end(entropy)),
        ("rank_conditions", "token_entropy", entropy.rank_conditions),
        ("rpdi_threshold", "token_entropy", entropy.rpdi_threshold),
        ("give_up_tokens", "eat_probe", gives_up),
    )
    for field, capability, fires in rules:
        if fires:
            yield f"{path}.{field}", capability
            yield f"{path}.{field}", "force_end"


def _handovers(disagg: DisaggPolicy, hello: agent_pb2.Hello) -> Iterator[tuple[str, str]]:
    """Yield what the pools need to which the engine belongs."""
    if not disagg.enabled or disagg.shadow:
        return
    if disagg.thinks(hello.labels):
        yield "disagg.thinking_pool", "hand_over"
    if disagg.answers(hello.labels):
        yield "disagg.answering_pool", "answer_handed_over"


def _shorteners(policy: Policy, hello: agent_pb2.Hello) -> Iterator[tuple[str, str]]:
    """Yield what the budgets and pressure entries in force need that may match a request for the engine's own model."""
    caps = policy.scheduler.enabled and not policy.scheduler.shadow
    sections: dict[str, tuple[StagedEntry, ...]] = {"budget": policy.budget, "pressure": policy.pressure}
    for section, entries in sections.items():
        for index, entry in enumerate(entries):
            if entry.shadow or (entry.model and not fnmatchcase(hello.model, entry.model)):
                continue
            if caps:
                yield f"{section}[{index}].max_think_tokens", "force_end"
            if isinstance(entry, PressurePolicy) and entry.queueing_p99_ms:
                yield f"{section}[{index}].queueing_p99_ms", "queueing_time"
            if isinstance(entry, PressurePolicy) and entry.entropy_in_force:
                rules = _rules("entropy", policy.entropy.model_copy(update={"shadow": False}))
                for capability in sorted({capability for _, capability in rules}):
                    yield f"{section}[{index}].entropy_in_force", capability


def _preempts(path: str, section: Any, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield what a section needs that lets requests preempt others, in a policy or in an override."""
    if section.may_preempt and not policy.preemption.shadow:
        yield f"{path}.may_preempt", "preempt"


def _loop_rule(path: str, loop: LoopPolicy) -> Iterator[tuple[str, str]]:
    """Yield what the rule on loops needs."""
    if loop.enabled and not loop.shadow:
        yield f"{path}.enabled", "force_end"
