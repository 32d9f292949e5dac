"""Holds the records that wait to be sent, keeps the outcomes of dropped records, and merges steps into reports.

The module owns the ring of each stream: the engine's thread adds records and never waits, gRPC's thread takes them out.
Knows neither channel nor reconnection.
"""

from __future__ import annotations

import logging
import math
import queue
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from meridian.v1 import agent_pb2

from meridian_agent.core.step_record import Gauges, Record, StepRecord, TextRecord, TextStep, record_of
from meridian_agent.core.token_cycles import LoopSearch
from meridian_agent.link.inbox import INBOX_DECISIONS, Inbox
from meridian_agent.link.message_sizes import REPORT_HEAD_BYTES, Bounds, SnapshotRecord, record_bytes, reports_of
from meridian_agent.link.messages import mergeable, step_report
from meridian_agent.link.record_queue import RecordQueue
from meridian_agent.link.unreported import SILENT_S, Unreported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from meridian_agent.link.lease import Lease

logger = logging.getLogger("vllm.meridian")

RING_RECORDS = 4096
MERGE_RECORDS = 256
# Number of rows for which the steps wait that nobody acts on. A report of more would be made in one go, in which the
# engine's thread waits for the interpreter's lock.
MERGE_ROWS = 8192
# Largest number of steps that wait because they are fast, so that a decision does not come much later in the text.
FAST_STEPS = 24
# Largest number of tokens that a request may generate while the report of its arrival waits; far below the smallest cap
# of a policy that lets this report wait, so that the cap comes in time.
LATE_TOKENS = 24
# Seconds between two reports, so that faster steps share a report; and seconds after which the sender of an idle engine
# looks at the ring again.
REST_S, IDLE_WAIT_S = 0.002, 1.0
# Seconds between two looks of an idle engine's sender at whether the agent can leave the stream.
LEAVE_S = 0.02
# Seconds between two reports of steps that computed no text, while nothing else changes.
EMPTY_REPORT_S = 0.1
# Number of newest reports whose time of queueing is remembered.
ROUND_TRIP_STEPS = 256
# Number of reports without an answer whose time of queueing is remembered; the oldest ones count.
UNANSWERED_REPORTS = 4096


# A message of the link's own thread, a record of the engine's, or None, which ends the sender.
Message: TypeAlias = Record | SnapshotRecord | agent_pb2.ConnectRequest | None
RecordRing = RecordQueue[Message | TextStep]


