"""Parses the messages of agents, unless they have more entries than any engine can report.

An entry of two bytes takes hundreds in memory once it is parsed, so a message within gRPC's bound could take more
memory than the process may have. The entries of a large message are therefore counted first. All functions are pure.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from meridian.v1 import agent_pb2

from meridian_control.common.errors import InvalidRequest
from meridian_control.common.opened_request import MAX_SLOTS

# Messages of at most this many bytes are not counted, because they can have few entries.
SMALL_BYTES = 64 << 10
# Fields of a message whose entries are counted.
COUNTED = {"snapshot": ("requests", "ended"), "step": ("opened", "closed", "outcomes")}

# Columns of a report that have one row for a request. A small message cannot have too many.
COLUMNS = ("probes", "loops", "continued", "joined")


def _envelope() -> Any:
    """Return a type that reads a ConnectRequest, but leaves the entries of COUNTED as bytes."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="meridian/counted.proto", package="meridian.counted")
    whole = file.message_type.add(name="ConnectRequest")
    for part, names in COUNTED.items():
        field: Any = agent_pb2.ConnectRequest.DESCRIPTOR.fields_by_name[part]
        whole.field.add(
            name=part,
            number=field.number,
            type=kinds.TYPE_MESSAGE,
            label=kinds.LABEL_OPTIONAL,
            type_name=f".meridian.counted.{part}",
        )
        message = file.message_type.add(name=part)
        for name in names:
            number = field.message_type.fields_by_name[name].number
            message.field.add(name=name, number=number, type=kinds.TYPE_BYTES, label=kinds.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("meridian.counted.ConnectRequest"))


ENVELOPE = _envelope()


def parse(given: bytes) -> agent_pb2.ConnectRequest:
    """Return the message. Raises InvalidRequest if it has too many entries, and DecodeError if it cannot be parsed."""
    if len(given) > SMALL_BYTES:
        counted = ENVELOPE.FromString(given)
        for part, names in COUNTED.items():
            for name in names:
                if (entries := len(getattr(getattr(counted, part), name))) > MAX_SLOTS:
                    raise InvalidRequest(f"{part}.{name}", f"must have at most {MAX_SLOTS} entries; got {entries}")
    message = agent_pb2.ConnectRequest.FromString(given)
    if len(given) > SMALL_BYTES and message.HasField("step"):
        for part in COLUMNS:
            if (rows := len(getattr(message.step, part).slot)) > MAX_SLOTS:
                raise InvalidRequest(f"step.{part}", f"must have at most {MAX_SLOTS} rows; got {rows}")
    return message
