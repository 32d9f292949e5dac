"""Converts a policy between its forms: TOML text, file and protobuf message.

The module knows no policy field. The module's functions may run on any thread and are pure, except that
`load_config`, `load_to_apply`, `load_as`, `load_tables` and `find` read files.
"""

import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_origin

import tomli_w
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from google.protobuf.unknown_fields import UnknownFieldSet
from meridian.v1 import policy_pb2
from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from meridian_control.common.environment import config_home
from meridian_control.common.errors import PolicyError, Violation
from meridian_control.policy.model import NEW_FIELDS, NEW_SECTIONS, Policy
from meridian_control.policy.removed_fields import RemovedValue, named, removed_at, without_removed
from meridian_control.policy.section import Section
from meridian_control.policy.validation_errors import Place, dotted, line_of, quoted, syntax_message, violation

FILE_NAME = "meridian.toml"
STANDARD_INPUT = Path("-")
# The fields of a policy that hold sections by name.
SECTIONS_BY_NAME = {name for name, info in Policy.model_fields.items() if get_origin(info.annotation) is Mapping}

Schema = TypeVar("Schema", bound=Section)


def parse_toml(text: str, source: str = "<string>") -> Policy:
    """Read a policy from TOML text; `source` names the text in syntax errors. Raises PolicyError."""
    return parse_toml_as(Policy, text, source)


def parse_toml_as(schema: type[Schema], text: str, source: str = "<string>") -> Schema:
    """Read TOML text that has the given schema. Raises PolicyError."""
    return _validate(schema, _tables(text, source))


def _place(text: str, source: str) -> Callable[[Place], str]:
    """Return a function that names the line of a value in TOML text, as compilers do."""

    def name(loc: Place) -> str:
        line = line_of(text, loc)
        return f"{source}:{line}: " if line else f"{source}: "

    return name


def parse_stored_toml(text: str) -> tuple[Policy, list[RemovedValue]]:
    """Read a policy that this version or an earlier one has stored; return it without the fields that were removed
    since, and those of them that had another value than their default. Raises PolicyError."""
    kept, removed = without_removed(_tables(text, "<string>"))
    return _validate(Policy, kept), [field for field in removed if not field.is_default]


def _tables(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError([Violation(f"{source}:", syntax_message(error, text))]) from error


def load_config(path: str | os.PathLike[str]) -> Policy:
    """Read a policy file. Raises PolicyError, which lists every bad field, also if the file cannot be read."""
    return load_as(Policy, Path(path))


def load_to_apply(path: Path) -> Policy:
    """Read a policy file whose policy is to replace another one. Raises PolicyError as `load_config` does, and also if
    the file sets no field, as after a pipe whose first program has failed."""
    policy = load_config(path)
    if not policy.model_fields_set:
        hint = "a section's header alone, such as [scheduler], gives all fields their defaults"
        raise PolicyError([Violation(f"{path}:", f"has no fields; {hint}")])
    return policy


def load_as(schema: type[Schema], path: Path) -> Schema:
    """Read a TOML file, or standard input for the path -, that has the given schema. Raises PolicyError, which names
    the line of each bad field, also if the file cannot be read."""
    text = _read(path)
    return _validate(schema, _tables(text, str(path)), _place(text, str(path)))


def load_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file, or standard input for the path -, and return its fields by section, unchecked. Raises
    PolicyError, also if the file has no fields."""
    if not (tables := _tables(_read(path), str(path))):
        raise PolicyError([Violation(f"{path}:", "has no fields")])
    return tables


def _read(path: Path) -> str:
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
        # Some editors write a byte order mark, which is no part of the text.
        return text.removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PolicyError([Violation(f"{path}:", f"cannot be read: {reason}")]) from error


def with_fields(values: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return values by section with those of texts such as `scheduler.max_think_tokens=4000`. A value that is no TOML
    is a string. Raises PolicyError."""
    given: dict[str, str] = {}
    for field in fields:
        name, _, value = field.partition("=")
        section = _section(name, value) if "." in name and value else None
        if section is None:
            raise PolicyError([Violation(field, "must be FIELD=VALUE, for example scheduler.max_think_tokens=4000")])
        if given.setdefault(name, value) != value:
            raise PolicyError([Violation(name, f"must have one value; got {given[name]} and {value}")])
        # A name may go on into a field's own table, of which it changes one entry.
        values = merged(values, section, _depth(tomllib.loads(f"{name} = 0")) - 1)
    return dict(values)


def _section(name: str, value: str) -> dict[str, Any] | None:
    """Return a field with its value by section; None if the name is no TOML."""
    for written in (value, quoted(value)):
        with suppress(ValueError):
            return tomllib.loads(f"{name} = {written}")
    return None


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value.values())) if isinstance(value, Mapping) else 0