class Outbox:
    """The outbox of one engine. restart: ends the stream; takes the reason. give_up: ends the stream because too much
    waits; takes a text that says what waits."""

    def __init__(
        self, lease: Lease, inbox: Inbox, restart: Callable[[str], None], give_up: Callable[[str], None]
    ) -> None:
        self._lease, self._inbox, self._restart, self._give_up = lease, inbox, restart, give_up
        # The ring of the current stream. Each stream has its own ring, so that the sender of an old stream cannot take
        # records of the next stream; None ends the sender.
        self.ring: RecordRing = RecordQueue()
        # The stream has not had a snapshot yet. Set on the link's thread, cleared on the engine's thread, or on the
        # link's while the engine is idle.
        self.snapshot_due = False
        # Whether the stream's control plane reads sparse columns, and snapshots in parts; set before the stream's first
        # report.
        self.sparse_columns = self.snapshot_parts = False
        self.bounds = Bounds()
        # Whether the workers measure something in the newest steps. Set on the engine's thread.
        self.measures = False
        # Largest number of tokens that a request generates in a step.
        self.step_tokens = 1
        # Seconds without a message after which a heartbeat is sent on this stream, as Welcome says; 0 for none.
        self.heartbeat_s = 0.0
        # Publishes what no step has published, if the engine makes none; called on gRPC's thread while nothing waits.
        self.at_rest: Callable[[], None] = lambda: None
        # Bytes of the largest message of a snapshot on this stream. A new stream would send the same message again.
        self.largest_snapshot_bytes = 0
        # Returns the values of COUNTERS for a report that is about to be sent; they are totals.
        self.counters: Callable[[], tuple[float, ...]] = tuple
        # Returns the engine's gauges, for a report whose last step has not read them.
        self.gauges: Callable[[], Gauges] = Gauges
        # Whether each record since the stream's snapshot has been queued; and whether another snapshot is to follow the
        # next record.
        self._streaming = self._resyncs = False
        self.unreported = Unreported()
        self.reports_dropped = 0
        # Outcomes of dropped records, kept so that each decision still gets its one outcome.
        self._kept_outcomes: list[tuple[int, int, int, str, int]] = []
        # Numbers of outcomes queued and sent; each number is written by one thread only.
        self._outcomes_in = self._outcomes_out = 0
        # Milliseconds from queueing the newest answered report to its answer.
        self.round_trip_ms = 0.0
        self._queued: dict[int, float] = {}
        # Step and time of queueing of the reports on this stream that no answer has named, oldest first. Added on
        # gRPC's thread, taken on the link's.
        self._unanswered: deque[tuple[int, float]] = deque()
        # Rows of the last step of the newest report, and the step's milliseconds.
        self._rows, self._step_ms = 0, math.inf
        # Time at which the newest record was queued, and what it says of the engine: the agent's state and the gauges;
        # None on a new stream, and if the gauges are read later.
        self._sent_s = -math.inf
        self._said: tuple[int, Gauges] | None = None

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def send(self, record: StepRecord, snapshot: Callable[[], list[tuple[Any, ...]]]) -> None:
        """Queue a record, after a snapshot if the stream lacks records, or before one that `resync` has asked for.
        Never waits; if the ring is full, the record is dropped and a snapshot follows later.

        The record is sent when `wake` is called, or a little later. If the last record before an idle time is dropped,
        the stream is ended, because no later record could carry its outcomes.
        """
        lease, ring = self._lease, self.ring
        if ring.leaves and not ring.left and self.unreported.is_settled:
            ring.left = True
            ring.put(None)
        if not lease.connected or ring.left or self._inbox.new_stream_waits():
            self._streaming = False
            self.unreported.lose(record)
            return
        self._outcomes_in += len(record.outcomes)
        if self._outcomes_in - self._outcomes_out > INBOX_DECISIONS:
            self._give_up("outcomes wait to be sent")
        if self.ring.qsize() >= RING_RECORDS:
            self._streaming = False
            self.unreported.lose(record)
            self.reports_dropped += 1
            self._kept_outcomes += record.outcomes
            if lease.idle:
                # No later record could carry these outcomes.
                self._restart("the outcomes of the last step did not fit into the queue")
            return
        now = lease.clock()
        record.ended_s = record.ended_s or now
        if lease.unheard_since is not None and now - lease.unheard_since > SILENT_S:
            self.unreported.fall_silent(record)
        if self.snapshot_due or not self._streaming:
            self._begin(record, snapshot)
        record.urgent = record.urgent or lease.idle
        self._sent_s, self._said = now, record.gauges and (record.state, record.gauges)
        lease.asks(now)
        # Decisions about a request's first tokens follow from the record in which it begins.
        self.ring.lay(record, record.presses, due=bool(record.opened))
        if record.closed:
            self.unreported.queue()
        if self._resyncs:
            self._resyncs = False
            self._lay_snapshot(record.step, snapshot())

    def send_text(self, step: TextStep) -> bool:
        """Queue a step of text, which waits for others. Return False if only `send` can queue it, as a record. Never
        waits."""
        lease, ring = self._lease, self.ring
        if lease.attention or lease.idle or ring.leaves or not (self.follows and lease.connected):
            return False
        if ring.qsize() >= RING_RECORDS:
            return False
        if (since := lease.unheard_since) is None:
            lease.asks(step[1])
        elif step[1] - since > SILENT_S:
            return False
        self._said = None
        ring.lay(step)
        return True

    def says_nothing_new(self, record: StepRecord, is_live: bool) -> bool:
        """Return whether the record of a step that computed no text need not be sent. vLLM makes some hundred such
        steps a second while another engine is to read the KV of finished requests, while KV is to arrive from another
        engine, or with a pooling model, where each step changes the numbers of requests until none is left. is_live: a
        request is live."""
        said, gauges = self._said, record.gauges
        if said is None or gauges is None or said[0] != record.state or not (record.is_empty and self.follows):
            return False
        is_same, is_recent = said[1] == gauges, self._lease.clock() - self._sent_s < EMPTY_REPORT_S
        is_pooling = not is_live and any(gauges[1:])
        return (is_recent and is_pooling) or (is_same and (is_recent or not is_live))

    def _begin(self, record: StepRecord, snapshot: Callable[[], list[tuple[Any, ...]]]) -> None:
        """Queue a snapshot, and take out of the record what the snapshot says already. A request that has arrived in
        the record is not in the snapshot, so that it counts as a new one. A new stream does not know the decisions of
        the old stream, so their outcomes are dropped."""
        if self.snapshot_due:
            self._kept_outcomes = []
            self.unreported.begin_stream(record)
        self.snapshot_due, self._streaming = False, True
        rows = snapshot()
        # Some have ended in the record, too. The snapshot tells the tokens of those that have thought.
        ended, think_tokens = {slot for slot, _ in record.closed}, record.think_tokens()
        begun = {slot for slot in record.begun() if slot not in ended or not think_tokens[slot]}
        record.keep(begun)
        said = [row for row in rows if row[0] not in begun]
        # A snapshot of all live requests is one that `resync` has asked for.
        self._resyncs &= len(said) < len(rows)
        record.outcomes = self._kept_outcomes + record.outcomes
        self._kept_outcomes = []
        self._lay_snapshot(record.step, said)

    def _lay_snapshot(self, step: int, rows: list[tuple[Any, ...]]) -> None:
        """Queue a snapshot of the requests in these rows. step: that of the record before or after it."""
        ended = self.unreported.tell(step, {row[0] for row in rows})
        self.ring.lay(SnapshotRecord(step, rows, ended, self.unreported.reported_session_id), presses=True)

    def resync(self) -> None:
        """Send a snapshot of all live requests after the next record, whose events count as ever."""
        self._resyncs = True

    def begin_again(self) -> None:
        """Send a snapshot of all live requests before the next record, in which requests may have other slots."""
        self._streaming = False

    @property
    def follows(self) -> bool:
        """Whether all that the agent knows has been sent on the stream, or waits on the ring."""
        return self._streaming and not (self._resyncs or self.snapshot_due)

    # ------------------------------------------------------------------------------- the link's thread, and gRPC's

    def new_ring(self) -> RecordRing:
        """Replace the ring for a new stream and return the new ring."""
        self.ring, self.largest_snapshot_bytes, self.heartbeat_s = RecordQueue(), 0, 0.0
        self._unanswered, self._said = deque(), None
        self._outcomes_out = self._outcomes_in
        return self.ring

    def leave(self) -> None:
        """Let the engine leave the stream, whose sender ends once all that is queued is sent; what comes later counts
        as unreported. If the engine is idle, the sender ends by itself."""
        self.ring.leaves = True
        self.ring.rouse()

    def has_left(self, ring: RecordRing) -> bool:
        """Return whether an idle engine has left the stream, so that its sender can end."""
        return ring.leaves and self._lease.idle and self.unreported.is_settled and not ring.qsize()

    @property
    def surplus(self) -> int:
        """Number of messages on the ring above the largest number of records."""
        return self.ring.qsize() - RING_RECORDS

    def begin_idle(self) -> None:
        """Send a new stream of an engine without requests the unreported tokens of those that have ended. The caller
        keeps the engine idle."""
        step, ended = self.unreported.tell_idle()
        if ended:
            self._kept_outcomes, self.snapshot_due, self._streaming = [], False, True
            self.ring.lay(SnapshotRecord(step, [], ended, self.unreported.reported_session_id), presses=True)
            self.ring.wake()

    def answered(self, step: int) -> float | None:
        """Note the answer to all steps up to this one, and measure the round trip of the report of this step. A later
        answer that names the same step answers another message, and measures nothing.

        Return the time at which the oldest report was queued that the answer does not name, None if there is none.
        """
        self.unreported.heard(step)
        if queued := self._queued.pop(step % ROUND_TRIP_STEPS, None):
            self.round_trip_ms = max(0.0, (self._lease.clock() - queued) * 1e3)
        waiting = self._unanswered
        while waiting and waiting[0][0] <= step:
            waiting.popleft()
        return waiting[0][1] if waiting else None

    def messages(self, ring: RecordRing, hello: Callable[[], agent_pb2.Hello]) -> Iterator[agent_pb2.ConnectRequest]:
        """Yield the messages that gRPC sends. gRPC's own thread waits in here for the engine's records."""
        yield agent_pb2.ConnectRequest(hello=hello())
        held: Message = None
        search = LoopSearch()
        reported_s, sent_s = -REST_S, self._lease.clock()
        while True:
            try:
                item = held if held is not None else self._first(ring, search)
            except queue.Empty:
                self.at_rest()
                if ring.leaves and self._lease.idle:
                    # An answer, or the record with which the engine has fallen idle, may be about to come.
                    ring.rest(LEAVE_S)
                    if self.has_left(ring):
                        return
                    ring.rouse()
                if not ring.qsize() and self._heartbeat_due(now := self._lease.clock(), sent_s):
                    self._queued.clear()
                    yield agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat())
                    sent_s = now
                continue
            held, sent_s = None, self._lease.clock()
            if item is None:
                # The process may be gone before the end of this side has arrived.
                goodbye = agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(last=True))
                yield from [goodbye] * (self.heartbeat_s > 0 and not ring.leaves)
                return
            if isinstance(item, agent_pb2.ConnectRequest):
                # The control plane's answer to this message names the newest report, which may be old, so no round trip
                # can be measured from it.
                self._queued.clear()
                yield item
            elif isinstance(item, SnapshotRecord):
                ring.took(1)
                yield from self._snapshot(item)
            else:
                if 0 < (rests_s := reported_s + REST_S - self._lease.clock()) <= REST_S:
                    ring.rest(rests_s)
                batch, held = self._gather(ring, item, search)
                self._outcomes_out += sum(len(record.outcomes) for record in batch)
                ring.took(sum(record.presses for record in batch), sum(bool(record.opened) for record in batch))
                for report in self._reports(batch):
                    yield agent_pb2.ConnectRequest(step=report)
                reported_s = self._lease.clock()

    def _heartbeat_due(self, now: float, sent_s: float) -> bool:
        """Return whether to send a heartbeat: nothing was sent for a while, or the engine makes no more steps and the
        control plane, which answers at most once a second, has not answered the last report yet. sent_s: time at which
        the newest message was sent."""
        waits = self._lease.unheard_since is not None and not self._lease.idle
        return self.heartbeat_s > 0 and (waits or now - sent_s >= self.heartbeat_s)

    def _reports(self, batch: list[Record]) -> Iterable[agent_pb2.StepReport]:
        """Return the one report of these records; several if there is one record, which is too large for one."""
        last = batch[-1]
        self._rows, self._step_ms = len(last.slots), last.step_time_ms or math.inf
        if isinstance(last, TextRecord):
            batch[-1] = last = StepRecord(*last)
        last.counters, last.gauges = self.counters(), last.gauges or self.gauges()
        self._queued[last.step % ROUND_TRIP_STEPS] = last.ended_s
        if len(self._unanswered) < UNANSWERED_REPORTS:
            self._unanswered.append((last.step, last.ended_s))
        if len(batch) == 1 and record_bytes(last) > self.bounds.report - REPORT_HEAD_BYTES:
            return reports_of(last, self.bounds.report, self.sparse_columns)
        return [step_report(batch, self.sparse_columns)]

    def _snapshot(self, snapshot: SnapshotRecord) -> Iterator[agent_pb2.ConnectRequest]:
        """Yield the messages of a snapshot. The control plane may answer each of them, with the number of an older
        report."""
        self._queued.clear()
        messages: Iterable[agent_pb2.ConnectRequest] = snapshot.parts(self.bounds.part)
        if not self.snapshot_parts:
            message, left_out = snapshot.whole(self.bounds.most)
            messages = [message]
            if left_out:
                why = "the control plane reads no snapshot in parts, and they do not fit into its largest message"
                logger.warning("meridian: %d live requests are not reported: %s", left_out, why)
        for message in messages:
            self.largest_snapshot_bytes = max(self.largest_snapshot_bytes, message.ByteSize())
            yield message

    def _first(self, ring: RecordRing, search: LoopSearch) -> Message:
        """Return the oldest item that waits, once its report interval is over. Raises queue.Empty if none arrives in
        time."""
        lease = self._lease
        wait_s = min(IDLE_WAIT_S if lease.idle else lease.merge_s, self.heartbeat_s or IDLE_WAIT_S)
        return _record(ring.get(wait_s, *self._wanted()), search)

    def _wanted(self) -> tuple[int, int]:
        """Return the number of records for which a report waits after a request has begun. And the number while none
        begins: the report interval, or more while steps are fast, or while nothing is measured and nobody acts on the
        report."""
        lease = self._lease
        steps = max(lease.report_interval_steps, min(FAST_STEPS, int(lease.report_interval_ms / self._step_ms)))
        late = max(1, min(steps, LATE_TOKENS // self.step_tokens))
        if self.measures or not (lease.merge_unmeasured or lease.frozen()):
            return late, steps
        return late, max(steps, min(MERGE_RECORDS, MERGE_ROWS // max(1, self._rows)))

    def _gather(self, ring: RecordRing, first: Record, search: LoopSearch) -> tuple[list[Record], Any]:
        """Return the records to merge into one report, and the first item that does not fit; None if all that waits
        fits."""
        batch, size = [first], record_bytes(first)
        while len(batch) < max(MERGE_RECORDS, self._lease.report_interval_steps):
            try:
                item = _record(ring.get_nowait(), search)
            except queue.Empty:
                break
            if item is None:
                ring.put(None)
                break
            if not isinstance(item, Record) or not mergeable(batch, item, self._lease.merge_loops):
                return batch, item
            size += record_bytes(item)
            if size > self.bounds.report - REPORT_HEAD_BYTES:
                return batch, item
            batch.append(item)
        return batch, None


def _record(item: Message | TextStep, search: LoopSearch) -> Message:
    """Return an item of the ring: the record of a step of text is made, and a record's looks for repetition are
    taken."""
    if isinstance(item, tuple):
        return record_of(item)
    if isinstance(item, StepRecord) and item.looks:
        item.loops = search.search(item.looks)
        item.looks = []
    return item
