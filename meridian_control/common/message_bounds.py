"""Bounds how much work it makes to parse a message, before it is parsed.

An entry of two bytes takes hundreds once it is parsed, and protobuf parses a message in one piece. So a message within
gRPC's bound of bytes could stop the event loop for seconds and take more memory than the process may have. The
functions walk through the tags of a message and read no values. All functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Messages of at most this many bytes make little work.
SMALL_BYTES = 64 << 10
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def fields(given: bytes, begin: int, end: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field's content between two places of a message, at most `most` fields.

    Raises DecodeError where the bytes are no message.
    """
    at = begin
    try:
        while at < end and most:
            most -= 1
            tag = given[at]
            at += 1
            if tag > 127:
                tag, at = _varint(given, at - 1)
            kind, start = tag & 7, at
            if kind == DELIMITED:
                size = given[at]
                at += 1
                if size > 127:
                    size, at = _varint(given, at - 1)
                start = at
                at += size
            elif kind == VARINT:
                while given[at] > 127:
                    at += 1
                at += 1
            elif kind in FIXED_BYTES:
                at += FIXED_BYTES[kind]
            else:
                # Groups, which no message of the contract has.
                raise DecodeError("unknown kind of field")
            if at > end:
                raise DecodeError("a field is longer than the message")
            yield tag >> 3, start, at
    except IndexError:
        raise DecodeError("the message ends within a field") from None


def _varint(given: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = given[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("a number has too many bytes")
