"""Compares two policies field by field, and explains the source of each value.

The module owns a policy's flat form (dotted path to value) and the spelling of values. The module knows nothing of
engines or storage. The module's functions are pure and may run on any thread.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meridian.v1 import policy_pb2

from meridian_control.policy.model import IN_OVERRIDES, Policy, Who, matches_globs
from meridian_control.policy.schema import ModelPolicy
from meridian_control.policy.shortening_schema import StagedEntry
from meridian_control.policy.validation_errors import dotted, quoted

DEFAULT, POLICY, REQUEST = "default", "policy", "request"
FLOOR, CAP = "scheduler.min_think_tokens", "scheduler.max_think_tokens"


@dataclass(frozen=True)
class Subject:
    """The engine or request that a policy is explained for.

    A subject has the facts that overrides match on, the engine's model, a request's own limits, and the revision in
    force on the engine, 0 before the engine has applied one. changed: the values under that revision that the control
    group or an entry changes for the request, by dotted path, each with the name of what changes it.
    """

    who: Who
    served_model: str
    own_floor_tokens: int | None = None
    own_cap_tokens: int | None = None
    revision: int = 0
    changed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


def diff(before: Policy, after: Policy) -> list[policy_pb2.PolicyChange]:
    """Return the fields in which two policies differ. Values are empty if the field is not set, as a model's default
    value is not."""
    old, new = _flat(before), _flat(after)
    differing = (path for path in old | new if old.get(path) != new.get(path))
    values = ((path, *(spelled(side[path]) if path in side else "" for side in (old, new))) for path in differing)
    return [policy_pb2.PolicyChange(path=path, before=was, after=now) for path, was, now in values]


def explain(policy: Policy, subject: Subject) -> list[policy_pb2.ExplainedValue]:
    """Return every field's value for one engine or request, as `Policy.of`, what changes it for the request and the
    request's own limits give it, with the fields of the budgets and pressure entries that match the request."""
    holds = policy.of(subject.who)
    model = policy.model.get(subject.served_model)
    values = _sections(holds) | dict(_model_values(subject.served_model, model or ModelPolicy()))
    unset = _sections(Policy()) | dict(_model_values(subject.served_model, ModelPolicy()))
    plain = values | _sections(policy)
    origins = {path: DEFAULT if plain[path] == unset.get(path) else POLICY for path in values}
    for index, override in enumerate(policy.override):
        if override.matches(subject.who):
            changed = _sections(override, IN_OVERRIDES)
            plain |= changed
            origins |= dict.fromkeys(changed, f"override[{index}]")
    if values[FLOOR] != plain[FLOOR]:
        # The floor was above the cap and was lowered to the cap, so its value has the cap's source.
        origins[FLOOR] = origins[CAP]
    for kind, index, entry in _shorteners(policy):
        if matches_globs(entry, subject.who):
            entry_values = _shortener_values(kind, index, entry)
            values, origins = values | entry_values, origins | dict.fromkeys(entry_values, POLICY)
    for path, (value, origin) in subject.changed.items():
        if path in values and values[path] != value:
            values[path], origins[path] = value, origin
    if subject.own_cap_tokens is not None and subject.own_cap_tokens < values[CAP]:
        values[CAP], origins[CAP] = subject.own_cap_tokens, REQUEST
    if subject.own_floor_tokens is not None and subject.own_floor_tokens > values[FLOOR]:
        values[FLOOR], origins[FLOOR] = subject.own_floor_tokens, REQUEST
    return [
        policy_pb2.ExplainedValue(path=path, value=spelled(value), origin=origins[path])
        for path, value in values.items()
    ]


def spelled(value: Any) -> str:
    """Spell a value on one line, as TOML does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted((key,))} = {spelled(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelled, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _flat(policy: Policy) -> dict[str, Any]:
    """Return the set fields by dotted path, without models' default values and overrides' empty patterns."""
    flat = _sections(policy)
    default = dict(_model_values("", ModelPolicy())).values()
    for name, model in policy.model.items():
        flat |= {path: v for (path, v), d in zip(_model_values(name, model), default, strict=True) if v != d}
    for index, override in enumerate(policy.override):
        flat |= dict(_leaves(("override", index), override.model_dump(mode="json", exclude_none=True)))
    for kind, index, entry in _shorteners(policy):
        flat |= _shortener_values(kind, index, entry)
    return flat


def _shorteners(policy: Policy) -> Iterator[tuple[str, int, StagedEntry]]:
    """Yield the budgets and pressure entries, each with its kind and its index."""
    yield from (("budget", index, budget) for index, budget in enumerate(policy.budget))
    yield from (("pressure", index, pressure) for index, pressure in enumerate(policy.pressure))


def _shortener_values(kind: str, index: int, entry: StagedEntry) -> dict[str, Any]:
    return dict(_leaves((kind, index), entry.model_dump(mode="json")))


def _sections(policy: Any, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the set fields by dotted path, without entries of lists and models; `names` limits the sections."""
    dumped = policy.model_dump(mode="json", exclude_none=True, exclude={"model", "override", "budget", "pressure"})
    values: dict[tuple[str, ...], Any] = {
        (section, field): value
        for section, fields in dumped.items()
        if names is None or section in names
        for field, value in fields.items()
    }
    for path in [path for path in values if path[0] == "extension" and values[path]]:
        # The fields of an extension's section count one by one.
        values |= {(*path, field): value for field, value in values.pop(path).items()}
    return {dotted(path): value for path, value in values.items()}


def _model_values(name: str, model: ModelPolicy) -> Iterator[tuple[str, Any]]:
    return ((dotted(("model", name, field)), value) for field, value in model.model_dump(mode="json").items())


def _leaves(loc: tuple[int | str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values below `loc` by dotted path. A list counts as one value; an empty pattern is left out."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves((*loc, key), entry)
    elif value != "" or "engine_labels" in loc:
        yield dotted(loc), value
