"""The numbers of packed fields are those that the message itself gives, however its sender encoded them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_control.common.packed_fields import floats, integers, packed_fields

SLOT, PHASE, ENTROPY = 1, 2, 3
UINT32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 127, 128, 2**14 - 1, 2**14])
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT = st.floats(width=32)


def varint(number: int) -> bytes:
    head, rest = number & 0x7F, number >> 7
    return bytes([head | 0x80]) + varint(rest) if rest else bytes([head])


@given(st.lists(UINT32), st.lists(INT32), st.lists(FLOAT))
def test_numbers_are_those_of_the_message(slots: list[int], phases: list[int], entropies: list[float]) -> None:
    columns = agent_pb2.TokenColumns(slot=slots, entropy_nats=entropies)
    columns.phase.extend(phases)  # type: ignore[arg-type]
    packed = packed_fields(columns)
    assert sorted(packed) == [n for n, told in ((SLOT, slots), (PHASE, phases), (ENTROPY, entropies)) if told]
    nothing = np.zeros(0, np.uint8)
    assert integers(packed.get(SLOT, nothing), columns.slot).tolist() == slots
    assert integers(packed.get(PHASE, nothing), columns.phase).tolist() == phases
    np.testing.assert_array_equal(floats(packed.get(ENTROPY, nothing)), np.array(entropies, np.float32))


def test_fields_that_are_not_packed_or_come_in_parts_are_read() -> None:
    """A sender may encode each number as a field of its own, or split a column."""
    told = b"\x08\x05" + b"\x0a\x02\xac\x02" + b"\x08\x07"
    columns = agent_pb2.TokenColumns.FromString(told)
    assert integers(packed_fields(columns)[SLOT], columns.slot).tolist() == [5, 300, 7]


@pytest.mark.parametrize(
    "unknown",
    [
        varint(99 << 3 | 0) + varint(2**40),
        varint(99 << 3 | 1) + bytes(8),
        varint(99 << 3 | 2) + varint(200) + bytes(200),
        varint(99 << 3 | 3) + varint(1 << 3 | 2) + b"\x01\x05" + varint(99 << 3 | 4),
        varint(99 << 3 | 5) + bytes(4),
    ],
    ids=["varint", "fixed64", "bytes", "group", "fixed32"],
)
def test_fields_of_a_newer_version_are_passed_over(unknown: bytes) -> None:
    told = agent_pb2.TokenColumns(slot=[1, 200]).SerializeToString()
    columns = agent_pb2.TokenColumns.FromString(told + unknown)
    assert integers(packed_fields(columns)[SLOT], columns.slot).tolist() == [1, 200]


def test_a_slot_with_another_wire_type_is_no_column() -> None:
    """The message keeps such a field as unknown; it gives the column no number."""
    columns = agent_pb2.TokenColumns.FromString(b"\x0d\x01\x00\x00\x00" + b"\x0a\x01\x05")
    assert list(columns.slot) == [5]
    assert integers(packed_fields(columns)[SLOT], columns.slot).tolist() == [5]
