"""Records on their way out: what waits on a stream, what was dropped and is owed, and how steps are merged to reports.

Owns the ring of the stream, between the engine's thread, which lays records down and never waits, and gRPC's, which
takes them out. Knows neither channel nor reconnection.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.step_record import StepRecord
from meridian_agent.link.inbox import INBOX_DECISIONS, Inbox
from meridian_agent.link.messages import mergeable, opened_message, step_report
from meridian_agent.link.record_queue import RecordQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from meridian_agent.link.lease import Lease

RING_RECORDS = 4096
MERGE_RECORDS = 256
# Between two reports: steps faster than this share one. Longest that nobody is looked for while no request is live.
REST_S, IDLE_WAIT_S = 0.002, 1.0
# Reports whose time of queueing is remembered.
ROUND_TRIP_STEPS = 256


@dataclass(slots=True)
class SnapshotRecord:
    step: int
    rows: list[tuple[Any, ...]] = field(default_factory=list)


RecordRing = RecordQueue[StepRecord | SnapshotRecord | agent_pb2.ConnectRequest | None]


class Outbox:
    """One engine's. restart: ends the stream. give_up: the same, because too much waits, with a word on what."""

    def __init__(self, lease: Lease, inbox: Inbox, restart: Callable[[], None], give_up: Callable[[str], None]) -> None:
        self._lease, self._inbox, self._restart, self._give_up = lease, inbox, restart, give_up
        # A new one for every stream, so that one that has ended cannot take what belongs to the next; None ends it.
        self.ring: RecordRing = RecordQueue()
        # Set on the link's thread, cleared on the engine's: the stream has not had a snapshot yet.
        self.snapshot_due = False
        self._streaming = False
        self.reports_dropped = 0
        # Outcomes of records that were dropped: each decision still gets its one outcome.
        self._kept_outcomes: list[tuple[int, int, int, str]] = []
        # Outcomes queued and sent, each counted by one thread.
        self._outcomes_in = self._outcomes_out = 0
        # From queueing a report to the answer to it, newest.
        self.round_trip_ms = 0.0
        self._queued: dict[int, float] = {}

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def send(self, record: StepRecord, snapshot: Callable[[], list[tuple[Any, ...]]]) -> None:
        """Lay down a record; with a snapshot due, that first. Never waits; a full ring drops and asks for a snapshot.

        It is sent when `wake` is called, and else a little later. What the last record before a rest would have told is
        not waited for: the stream begins anew.
        """
        lease = self._lease
        if not lease.connected or self._inbox.new_stream_waits():
            self._streaming = False
            return
        self._outcomes_in += len(record.outcomes)
        if self._outcomes_in - self._outcomes_out > INBOX_DECISIONS:
            self._give_up("outcomes wait to be sent")
        if self.ring.qsize() >= RING_RECORDS:
            self._streaming = False
            self.reports_dropped += 1
            self._kept_outcomes += record.outcomes
            if lease.idle:
                # No record comes after it in which these could be told.
                self._restart()
            return
        if self.snapshot_due or not self._streaming:
            self._begin(record, snapshot)
        record.urgent = record.urgent or lease.idle
        record.ended_s = now = lease.clock()
        lease.asks(now)
        self._queued[record.step % ROUND_TRIP_STEPS] = now
        self.ring.lay(record, record.presses)

    def _begin(self, record: StepRecord, snapshot: Callable[[], list[tuple[Any, ...]]]) -> None:
        """Send the whole state; what the record says of it is in there already. A new stream knows no old decision."""
        if self.snapshot_due:
            self._kept_outcomes = []
        self.snapshot_due, self._streaming = False, True
        record.opened, record.slots, record.closed, record.preempted, record.resumed = [], [], [], [], []
        record.text = ()
        record.outcomes = self._kept_outcomes + record.outcomes
        self._kept_outcomes = []
        self.ring.lay(SnapshotRecord(record.step, snapshot()), presses=True)

    def wake(self) -> None:
        """Have what was laid down sent."""
        self.ring.wake()

    def resync(self) -> None:
        """Send the whole state with the next record: what was told before is to be told again."""
        self._streaming = False

    @property
    def follows(self) -> bool:
        """Whether the stream has had all that the agent knows, or it waits on the ring."""
        return self._streaming and not self.snapshot_due

    # ------------------------------------------------------------------------------- the link's thread, and gRPC's

    def new_ring(self) -> RecordRing:
        """Begin anew, for a new stream."""
        self.ring = RecordQueue()
        self._outcomes_out = self._outcomes_in
        return self.ring

    @property
    def surplus(self) -> int:
        """Messages on the ring beyond its records."""
        return self.ring.qsize() - RING_RECORDS

    def answered(self, step: int) -> None:
        """The report of this step was answered; what names it again answers something else."""
        if queued := self._queued.pop(step % ROUND_TRIP_STEPS, None):
            self.round_trip_ms = (self._lease.clock() - queued) * 1e3

    def messages(self, ring: RecordRing, hello: Callable[[], agent_pb2.Hello]) -> Iterator[agent_pb2.ConnectRequest]:
        """The messages that gRPC sends, one at a time; it waits here, on its own thread, for the engine's records."""
        yield agent_pb2.ConnectRequest(hello=hello())
        held: StepRecord | SnapshotRecord | agent_pb2.ConnectRequest | None = None
        reported_s = -REST_S
        while True:
            try:
                item = held if held is not None else self._first(ring)
            except queue.Empty:
                continue
            held = None
            if item is None:
                return
            if isinstance(item, agent_pb2.ConnectRequest):
                # The answer to it names the newest report, which may be long ago.
                self._queued.clear()
                yield item
            elif isinstance(item, SnapshotRecord):
                ring.took(1)
                rows = [opened_message(row) for row in item.rows]
                yield agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=item.step, requests=rows))
            else:
                if 0 < (rests_s := reported_s + REST_S - self._lease.clock()) <= REST_S:
                    ring.rest(rests_s)
                batch, held = self._gather(ring, item)
                self._outcomes_out += sum(len(record.outcomes) for record in batch)
                ring.took(sum(record.presses for record in batch))
                yield agent_pb2.ConnectRequest(step=step_report(batch))
                reported_s = self._lease.clock()

    def _first(self, ring: RecordRing) -> StepRecord | SnapshotRecord | agent_pb2.ConnectRequest | None:
        """The first of what waits, once its interval is over. Raises queue.Empty."""
        lease = self._lease
        return ring.get(IDLE_WAIT_S if lease.idle else lease.merge_s, lease.report_interval_steps)

    def _gather(self, ring: RecordRing, first: StepRecord) -> tuple[list[StepRecord], Any]:
        """The records to merge into one report: whatever waits."""
        batch = [first]
        while len(batch) < max(MERGE_RECORDS, self._lease.report_interval_steps):
            try:
                item = ring.get_nowait()
            except queue.Empty:
                break
            if item is None:
                ring.put(None)
                break
            if not isinstance(item, StepRecord) or not mergeable(batch, item):
                return batch, item
            batch.append(item)
        return batch, None
