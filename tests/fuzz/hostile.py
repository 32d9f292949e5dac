"""Hostile content in valid protobuf: messages are filled by their descriptors, from values that tend to cause bugs.

Some fields get sensible values, so that a message passes the first checks. Everything comes from one `random.Random`.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    import random

    from google.protobuf.message import Message

    M = TypeVar("M", bound=Message)

UNSIGNED = (0, 1, 2, 3, 7, 63, 64, 255, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
LONG = (*UNSIGNED, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
SIGNED = (0, 1, 2, 3, -1, 9, 99, 2**31 - 1, -(2**31))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 5.0, 20.0, 1e-45, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf)
DOUBLES = (*FLOATS, 5e-324, 1.7e308, -1.7e308)
TEXTS = ("", "a", "b", "m", "é", "\x00", "\x7f", "\u2028", "%s{}", "*" * 50, "x" * 300, "𝕏" * 700, "y" * 40_000)


def rows(*slots: int) -> bytes:
    """Return a thinking token of each of these slots, as TokenColumns.byte_columns has them."""
    n = len(slots)
    columns = (*slots, *[2] * n, *[0] * n, *[1] * n, *[0.5] * n, *[-3.0] * n, *[-0.1] * n)
    return struct.pack(f"<{4 * n}I{3 * n}f", *columns)


def numbers(kind: str, *values: float) -> bytes:
    """Return the bytes of some numbers, as a field of SparseColumns has them. kind: the name of their type in
    struct."""
    return struct.pack(f"<{len(values)}{kind}", *values)


# Tokens of three requests, one of which ends a sentence and two of which are measured.
SPARSE = agent_pb2.SparseColumns(
    slot=numbers("H", 0, 1, 0, 1, 0, 1, 2),
    phase=numbers("B", 2, 2, 2, 2, 2, 2, 3),
    flagged_row=numbers("I", 4),
    flags=numbers("I", 1),
    measured_row=numbers("I", 1, 4),
    signals=numbers("I", 5, 9) + numbers("f", 0.5, 0.1, -3.0, -2.0, -0.1, 0.0),
)

# Sensible values by field name.
SENSIBLE: dict[str, tuple[Any, ...]] = {
    "slot": (0, 1, 2, 3, 4, 5),
    "byte_columns": (b"", b"", rows(0), rows(0, 1, 1, 2, 3, 4)),
    "preempted": (0, 1, 2, 3),
    "resumed": (0, 1, 2, 3),
    "decision_id": tuple(range(1, 40)),
    "step": (1, 2, 3, 10, 50, 1 << 40),
    "steps": (1, 1, 1, 2, 0),
    "nonce": (1, 2, 3),
    "revision": (0, 1, 2, 3),
    "phase": (0, 1, 2, 3, 2, 3),
    "flags": (0, 0, 0, 32, 96, 1, 3, 11, 27, 259, 263),
    "rank": (0, 1, 256, 512, 544),
    "end_rank": (0, 1, 4, 500),
    "entropy_nats": (0.1, 0.5, 2.0, math.nan),
    "end_logprob_nats": (-0.1, -3.0, math.nan),
    "top_logprob_nats": (0.0, -0.1, math.nan),
    "eat_nats": (0.0, 0.01, 1.0, math.nan),
    "step_time_ms": (1.0, 5.0, 40.0),
    "max_think_tokens": (0, 1, 5, 30),
    "min_think_tokens": (0, 1, 5),
    "think_tokens": (0, 1, 20),
    "output_tokens": (0, 1, 20),
    "prompt_tokens": (0, 1, 20, 400),
    "outcome": (1, 2, 3, 4, 5, 6, 7),
    "lease_ms": (100, 3000, 30000),
    "report_interval_steps": (0, 1, 2),
    "think_per_step": (0, 1, 2),
    "output_per_step": (0, 1, 2),
    "max_skip_steps": (0, 1, 3),
    "prefill_tokens_per_step": (0, 1, 128),
    "hold_ms": (0, 5, 50),
    "think_start_token_ids": (1,),
    "think_end_token_ids": (2,),
    "num_blocks": (64,),
    "block_size_tokens": (16,),
    "request_id": ("r0", "r1", "r2"),
    "engine_id": ("a", "b"),
    "incarnation": ("1", "2"),
    "model": ("m", "a"),
    "tenant": ("", "a", "b"),
    "error": ("", "", "no such parser"),
}
POOLS: dict[int, tuple[Any, ...]] = {
    Field.TYPE_UINT32: UNSIGNED,
    Field.TYPE_UINT64: LONG,
    Field.TYPE_ENUM: SIGNED,
    Field.TYPE_INT32: SIGNED,
    Field.TYPE_INT64: SIGNED,
    Field.TYPE_FLOAT: FLOATS,
    Field.TYPE_DOUBLE: DOUBLES,
    Field.TYPE_STRING: TEXTS,
    Field.TYPE_BYTES: (b"", b"\x00" * 28, rows(5), b"\x00" * 29, b"\xff" * 280, rows(2**32 - 1, 65536), rows(1) * 5000),
}


class Hostile:
    """Fills messages. sense: how often a value is sensible, 0 to 1."""

    def __init__(self, rng: random.Random, sense: float) -> None:
        self.rng, self.sense = rng, sense

    def value(self, field: Field) -> Any:
        rng = self.rng
        if field.type == Field.TYPE_BOOL:
            return rng.random() < 0.5
        if rng.random() < self.sense:
            if field.name in SENSIBLE and isinstance(SENSIBLE[field.name][0], bytes) == (
                field.type == Field.TYPE_BYTES
            ):
                return rng.choice(SENSIBLE[field.name])
            return rng.choice(POOLS[field.type][:4])
        return rng.choice(POOLS[field.type])

    def fill(self, message: M, depth: int = 0) -> M:
        """Set about half of the message's fields, and at most one field of a oneof; return the message."""
        rng = self.rng
        # In most messages the columns have one length.
        rows = rng.choice((0, 1, 2, 5, 5, 40))
        together = rng.random() < self.sense
        columns = message.DESCRIPTOR.name.endswith("Columns") or message.DESCRIPTOR.name == "DispatchPlan"
        fields: Any = message.DESCRIPTOR.fields
        for field in fields:
            if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
                continue
            if rng.random() < 0.4 and not (columns and together):
                continue
            count = rows if columns and together else rng.choice((0, 1, 2, 3, 3, 8))
            self._set(message, field, count, depth)
        oneofs: Any = message.DESCRIPTOR.oneofs
        for oneof in oneofs:
            if len(oneof.fields) > 1:
                self._set(message, rng.choice(oneof.fields), 1, depth)
        return message

    def _set(self, message: Message, field: Field, count: int, depth: int) -> None:
        holder = getattr(message, field.name)
        if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(count):
                self._entry(holder, field, depth)
        elif field.name == "sparse":
            # Sparse columns take the place of all others, so that few messages have them.
            if self.rng.random() < 0.3:
                holder.CopyFrom(SPARSE) if self.rng.random() < self.sense else self.fill(holder, depth + 1)
        elif field.message_type is not None:
            if depth < 4:
                for _ in range(count if field.is_repeated else 1):
                    self.fill(holder.add() if field.is_repeated else holder, depth + 1)
                if not field.is_repeated:
                    holder.SetInParent()
        elif field.is_repeated:
            holder.extend(self.value(field) for _ in range(count))
        else:
            setattr(message, field.name, self.value(field))

    def _entry(self, holder: Any, field: Field, depth: int) -> None:
        entry: Any = field.message_type
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        if value.message_type is None:
            holder[self.value(key)] = self.value(value)
        elif depth < 4:
            self.fill(holder[self.value(key)], depth + 1)