def merged(values: Mapping[str, Any], changes: Mapping[str, Any], levels: int = 1) -> dict[str, Any]:
    """Return values with changes, field by field; a field's value is replaced as a whole, also if it is a table.

    levels: least number of levels of tables in a section whose other entries are kept.
    """
    kept = {name: max(levels, 2 if name in SECTIONS_BY_NAME else 1) for name in changes}
    return dict(values) | {name: _united(values.get(name), change, kept[name]) for name, change in changes.items()}


def _united(value: Any, change: Any, levels: int) -> Any:
    if not (levels and isinstance(value, Mapping) and isinstance(change, Mapping)):
        return change
    return dict(value) | {name: _united(value.get(name), entry, levels - 1) for name, entry in change.items()}


def parse_values(values: Mapping[str, Any]) -> Policy:
    """Return the policy with these fields by section. Raises PolicyError."""
    return _validate(Policy, values)


def to_values(policy: Policy) -> dict[str, Any]:
    """Return each field of a policy by section."""
    return policy.model_dump(mode="json", exclude_none=True)


def check_extensions(
    policy: Policy, schemas: Mapping[str, type[Section]], kept: Mapping[str, Any] | None = None
) -> None:
    """Raise PolicyError if an extension does not fit its schema, or is not among the schemas, by name, nor among the
    extensions `kept` with the same values. None for `kept` lets all extensions without a schema be."""
    violations = []
    for name, values in policy.extension.items():
        path = dotted(("extension", name))
        if (schema := schemas.get(name)) is None:
            if kept is not None and kept.get(name) != values:
                violations.append(Violation(path, "is the section of no known capability"))
            continue
        try:
            extension(policy, name, schema)
        except ValidationError as error:
            broken = (violation(schema, details) for details in error.errors())
            violations += [replace(one, path=f"{path}.{one.path}") for one in broken]
    if violations:
        raise PolicyError(violations)


def extension(policy: Policy, name: str, schema: type[Schema]) -> Schema:
    """Return the section `extension.NAME` of a policy, with defaults for absent fields."""
    # As JSON, a list may stand for a tuple or a set, and a string for a value of an enum.
    return schema.model_validate_json(to_json(policy.extension.get(name, {})))


def find(explicit: Path | None) -> Path | None:
    """Return the policy file to use: `explicit`, else ./meridian.toml, else the user's file; None if none exists.

    Raises PolicyError if `explicit` is not a file.
    """
    if explicit is not None:
        if not explicit.is_file():
            raise PolicyError([Violation(f"{explicit}:", "is not a file")])
        return explicit
    home = config_home()
    candidates = [Path(FILE_NAME), *([home / "meridian" / FILE_NAME] if home is not None else [])]
    return next((path for path in candidates if path.is_file()), None)


def from_proto(message: policy_pb2.Policy) -> Policy:
    """Validate a policy message; absent fields get their defaults. Raises PolicyError, also for unknown fields, and for
    removed fields, unless they have their old default, which older clients send with every policy."""
    policy, removed = from_older_proto(message)
    if removed:
        raise PolicyError(Violation(dotted(field.loc), field.removed.message) for field in removed)
    return policy


def from_older_proto(message: policy_pb2.Policy) -> tuple[Policy, list[RemovedValue]]:
    """Validate a policy message that an earlier version may have made; return it without the fields that were removed
    since, and those of them that had another value than their default. Raises PolicyError, also for unknown fields."""
    kept, removed = without_removed(_plain(message))
    return _validate(Policy, kept), [field for field in removed if not field.is_default]


