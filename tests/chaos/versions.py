"""Change protocol messages to those of an older or a newer version of the sender.

Each function is pure but for the message, ConnectRequest or ConnectResponse, which it changes.
"""

from __future__ import annotations

from google.protobuf.message import Message
from meridian.v1 import agent_pb2

from meridian_control.engine.token_rows import spell_out

# The highest field number of each message in the first version; messages that are not listed have not grown since.
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
    """Keep only the fields of the first version; a message of a later kind becomes empty."""
    _name_versions(message, FIRST_VERSION)
    _strip(message)


def newer(message: Message) -> None:
    """Add unknown fields to every message in it, and unknown values to its enums."""
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
    """Return the messages in a message, one level down, except those in maps."""
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
    """Set states, phases, reasons and outcomes to a value that only a newer version has."""
    if message.HasField("hello"):
        message.hello.state = UNKNOWN  # type: ignore[assignment]
    if not message.HasField("step"):
        return
    report = message.step
    report.state = UNKNOWN  # type: ignore[assignment]
    for opened in report.opened:
        if opened.phase == agent_pb2.PHASE_PROMPT:
            opened.phase = UNKNOWN  # type: ignore[assignment]
    spell_out(report.tokens)
    for row, phase in enumerate(report.tokens.phase):
        if phase == agent_pb2.PHASE_OUTPUT:
            report.tokens.phase[row] = UNKNOWN  # type: ignore[call-overload]
    for closed in report.closed:
        closed.reason = UNKNOWN  # type: ignore[assignment]
    for outcome in report.outcomes:
        outcome.reason = UNKNOWN  # type: ignore[assignment]
        if outcome.outcome == agent_pb2.OUTCOME_SUPERSEDED:
            outcome.outcome = UNKNOWN  # type: ignore[assignment]


def _unknown_decisions(directives: agent_pb2.Directives) -> None:
    for force in directives.forces:
        force.reason = UNKNOWN  # type: ignore[assignment]
    for tier in directives.tiers:
        tier.tier = UNKNOWN  # type: ignore[assignment]
    for probe in directives.probes:
        probe.placement = UNKNOWN  # type: ignore[assignment]
