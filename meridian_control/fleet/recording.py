"""Queues the records of one client of FleetService.RecordTrace, until the client leaves or falls too far behind.

The queue lies between the agents' streams and the client; adding a record never waits. All code runs on the server's
event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.common.errors import RecordingTooSlow
from meridian_control.fleet.trace_records import down_record, up_record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from datetime import datetime

    from meridian.v1 import agent_pb2

    from meridian_control.engine.session import Session

# Bounds for the records that wait for a slow client, and for those of all clients together.
QUEUE_BYTES = 32 << 20
QUEUE_RECORDS = 1 << 18
ALL_QUEUES_BYTES = 64 << 20
# About the bytes of a waiting record beside its own.
ENTRY_BYTES = 64


class Recordings(set["Recording"]):
    """The recordings of one replica."""

    def note_heard(self, session: Session, message: agent_pb2.ConnectRequest, now: datetime) -> None:
        """Record a message of the session's agent."""
        if recordings := self._of(session):
            self._queue(recordings, up_record(session, now, message))

    def note_said(self, session: Session, responses: Iterable[agent_pb2.ConnectResponse], now: datetime) -> None:
        """Record the responses to the session's agent."""
        if recordings := self._of(session):
            for response in responses:
                self._queue(recordings, down_record(session, now, response))

    def note(self, session: Session, make: Callable[..., fleet_pb2.TraceRecord], *args: object) -> None:
        """Record another event of a session. make: makes the record from the session and the arguments, only for a
        recording that wants it, because a large policy's record takes milliseconds."""
        if recordings := self._of(session):
            self._queue(recordings, make(session, *args))

    def _of(self, session: Session) -> list[Recording]:
        return [recording for recording in self if recording.wants(session)] if self else []

    def _queue(self, recordings: list[Recording], record: fleet_pb2.TraceRecord) -> None:
        """Queue a record for some of the recordings, which share its bytes. If too many bytes wait for all clients
        together, the recording for which most wait ends."""
        serialised = record.SerializeToString()
        for recording in recordings:
            recording.add(serialised)
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