def from_proto_as(schema: type[Schema], message: Message) -> Schema:
    """Validate a message against the given schema. Raises PolicyError, also for unknown fields."""
    return _validate(schema, _plain(message))


def to_proto(policy: Policy) -> policy_pb2.Policy:
    """Return the policy's message with every field set."""
    return json_format.ParseDict(to_values(policy), policy_pb2.Policy())


def to_toml(policy: Policy) -> str:
    """Return TOML text with every field; `parse_toml` reads the text back as an equal policy."""
    return tomli_w.dumps(to_values(policy))


def to_stored_toml(policy: Policy) -> str:
    """Return TOML text that the two previous versions of the control plane can read too, unless the policy sets new
    fields.

    Both versions read one database during an upgrade, and the older one reads it again if the upgrade is rolled back.
    An older version refuses fields that it does not know, so the text has a new field only if its value is not the
    default. `parse_toml` reads the text back as an equal policy.
    """
    values, defaults = to_values(policy), to_values(Policy())
    # The default of every field of an override is that the override leaves the field alone, in each version.
    values["override"] = [entry.model_dump(mode="json", exclude_defaults=True) for entry in policy.override]
    for section, fields in NEW_FIELDS.items():
        stored = getattr(policy, section)
        entries = (
            zip(stored, values[section], strict=True) if isinstance(stored, tuple) else [(stored, values[section])]
        )
        for entry, entry_values in entries:
            for field in set(fields) - _changed(entry):
                entry_values.pop(field, None)
    for section in NEW_SECTIONS:
        if values[section] == defaults[section]:
            del values[section]
    return tomli_w.dumps(values)


def _changed(entry: Section) -> set[str]:
    """Return the names of the fields whose values are not their defaults."""
    return set(entry.model_dump(exclude_defaults=True))


def _plain(message: Message, section: str = "") -> dict[str, Any]:
    """Return a message's set fields by name, as plain Python values. Unlike in protobuf's JSON, NaN stays a number.

    section: name of the field that holds the message, by which the names of removed fields are known.
    """
    known = {field.name: _plain_value(field, value) for field, value in message.ListFields()}
    unknown = UnknownFieldSet(message)
    return known | dict(_unknown(section, unknown[index]) for index in range(len(unknown)))


def _unknown(section: str, field: Any) -> tuple[str, Any]:
    return named(section, field) or (f"field {field.field_number}", None)


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.is_repeated and not field.message_type.GetOptions().map_entry:
        return [_plain(entry, field.name) for entry in value]
    if field.message_type.GetOptions().map_entry:
        return {key: _plain_entry(entry, field.name) for key, entry in value.items()}
    return _plain(value, field.name)


def _plain_entry(entry: Any, name: str) -> Any:
    if isinstance(entry, Struct):
        return {key: _free(value) for key, value in entry.fields.items()}
    return _plain(entry, name) if isinstance(entry, Message) else entry


def _free(value: Value) -> Any:
    """Return the value of a free field. A whole number is an integer, because a Struct knows no integers."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {key: _free(entry) for key, entry in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_free(entry) for entry in value.list_value.values]
    if kind in (None, "null_value"):
        return None
    plain = getattr(value, kind)
    return int(plain) if kind == "number_value" and plain.is_integer() else plain


def _validate(
    schema: type[Schema], values: Mapping[str, Any], place: Callable[[Place], str] = lambda loc: ""
) -> Schema:
    """Return values as an object. place: says where a value comes from. Raises PolicyError."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        found = [(place(details["loc"]), _violation(schema, details)) for details in error.errors()]
        raise PolicyError(replace(one, where=where) for where, one in found) from None


def _violation(schema: type[Section], error: ErrorDetails) -> Violation:
    """Turn one validation error into a violation; a removed field gets a message that differs from that of a
    field that never existed."""
    if error["type"] == "extra_forbidden" and (removed := removed_at(error["loc"])) is not None:
        return Violation(dotted(error["loc"]), removed.message)
    return violation(schema, error)
