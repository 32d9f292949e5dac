"""Protocol messages as an older or a newer version of the other side has them: what travels between two that differ.

Pure: each function takes a message, ConnectRequest or ConnectResponse, and changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

# The highest field number that the first version had, by message; those that are not here have not grown since.
FIRST_FIELDS = {
    "ConnectRequest": 4,
    "ConnectResponse": 4,
    "Hello": 13,
    "RequestOpened": 13,
    "ProbeColumns": 5,
    "StepReport": 14,
    "AgentCounters": 8,
    "Settings": 9,
    "DispatchPlan": 7,
    "EatProbe": 2,
}
FIRST_VERSION, NEXT_VERSION = "0.0.1", "99.0"
# Field 1007 with a text, and a value that no enum has.
UNKNOWN_FIELD = b"\xfa\x3e\x05later"
UNKNOWN = 77


def older(message: Message) -> None:
    """Leave only what the first version had; a message of another kind is empty then."""
    _name_versions(message, FIRST_VERSION)
    _strip(message)


def newer(message: Message) -> None:
    """Add fields that nobody knows to every message in it, and values that nobody knows to its enums."""
    _name_versions(message, NEXT_VERSION)
    _grow(message)
    if isinstance(message, agent_pb2.ConnectRequest):
        _unknown_reports(message)
    elif isinstance(message, agent_pb2.ConnectResponse):
        _unknown_decisions(message.directives)


def _name_versions(message: Message, version: str) -> None:
    if isinstance(message, agent_pb2.ConnectRequest) and message.HasField("hello"):
        message.hello.agent_version = version
    elif isinstance(message, agent_pb2.ConnectResponse) and message.HasField("welcome"):
        message.welcome.server_version = version


def _parts(message: Message) -> list[Message]:
    """The messages in a message, one level down; those in maps are none of ours."""
    found: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            found += value if isinstance(value, list) or hasattr(value, "append") else [value]
    return found


def _strip(message: Message) -> None:
    last = FIRST_FIELDS.get(message.DESCRIPTOR.name)
    for field, _ in message.ListFields():
        if last is not None and field.number > last:
            message.ClearField(field.name)
    for part in _parts(message):
        _strip(part)


def _grow(message: Message) -> None:
    for part in _parts(message):
        _grow(part)
    message.MergeFromString(UNKNOWN_FIELD)


def _unknown_reports(message: agent_pb2.ConnectRequest) -> None:
    """States, phases, reasons and outcomes that came with the next version."""
    if message.HasField("hello"):
        message.hello.state = UNKNOWN  # type: ignore[assignment]
    if not message.HasField("step"):
        return
    report = message.step
    report.state = UNKNOWN  # type: ignore[assignment]
    for opened in report.opened:
        if opened.phase == agent_pb2.PHASE_PROMPT:
            opened.phase = UNKNOWN  # type: ignore[assignment]
    for row, phase in enumerate(report.tokens.phase):
        if phase == agent_pb2.PHASE_OUTPUT:
            report.tokens.phase[row] = UNKNOWN  # type: ignore[call-overload]
    for closed in report.closed:
        closed.reason = UNKNOWN  # type: ignore[assignment]
    for outcome in report.outcomes:
        if outcome.outcome == agent_pb2.OUTCOME_SUPERSEDED:
            outcome.outcome = UNKNOWN  # type: ignore[assignment]


def _unknown_decisions(directives: agent_pb2.Directives) -> None:
    for force in directives.forces:
        force.reason = UNKNOWN  # type: ignore[assignment]
    for tier in directives.tiers:
        tier.tier = UNKNOWN  # type: ignore[assignment]
    for probe in directives.probes:
        probe.placement = UNKNOWN  # type: ignore[assignment]
