"""Reads repeated numeric fields of a protobuf message as arrays.

Iterating over a repeated field makes one Python object per number. The encoded message has the numbers of a packed
field side by side, so that NumPy reads them at once
(https://protobuf.dev/programming-guides/encoding/#packed). The module knows the encoding and no message. The code does
no I/O and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message
    from numpy.typing import NDArray

# Wire types of a field, in the low bits of its tag.
VARINT, FIXED64, DELIMITED, GROUP, END_GROUP, FIXED32 = range(6)
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
MORE, BITS = 0x80, 7

NOTHING = np.zeros(0, np.uint8)


def packed_fields(message: Message) -> dict[int, NDArray[np.uint8]]:
    """Return the encoded numbers of each packed field of a message, by field number.

    The message's own encoder writes each such field once and packed, in whatever form the sender had it. Fields that
    the message does not define may be among them, and an absent field is left out.
    """
    encoded = message.SerializeToString()
    line, fields, at, groups = np.frombuffer(encoded, np.uint8), dict[int, "NDArray[np.uint8]"](), 0, 0
    while at < len(encoded):
        tag, at = _varint(encoded, at)
        kind = tag & 7
        if kind == DELIMITED:
            length, at = _varint(encoded, at)
            if not groups:
                fields[tag >> 3] = line[at : at + length]
            at += length
        elif kind == VARINT:
            _, at = _varint(encoded, at)
        elif kind in (GROUP, END_GROUP):
            # Only a field that the message does not define can be a group.
            groups += 1 if kind == GROUP else -1
        else:
            at += FIXED_BYTES[kind]
    return fields


def _varint(encoded: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    number = shift = 0
    while (byte := encoded[at]) >= MORE:
        number |= (byte - MORE) << shift
        shift, at = shift + BITS, at + 1
    return number | byte << shift, at + 1


def floats(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of a packed field of type `float`, [numbers]."""
    return packed.view("<f4")


def integers(packed: NDArray[np.uint8], numbers: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of a packed field of an integer type or an enum, [numbers].

    numbers: the same field as the message has it. If each number takes one byte, the bytes are the numbers. Otherwise
    the message's own decoder is faster than NumPy up to some thousand numbers.
    """
    if len(packed) == len(numbers):
        return packed.astype(np.int64)
    return np.fromiter(numbers, np.int64, len(numbers))
