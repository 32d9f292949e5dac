"""What protobuf would need long to parse is refused before: whichever field a hostile message repeats, and whatever an
engine may have to say is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from meridian.v1 import agent_pb2

from meridian_control.common.errors import InvalidRequest
from meridian_control.common.opened_request import MAX_SLOTS, MAX_TEXT
from meridian_control.server.agent_service import COUNTED, parse

LARGE_BYTES = 4 << 20


def number(value: int) -> bytes:
    written = b""
    while value > 127:
        written, value = written + bytes([value & 127 | 128]), value >> 7
    return written + bytes([value])


def delimited(field: int, content: bytes) -> bytes:
    return number(field << 3 | 2) + number(len(content)) + content


def repeated(descriptor: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every repeated field in a message and in the messages that it has once."""
    for field in descriptor.fields:
        if field.is_repeated:
            yield (*path, field)
        elif field.message_type is not None:
            yield from repeated(field.message_type, (*path, field))


PATHS = {".".join(field.name for field in path): path for path in repeated(agent_pb2.ConnectRequest.DESCRIPTOR)}
KINDS = {f"{part}.{name}" for part, names in COUNTED.items() for name in names}


@pytest.mark.parametrize("name", PATHS)
def test_a_field_that_is_repeated_very_often_is_refused(name: str) -> None:
    *outer, field = PATHS[name]
    varint = field.message_type is None and field.cpp_type != field.CPPTYPE_STRING
    entry = number(field.number << 3) + b"\0" if varint else delimited(field.number, b"")
    given = entry * (LARGE_BYTES // len(entry))
    for part in reversed(outer):
        given = delimited(part.number, given)
    text = f"{name} must have at most {MAX_SLOTS} entries" if name in KINDS else "message must have at most"
    with pytest.raises(InvalidRequest, match=text):
        parse(given)


def test_a_message_of_many_unknown_fields_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="and 4096 fields beside its requests"):
        parse((number(999 << 3) + b"\0") * 50_000)


def test_an_entry_without_end_is_refused() -> None:
    opened = agent_pb2.RequestOpened(request_id="x" * 100_000)
    message = agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=[opened]))
    with pytest.raises(InvalidRequest, match=r"snapshot\.requests must have at most 65536 bytes in an entry"):
        parse(message.SerializeToString())


def test_what_the_largest_engine_says_is_parsed() -> None:
    requests = [
        agent_pb2.RequestOpened(slot=slot, request_id=f"{slot}".ljust(200, "x"), tenant="é" * 20)
        for slot in range(MAX_SLOTS)
    ]
    requests[0].model = "é" * MAX_TEXT
    for message in (
        agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=9, requests=requests)),
        agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=9, opened=requests)),
    ):
        assert parse(message.SerializeToString()) == message
    rows = list(range(1 << 15))
    report = agent_pb2.StepReport(step=9)
    report.tokens.slot.extend(rows)
    report.tokens.entropy_nats.extend([1.0] * len(rows))
    report.probes.slot.extend(rows)
    message = agent_pb2.ConnectRequest(step=report)
    assert parse(message.SerializeToString()) == message


@pytest.mark.parametrize("end", [b"\x12\xff\xff\xff\xff\x0f", b"\x12", b"\x13", b"\x12" + b"\xff" * 11])
def test_what_is_no_message_is_refused(end: bytes) -> None:
    with pytest.raises(DecodeError):
        parse(delimited(999, b"x" * 70_000) + end)
