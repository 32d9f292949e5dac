"""Makes the records of a trace: what reached a session, and what it answered. The functions are pure."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.errors import BadReport
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.engine.token_rows import spell_out
from meridian_control.policy import formats as forms

if TYPE_CHECKING:
    from datetime import datetime

    from meridian_control.engine.session import Session
    from meridian_control.policy.model import Policy


def records_at_start(session: Session, now: datetime) -> list[fleet_pb2.TraceRecord]:
    """Return records of an open session, for a recording that begins now."""
    given = [policy_record(session, now, revision, policy) for revision, policy in session.given]
    states = [part_record(session, now, state) for state in session.part_records()]
    return [hello_record(session, now, joined_late=True), *freeze_records(session, now), *states, *given]


def hello_record(session: Session, now: datetime, joined_late: bool = False) -> fleet_pb2.TraceRecord:
    return _record(session, now, up=agent_pb2.ConnectRequest(hello=session.hello), joined_late=joined_late)


def up_record(session: Session, now: datetime, message: agent_pb2.ConnectRequest) -> fleet_pb2.TraceRecord:
    """Return the record of an agent's message. Readers of traces need to know plain columns only."""
    record = _record(session, now, up=message)
    if record.up.HasField("step"):
        # Nobody reads the tokens of a report without steps, so they may be malformed.
        with suppress(BadReport):
            spell_out(record.up.step.tokens)
    return record


def down_record(session: Session, now: datetime, message: agent_pb2.ConnectResponse) -> fleet_pb2.TraceRecord:
    return _record(session, now, down=message)


def policy_record(session: Session, now: datetime, revision: int, policy: Policy) -> fleet_pb2.TraceRecord:
    return _record(session, now, policy={"revision": revision, "policy": forms.to_proto(policy)})


def end_record(session: Session, now: datetime, request_id: str) -> fleet_pb2.TraceRecord:
    return _record(session, now, end_thinking={"request_id": request_id})


def part_record(session: Session, now: datetime, state: fleet_pb2.TraceRecord) -> fleet_pb2.TraceRecord:
    """Return the record of what has reached a part of the session from outside of the stream."""
    record = _record(session, now)
    record.MergeFrom(state)
    return record


def freeze_records(session: Session, now: datetime) -> list[fleet_pb2.TraceRecord]:
    """Return records of the freeze that the agent was sent and of its confirmation, for a recording that begins now."""
    if not (message := session.freezing.message(now)).nonce:
        return []
    records = [down_record(session, now, agent_pb2.ConnectResponse(freeze=message))]
    if session.freezing.confirmed:
        status = session.freezing.status()
        records.append(up_record(session, now, agent_pb2.ConnectRequest(freeze_status=status)))
    return records


def given_freezes(record: fleet_pb2.TraceRecord) -> tuple[Freeze, ...]:
    """Return a freeze that stands for all freezes of the session when it sent the recorded message.

    The end time and the reason are the recorded ones; the id and the match are not recorded.
    """
    now, said = record.time.ToDatetime(UTC), record.down.freeze
    end = now + timedelta(milliseconds=said.remaining_ms)
    return (Freeze(0, Match(), "", said.reason, now, end),) if said.remaining_ms else ()


def _record(session: Session, now: datetime, **fields: Any) -> fleet_pb2.TraceRecord:
    fields |= {"time": now, "engine_id": session.hello.engine_id, "session_id": session.session_id}
    return fleet_pb2.TraceRecord(**fields)
