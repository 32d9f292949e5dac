"""Converts messages to plain data, as the status page has them. The functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

if TYPE_CHECKING:
    from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Convert a message to plain data with the proto's names and with zeros; NaN (not measured) is left out."""
    values = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _finite(values)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if v not in ("NaN", "Infinity", "-Infinity")}
    return [_finite(v) for v in value] if isinstance(value, list) else value
