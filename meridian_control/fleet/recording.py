"""Queues the records of one client of FleetService.RecordTrace, until the client leaves or falls too far behind.

The queue lies between the agents' streams and the client; adding a record never waits. All code runs on the server's
event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.errors import BadReport, RecordingTooSlow
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.engine.token_rows import spell_out
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from datetime import datetime

    from meridian_control.engine.session import Session

# Bounds for the records that wait for a slow client, and for those of all clients together.
QUEUE_BYTES = 32 << 20
QUEUE_RECORDS = 1 << 18
ALL_QUEUES_BYTES = 64 << 20
# About the bytes of a waiting record beside its own.
ENTRY_BYTES = 64


class Recordings(set["Recording"]):
    """The recordings of one replica."""

    def add_record(self, recordings: Iterable[Recording], record: fleet_pb2.TraceRecord) -> None:
        """Queue a record for some of the recordings, which share its bytes. If too many bytes wait for all clients
        together, the recording for which most wait ends."""
        told = record.SerializeToString()
        for recording in recordings:
            recording.add(told)
        if sum(recording.waiting_bytes for recording in self) > ALL_QUEUES_BYTES:
            max(self, key=lambda recording: recording.waiting_bytes).overflow()


class Recording:
    """One client's recording. `engine_id` is empty for all engines."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        # The records that wait, serialised: a message in memory takes several times as many bytes.
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self._more = asyncio.Event()
        self._closed = self.overflowed = False
        # Ids of replicas from which no records arrive at present.
        self.unreachable: list[str] = []

    def wants(self, session: Session) -> bool:
        return self.engine_id in ("", session.hello.engine_id)

    def add(self, record: bytes) -> None:
        """Queue a serialised record. If the queue is full, drop the waiting records and end the recording."""
        if self._closed:
            return
        self._waiting.append(record)
        self.waiting_bytes += len(record) + ENTRY_BYTES
        if self.waiting_bytes > QUEUE_BYTES or len(self._waiting) > QUEUE_RECORDS:
            self.overflow()
        self._more.set()

    def overflow(self) -> None:
        """Drop the waiting records and end the recording, because its client is too slow."""
        self._waiting.clear()
        self.waiting_bytes = 0
        self.overflowed = True
        self.close()

    def close(self) -> None:
        """End the recording after the waiting records."""
        self._closed = True
        self._more.set()

    async def records(self) -> AsyncIterator[fleet_pb2.TraceRecord]:
        """Yield the records until the recording is closed. Raises RecordingTooSlow if the queue overflowed."""
        while True:
            while self._waiting:
                record = self._waiting.popleft()
                self.waiting_bytes -= len(record) + ENTRY_BYTES
                yield fleet_pb2.TraceRecord.FromString(record)
            if self.overflowed:
                raise RecordingTooSlow(QUEUE_BYTES, QUEUE_RECORDS)
            if self._closed:
                return
            self._more.clear()
            await self._more.wait()


def records_at_start(session: Session, now: datetime) -> list[fleet_pb2.TraceRecord]:
    """Return records of an open session, for a recording that begins now."""
    given = [policy_record(session, now, revision, policy) for revision, policy in session.given]
    states = [part_record(session, now, state) for state in session.part_records()]
    return [hello_record(session, now, joined_late=True), *freeze_records(session, now), *states, *given]


def hello_record(session: Session, now: datetime, joined_late: bool = False) -> fleet_pb2.TraceRecord:
    record = _record(session, now)
    record.up.hello.CopyFrom(session.hello)
    record.joined_late = joined_late
    return record


def up_record(session: Session, now: datetime, message: agent_pb2.ConnectRequest) -> fleet_pb2.TraceRecord:
    """Return the record of an agent's message. Readers of traces need not know byte columns."""
    record = _record(session, now)
    record.up.CopyFrom(message)
    if message.step.tokens.byte_columns:
        # Nobody reads the tokens of a report without steps, so they may be malformed.
        with suppress(BadReport):
            spell_out(record.up.step.tokens)
    return record


def down_record(session: Session, now: datetime, message: agent_pb2.ConnectResponse) -> fleet_pb2.TraceRecord:
    record = _record(session, now)
    record.down.CopyFrom(message)
    return record


def policy_record(session: Session, now: datetime, revision: int, policy: schema.Policy) -> fleet_pb2.TraceRecord:
    record = _record(session, now)
    record.policy.revision = revision
    record.policy.policy.CopyFrom(forms.to_proto(policy))
    return record


def end_record(session: Session, now: datetime, request_id: str) -> fleet_pb2.TraceRecord:
    record = _record(session, now)
    record.end_thinking.request_id = request_id
    return record


def part_record(session: Session, now: datetime, state: fleet_pb2.TraceRecord) -> fleet_pb2.TraceRecord:
    """Return the record of what has reached a part of the session from outside of the stream."""
    record = _record(session, now)
    record.MergeFrom(state)
    return record


def freeze_records(session: Session, now: datetime) -> list[fleet_pb2.TraceRecord]:
    """Return records of the freeze that the agent was sent and of its confirmation, for a recording that begins now."""
    if not (told := session.freezing.told(now)).nonce:
        return []
    records = [down_record(session, now, agent_pb2.ConnectResponse(freeze=told))]
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


def _record(session: Session, now: datetime) -> fleet_pb2.TraceRecord:
    time = Timestamp()
    time.FromDatetime(now)
    return fleet_pb2.TraceRecord(time=time, engine_id=session.hello.engine_id, session_id=session.session_id)
