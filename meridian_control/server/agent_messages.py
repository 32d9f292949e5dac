"""Parses the messages of agents, unless a message makes more work than any engine needs.

protobuf parses a message in one piece, and all other engines wait meanwhile. Requests make up nearly all of a large
message of an agent, so their number is bounded, and so are the bytes of everything else. All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from meridian.v1 import agent_pb2

from meridian_control.common.errors import InvalidRequest
from meridian_control.common.message_bounds import SMALL_BYTES, fields
from meridian_control.common.opened_request import MAX_SLOTS

# Largest number of bytes of an entry, which has a few texts and numbers; and of what a message has beside entries. An
# agent's reports have at most REPORT_BYTES with their entries, and any other message is smaller.
ENTRY_BYTES, REPORT_BYTES, OTHER_BYTES = 64 << 10, 1 << 20, 256 << 10
# Largest number of tags in a message, beside entries.
MAX_TAGS = 4096
# Fields of a message whose entries are counted.
COUNTED = {"snapshot": ("requests", "ended"), "step": ("opened", "closed", "outcomes")}
# Columns of a report that have one row for a request.
COLUMNS = ("probes", "loops", "continued", "joined", "preemptions")


def _numbers() -> dict[int, tuple[str, dict[int, str]]]:
    """Return the names of COUNTED by their field numbers."""
    numbers = {}
    for part, names in COUNTED.items():
        field: Any = agent_pb2.ConnectRequest.DESCRIPTOR.fields_by_name[part]
        inner = field.message_type.fields_by_name
        numbers[field.number] = part, {inner[name].number: name for name in names}
    return numbers


NUMBERS = _numbers()


def parse(given: bytes) -> agent_pb2.ConnectRequest:
    """Return the message. Raises InvalidRequest if it has too much of something, and DecodeError if it cannot be
    parsed."""
    if len(given) > SMALL_BYTES:
        _check(given)
    message = agent_pb2.ConnectRequest.FromString(given)
    if len(given) > SMALL_BYTES and message.HasField("step"):
        for part in COLUMNS:
            if (rows := len(getattr(message.step, part).slot)) > MAX_SLOTS:
                raise InvalidRequest(f"step.{part}", f"must have at most {MAX_SLOTS} rows; got {rows}")
    return message


def _check(given: bytes) -> None:
    """Raise InvalidRequest if the message has too many entries, or too much beside them."""
    entries, tags, rest, most = Counter[str](), 0, 0, OTHER_BYTES
    for number, begin, end in fields(given, 0, len(given), MAX_TAGS + 1):
        tags += 1
        if number not in NUMBERS:
            rest += end - begin
        else:
            part, names = NUMBERS[number]
            most = REPORT_BYTES
            for inner, start, stop in fields(given, begin, end, len(given)):
                if (name := names.get(inner)) is None:
                    rest += stop - start
                    tags += 1
                elif stop - start > ENTRY_BYTES:
                    raise InvalidRequest(f"{part}.{name}", f"must have at most {ENTRY_BYTES} bytes in an entry")
                else:
                    entries[name] += 1
                    if entries[name] > MAX_SLOTS:
                        raise InvalidRequest(f"{part}.{name}", f"must have at most {MAX_SLOTS} entries")
                if tags > MAX_TAGS:
                    break
        if rest > most or tags > MAX_TAGS:
            raise InvalidRequest("message", f"must have at most {most} bytes and {MAX_TAGS} fields beside its requests")
