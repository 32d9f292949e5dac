"""The policy fields that earlier versions had, and what an operator uses instead of each.

A policy that sets such a field is refused with an error that says so. Policies from before the removal are read without
the field: those in a store or a recording, and those of older clients, which send every field with its default. The
functions are pure and may run on any thread.
"""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from meridian_control.policy.validation_errors import dotted, rendered

Loc = tuple[int | str, ...]


class Removed(NamedTuple):
    """A field that was removed.

    until: the last version that has the field. number: its number in the messages of its section and of the section's
    override, which reserve the number. default: its value if a policy does not set it.
    """

    until: str
    number: int
    default: Any
    instead: str

    @property
    def message(self) -> str:
        return f"was removed after version {self.until}: {self.instead}"


_LOOP = "loop.min_rounds and loop.min_tokens end exact loops, scheduler.max_think_tokens ends other thinking"
_EAT = "use entropy.eat_level_threshold_nats, whose rule reads the same probes"
_MARGIN = "use entropy.eat_level_threshold_nats, whose rule saves more, or entropy.rank_conditions, which need no probe"
_GATE = "leave it out, as plain EAT saves more, or use entropy.eat_probe_max_rank"
_MARGINS = "leave it out, as no rule reads the margin; meridianctl calibrate describes the signals that rules read"
# The removed fields by section and name. An entry goes when no supported version has the field any more.
REMOVED = {
    ("loop", "entropy_collapse_ratio"): Removed("0.3.0", 5, 0.5, _LOOP),
    ("loop", "near_repeated_tokens"): Removed("0.3.0", 6, 0, _LOOP),
    ("loop", "near_shadow"): Removed("0.3.0", 7, True, _LOOP),
    ("entropy", "same_answer_samples"): Removed("0.3.0", 17, 0, _EAT),
    ("entropy", "margin_threshold_nats"): Removed("0.3.0", 15, 0.0, _MARGIN),
    ("entropy", "eat_probe_max_margin_nats"): Removed("0.3.0", 19, 0.0, _GATE),
    ("entropy", "margin_reference"): Removed("0.3.0", 32, [], _MARGINS),
}


class RemovedValue(NamedTuple):
    """A removed field that a policy sets: its path, as the places of its value in nested tables, and its value."""

    loc: Loc
    value: Any
    removed: Removed

    @property
    def is_default(self) -> bool:
        """Whether the value is the field's old default, so that the policy means the same without it."""
        return bool(self.value == self.removed.default)

    def __str__(self) -> str:
        return f"{dotted(self.loc)} = {rendered(self.value)} has no effect: it {self.removed.message}"


def removed_at(loc: Loc) -> Removed | None:
    """Return the removed field at a path, None if no field at this path was removed.

    A section's field has the same entry in the section, in each entry of a list, in each model, and in an override.
    """
    names = [part for part in loc if isinstance(part, str)]
    if names[:1] == ["override"]:
        del names[0]
    if names[:1] == ["model"]:
        del names[1:2]
    return REMOVED.get((names[0], names[1])) if len(names) == 2 else None


def named(section: str, field: Any) -> tuple[str, Any] | None:
    """Return name and value of a removed field that a message of a section has; None for any other unknown field."""
    for (of, name), removed in REMOVED.items():
        if of == section and removed.number == field.field_number:
            return name, _value(field, removed.default)
    return None


def _value(field: Any, default: Any) -> Any:
    """Return an unknown field's value, as a value of the type that the field's default has; a list of messages becomes
    a list of an ellipsis."""
    if isinstance(default, float) and field.wire_type == 1:
        (number,) = struct.unpack("<d", struct.pack("<Q", field.data))
        return number
    if isinstance(default, bool) and field.wire_type == 0:
        return bool(field.data)
    if isinstance(default, int) and field.wire_type == 0:
        # A negative number is sent as its complement in 64 bits.
        return field.data - (1 << 64 if field.data >> 63 else 0)
    if isinstance(default, list):
        return ["…"]
    return field.data


def without_removed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[RemovedValue]]:
    """Return a policy's plain values without the removed fields, and these fields."""
    removed_fields: list[RemovedValue] = []
    return _kept(values, (), removed_fields), removed_fields


def _kept(value: Any, loc: Loc, removed_fields: list[RemovedValue]) -> Any:
    """Return a value of a policy without the removed fields below it, and add these to `removed_fields`."""
    if isinstance(value, list):
        return [_kept(entry, (*loc, index), removed_fields) for index, entry in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for name, below in value.items():
        if (removed := removed_at((*loc, name))) is not None:
            removed_fields.append(RemovedValue((*loc, name), below, removed))
        else:
            kept[name] = _kept(below, (*loc, name), removed_fields)
    return kept
