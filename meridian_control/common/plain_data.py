"""Converts messages to plain data, as the status page and `meridianctl -o` have them, and gives attributes to messages.
The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict

if TYPE_CHECKING:
    from google.protobuf.message import Message


def same(source: Any, *names: str) -> dict[str, Any]:
    """Return attributes of an object by name, for a message whose fields have the same names."""
    return {name: getattr(source, name) for name in names}


def plain(message: Message) -> dict[str, Any]:
    """Return a message's fields by name: numbers as numbers, None for a number that is not known or not finite, and
    times and enumerations as text."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {name: _plain(value, message.DESCRIPTOR.fields_by_name[name]) for name, value in fields.items()}


def _plain(value: Any, field: Any) -> Any:
    """Return a value of protobuf's JSON form, which writes 64-bit integers and not-a-number as strings, as a number."""
    if isinstance(value, list):
        return [_plain(entry, field) for entry in value]
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        entry = kind.fields_by_name["value"]
        return {key: _plain(one, entry) for key, one in value.items()}
    if kind is not None and isinstance(value, dict) and not kind.full_name.startswith("google.protobuf."):
        return {name: _plain(one, kind.fields_by_name[name]) for name, one in value.items()}
    if not isinstance(value, str):
        return value
    if field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
        return int(value)
    return None if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE) else value
