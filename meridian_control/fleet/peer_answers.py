"""Reads the answers of other replicas, and raises an error for one that cannot be read or used.

gRPC returns None for an answer that cannot be parsed, and protobuf accepts times that no calendar has. A replica that
sends such answers is broken, of another version, or no replica: whoever can write to the database can name an address.
Other replicas believe what an answer says, but nothing that it says may end or stop them.
"""

from __future__ import annotations

from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp
from meridian.v1 import fleet_pb2

from meridian_control.common.message_bounds import SMALL_BYTES, fields
from meridian_control.common.opened_request import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message


def reading(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Return the channel for a stub whose calls raise ValueError for what cannot be read; streams are as before."""
    wrapped: Any = _Reading(channel)
    return wrapped  # type: ignore[no-any-return]


class _Reading:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.unary_stream, self.stream_unary = channel.unary_stream, channel.stream_unary
        self.stream_stream = channel.stream_stream

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Callable[[bytes], Message], **more: Any
    ) -> Callable[..., Any]:
        """Return a function that makes the call, as a stub uses it."""
        ask: Any = self._channel.unary_unary(method, request_serializer=request_serializer, **more)

        async def asked(request: Message, timeout: float | None = None) -> Message:
            return read(await ask(request, timeout=timeout), response_deserializer)

        return asked


def read(given: bytes, parse: Callable[[bytes], Message]) -> Message:
    """Return the message. Raises ValueError, also for a large one with over MAX_SLOTS entries, and DecodeError if it
    cannot be parsed."""
    if len(given) > SMALL_BYTES and sum(1 for _ in fields(given, 0, len(given), MAX_SLOTS + 1)) > MAX_SLOTS:
        raise ValueError(f"more than {MAX_SLOTS} entries")
    message = parse(given)
    _check(message)
    return message


@cache
def _with_times(descriptor: Descriptor) -> tuple[Any, ...]:
    """Return the fields of a message that are times, or messages that may have times."""
    return tuple(f for f in descriptor.fields if f.message_type is not None and _has_times(f.message_type, ()))


def _has_times(descriptor: Descriptor, above: tuple[str, ...]) -> bool:
    name = descriptor.full_name
    inner = (f.message_type for f in descriptor.fields if f.message_type is not None)
    return name == Timestamp.DESCRIPTOR.full_name or (
        name not in above and any(_has_times(field, (*above, name)) for field in inner)
    )


def _check(message: Any) -> None:
    """Raise ValueError if a time is out of range, or a number of an engine is none."""
    if isinstance(message, fleet_pb2.Engine):
        for field, value in message.ListFields():
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"{field.name} of an engine is {value}")
    if isinstance(message, Timestamp):
        try:
            message.ToDatetime()
        except (ValueError, OverflowError) as error:
            raise ValueError(f"a time is out of range: {error}") from None
        return
    for field in _with_times(message.DESCRIPTOR):
        if field.is_repeated:
            entries = getattr(message, field.name)
            for entry in entries.values() if field.message_type.GetOptions().map_entry else entries:
                _check(entry)
        elif message.HasField(field.name):
            _check(getattr(message, field.name))
