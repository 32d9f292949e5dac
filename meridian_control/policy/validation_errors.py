"""Turns the validation errors of a policy or a rollout plan into messages for people.

The module owns how paths and values are spelled, and knows no field. The module's functions are pure and may run on any
thread.
"""

import difflib
import json
import re
import tomllib
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meridian_control.common.errors import Violation
from meridian_control.policy.section import Section

MAX_VALUE_CHARS = 60
# The keys, and the places in lists, that lead to a value.
Place: TypeAlias = tuple[int | str, ...]


def violation(schema: type[Section], error: ErrorDetails) -> Violation:
    """Turn one validation error into a violation with the path of the bad value."""
    path = dotted(error["loc"])
    if error["type"] == "missing":
        return Violation(path, "must be set")
    try:
        return _violation(schema, error, path)
    except LookupError:
        # A section of a capability of one's own may have limits and types that no other section has.
        return Violation(path, error["msg"], rendered(error["input"]))


def _violation(schema: type[Section], error: ErrorDetails, path: str) -> Violation:
    if error["type"] == "extra_forbidden":
        known = _field(schema, error["loc"][:-1]).annotation
        fields = known.model_fields if isinstance(known, type) and issubclass(known, BaseModel) else {}
        near = difflib.get_close_matches(str(error["loc"][-1]), fields, 1)
        return Violation(path, "is not a known key" + (f"; did you mean {near[0]}?" if near else ""))
    return Violation(path, _requirement(schema, error), rendered(error["input"]))


def dotted(loc: Place) -> str:
    """Return a dotted path as TOML spells it: `model."Qwen/Qwen3-8B".think_end_token_ids[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in loc).removeprefix(".")


def _key(part: str) -> str:
    return part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else quoted(part)


def quoted(text: str) -> str:
    """Quote a string as TOML does. TOML quotes like JSON, but also escapes the character U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_TYPES = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "tuple_type": "a list",
    "model_type": "a table",
    "dict_type": "a table",
}
_LENGTHS = {
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_long": "at most {max_length} characters",
}


def _requirement(schema: type[Section], error: ErrorDetails) -> str:
    kind = error["type"]
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}"
    if kind in _LENGTHS:
        return "must have " + _LENGTHS[kind].format_map(error["ctx"])
    if kind == "literal_error":
        return f"must be {error['ctx']['expected']}"
    if kind.startswith(("greater_than", "less_than")):
        return f"must be {_range(_field(schema, error['loc']).metadata)}"
    return error["msg"]


def _range(metadata: list[Any]) -> str:
    """Return the interval that a field's limits allow. All numbers have a lower limit, and most an upper limit."""
    limits = {name: getattr(limit, name) for limit in metadata for name in ("gt", "ge", "le") if hasattr(limit, name)}
    exclusive = "gt" in limits
    low = limits["gt" if exclusive else "ge"]
    if "le" not in limits:
        return f"{'>' if exclusive else '>='} {low}"
    return f"in {'(' if exclusive else '['}{low}, {limits['le']}]"


def _field(schema: type[Section], loc: Place) -> FieldInfo:
    """Return the schema of the value at `loc`; an entry of a table or list has the schema of the entries."""
    field = FieldInfo.from_annotation(schema)
    for part in loc:
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields[str(part)]
        else:
            field = FieldInfo.from_annotation([arg for arg in get_args(annotation) if arg is not ...][-1])
        if type(None) in get_args(field.annotation):
            field = FieldInfo.from_annotation(get_args(field.annotation)[0])
    return field


def rendered(value: Any) -> str:
    """Spell a value as TOML does, shortened to MAX_VALUE_CHARS characters."""
    if isinstance(value, float):
        return repr(value)
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # The integer has more digits than Python prints.
        return "a very long value"
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def line_of(text: str, loc: Place) -> int | None:
    """Return the number of the line of TOML text that holds a value, or the innermost table around it; None if no line
    does."""
    here: Place = ()
    place: Place
    seen, best, depth = dict[Place, int](), None, 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)([^\[\]]+)\]", line)
        named = re.match(r"\s*([^=\[\]#]+)=", line)
        if header:
            place = ()
            for key in _keys(header[2]):
                # A key of an earlier array of tables stands for the array's newest table.
                place = (*place, seen[place], key) if place in seen else (*place, key)
            if header[1] == "[[":
                seen[place] = seen.get(place, -1) + 1
            here = place = (*place, seen[place]) if place in seen else place
        elif named:
            place = here + _keys(named[1])
        else:
            continue
        if len(place) > depth and loc[: len(place)] == place:
            best, depth = number, len(place)
    return best


def _keys(dotted_key: str) -> Place:
    """Split a key as TOML does."""
    try:
        table, keys = tomllib.loads(f"{dotted_key.strip()} = 0"), list[str]()
    except ValueError:
        return ()
    while isinstance(table, dict):
        ((key, table),) = table.items()
        keys.append(key)
    return tuple(keys)


def syntax_message(error: ValueError | RecursionError, text: str) -> str:
    """Return the position and the cause of an error in TOML text."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    message, _, position = str(error).removesuffix(")").rpartition(" (at ")
    if position == "end of document":
        position = f"line {text.count(chr(10)) + 1}, column {len(text) - text.rfind(chr(10))}"
    return f"{position}: {message}" if message else str(error)
