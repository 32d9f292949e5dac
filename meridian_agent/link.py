"""The stream to the control plane, on a thread of its own.

Owns the channel, reconnection, the ring of records that wait to be sent and the inbox of messages that wait to be
applied. The engine-core thread only adds to the one and pops from the other, and never waits. Knows no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_agent.credentials import Credentials
from meridian_agent.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES
from meridian_agent.messages import decisions_in, mergeable, opened_message, step_report
from meridian_agent.ring import Ring
from meridian_agent.settings import check
from meridian_agent.tracker import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

logger = logging.getLogger("vllm.meridian")

RING_RECORDS = 4096
INBOX_MESSAGES = 4096
# Decisions that wait to be taken in, or their outcomes to be sent: four for each request of the largest engine.
INBOX_DECISIONS = 1 << 18
MERGE_RECORDS = 256
# Longest a record waits for the others of its report interval; an engine that falls idle still reports.
MERGE_WAIT_S = 0.05
# Between two reports: steps faster than this share one. Longest that nobody is looked for while no request is live.
REST_S, IDLE_WAIT_S = 0.002, 1.0
# Refused revisions that are remembered.
REFUSED = 16
# Reports whose time of queueing is remembered.
ROUND_TRIP_STEPS = 256
BACKOFF_S = (0.2, 5.0)
# A stream that ended sooner is no sign that the next one will hold: the waits go on growing.
SETTLED_S = 1.0
# How long a server may take until its first answer; doubled with each attempt in vain, for one that is merely slow.
PATIENCE_S = (10.0, 60.0)
# What part of the shortest lease a record waits at most: the answer to it must come within that lease.
MERGE_LEASE_SHARE = 0.25
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 16 << 20),
    # Ours to pace: the channel is rebuilt at each attempt.
    ("grpc.enable_retries", 0),
    # Of the addresses behind one name, a headless service's say, each agent takes one at random.
    ("grpc.service_config", '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}'),
]


@dataclass(slots=True)
class SnapshotRecord:
    step: int
    rows: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Arrived:
    """Settings or a freeze on their way into force, and what is said on which stream once they hold."""

    status: agent_pb2.ConnectRequest
    ring: RecordRing
    settings: agent_pb2.Settings | None = None
    markers: Any = None
    # Whoever takes it out says so: the engine's thread, or the link's for an engine that is idle.
    unsaid: list[bool] = field(default_factory=lambda: [True])


RecordRing = Ring[StepRecord | SnapshotRecord | agent_pb2.ConnectRequest | None]


class Link:
    """One engine's connection, to one of `targets`: after a stream that worked any of them, after a failure the next.

    hello: builds the first message of every stream.
    prepare: finds the thinking markers that settings come to, raises ValueError when they cannot be honoured; called on
        the link's thread.
    keep: given settings once they hold; must not wait. rest_s: seconds until an agent that is off comes back, 0 while
        it is on: with that time ends the stream whose Hello said so. clock: monotonic seconds.
    """

    def __init__(
        self,
        targets: list[str],
        hello: Callable[[], agent_pb2.Hello],
        prepare: Callable[[agent_pb2.Settings], Any],
        keep: Callable[[agent_pb2.Settings], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        shuffle: Callable[[list[str]], None] = random.shuffle,
        credentials: Credentials | None = None,
        rest_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._targets, self._hello, self._prepare, self._keep = targets, hello, prepare, keep
        self._credentials = credentials or Credentials()
        # Why there is no stream, as far as the log has it.
        self._complaints: set[tuple[str, object]] = set()
        # Why this side has ended the stream, where the engine's log would not tell otherwise.
        self._why = ""
        self._clock, self._jitter, self._shuffle, self._rest_s = clock, jitter, shuffle, rest_s
        # A new one for every stream, so that one that has ended cannot take what belongs to the next; None ends it.
        self._ring: RecordRing = Ring()
        # Directives in order of arrival; None marks the start of a new stream.
        self.inbox: deque[agent_pb2.Directives | None] = deque()
        # Newest report that was answered, with everything that was decided from it taken in.
        self.answered_step = 0
        # What the engine takes in before it does anything else, oldest first; appended here, popped there.
        self.arrived: deque[Arrived] = deque()
        # Set on the link's thread, read and cleared on the engine's: records may flow, a snapshot is due first.
        self.connected = False
        self.snapshot_due = False
        # Set by the engine's thread: no request is live, so no step will come to report outcomes.
        self.idle = True
        # Held for the moment in which a message or the engine's falling idle is noted, so that one of both threads
        # answers for each decision, and only one.
        self.handover = threading.Lock()
        self.report_interval_steps = 1
        self.lease_s = 30.0
        # Leases with what ends past them.
        self._leases: list[tuple[float, int]] = [(self.lease_s, ALL_BUT_CAPS)]
        self._merge_s = MERGE_LEASE_SHARE * self.lease_s
        self.revision = 0
        # The newest settings that have been put in force, with their markers.
        self.held: tuple[agent_pb2.Settings, Any] | None = None
        # Revisions that were refused, with the error.
        self.refused: dict[int, str] = {}
        # Until when nothing of ours may hold; infinite where the environment says so.
        self._frozen_until = 0.0
        self._said = agent_pb2.AGENT_STATE_UNSPECIFIED
        self.reports_dropped = 0
        # Decisions put into the inbox and taken out, outcomes queued and sent, each counted by one thread.
        self._decisions_in = self._decisions_out = self._outcomes_in = self._outcomes_out = 0
        # From queueing a report to the answer to it, newest.
        self.round_trip_ms = 0.0
        self._queued: dict[int, float] = {}
        self._streaming = False
        # Outcomes of records that were dropped: each decision still gets its one outcome.
        self._kept_outcomes: list[tuple[int, int, int, str]] = []
        self._lost_since: float | None = clock()
        self._unheard_since: float | None = None
        # The stream was ended because too much came on it.
        self._gave_up = False
        self._stop = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="meridian-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the stream and the thread; records that wait are lost."""
        self._stop.set()
        self.restart()
        self._ring.put(None)

    def restart(self) -> None:
        """End the stream; the next one says Hello anew."""
        if self._call is not None:
            self._call.cancel()

    def step_aside(self) -> None:
        """The engine calls no hook of ours any more: what arrives is answered for here, and a new Hello says why."""
        self.idle = True
        self.restart()

    def come_back(self) -> None:
        """Another agent begins: it sends the whole state, and what was said to the one before is not for it."""
        self.refused = {}
        self.resync()
        with contextlib.suppress(IndexError):
            while self.inbox[0] is not None:
                self.take()
        self.idle = False

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def send(self, record: StepRecord, snapshot: Callable[[], list[tuple[Any, ...]]]) -> None:
        """Lay down a record; with a snapshot due, that first. Never waits; a full ring drops and asks for a snapshot.

        It is sent when `wake` is called, and else a little later. What the last record before a rest would have told is
        not waited for: the stream begins anew.
        """
        if not self.connected or self._new_stream_waits():
            self._streaming = False
            return
        self._outcomes_in += len(record.outcomes)
        if self._outcomes_in - self._outcomes_out > INBOX_DECISIONS:
            self._give_up("outcomes wait to be sent")
        if self._ring.qsize() >= RING_RECORDS:
            self._streaming = False
            self.reports_dropped += 1
            self._kept_outcomes += record.outcomes
            if self.idle:
                # No record comes after it in which these could be told.
                self.restart()
            return
        if self.snapshot_due or not self._streaming:
            self._begin(record, snapshot)
        now = self._clock()
        if self._unheard_since is None:
            self._unheard_since = now
        self._queued[record.step % ROUND_TRIP_STEPS] = now
        self._ring.lay(record)

    def wake(self) -> None:
        """Have what was laid down sent."""
        self._ring.wake()

    def take(self) -> tuple[agent_pb2.Directives | None, int]:
        """The oldest message of the inbox, with the number of its decisions. Raises IndexError when it is empty."""
        message = self.inbox.popleft()
        size = 0 if message is None else decisions_in(message)
        self._decisions_out += size
        return message, size

    def _new_stream_waits(self) -> bool:
        """Whether the engine has yet to take in that a new stream began: its record speaks of the old one."""
        try:
            return self.inbox[0] is None
        except IndexError:
            return False

    def _begin(self, record: StepRecord, snapshot: Callable[[], list[tuple[Any, ...]]]) -> None:
        """Send the whole state; what the record says of it is in there already. A new stream knows no old decision."""
        if self.snapshot_due:
            self._kept_outcomes = []
        self.snapshot_due, self._streaming = False, True
        record.opened, record.slots, record.closed, record.preempted, record.resumed = [], [], [], [], []
        record.text = ()
        record.outcomes = self._kept_outcomes + record.outcomes
        self._kept_outcomes = []
        self._ring.lay(SnapshotRecord(record.step, snapshot()))

    def resync(self) -> None:
        """Send the whole state with the next record: what was told before is to be told again."""
        self._streaming = False

    def _silent_s(self) -> float:
        """How long nothing was heard while there was something to answer, or no stream at all; 0 while all is well."""
        since = self._lost_since if self._lost_since is not None else self._unheard_since
        return 0.0 if since is None else self._clock() - since

    def lapsed(self) -> int:
        """What holds no longer because its lease is over, as parts of directives.

        A stream that is silent for so long is given up: a new one tells both sides anew what holds.
        """
        silent_s, parts = self._silent_s(), 0
        if silent_s:
            for lease_s, ending in self._leases:
                if silent_s > lease_s:
                    parts |= ending
        if parts and self.connected:
            self._why = f"nothing heard for {silent_s:.1f} s"
            self.restart()
        return parts

    def frozen(self) -> bool:
        """Whether the engine is to run as stock vLLM."""
        return self._frozen_until > 0 and self._clock() < self._frozen_until

    def taken_in(self, arrived: Arrived) -> None:
        """Say that something holds now, once.

        Called by the engine when it does. For an idle engine the link's thread says so at once: whatever that engine
        does next, it first takes in what has arrived.
        """
        try:
            arrived.unsaid.pop()
        except IndexError:
            return
        if arrived.settings is not None:
            self.hold(arrived.settings, arrived.markers)
            self._keep(arrived.settings)
        arrived.ring.put(arrived.status)

    def hold(self, settings: agent_pb2.Settings, markers: Any) -> None:
        """Put the link's own part of settings in force."""
        self.held = settings, markers
        self.revision = settings.revision
        self.lease_s = settings.lease_ms / 1000
        self.report_interval_steps = max(1, settings.report_interval_steps)
        own = ((settings.scheduler_lease_ms, ORDER | CAPS), (settings.entropy_lease_ms, RULES))
        sections = [(ms / 1000, parts) for ms, parts in (*own, (settings.kv_memory_lease_ms, MEMORY)) if ms]
        self._leases = [(self.lease_s, ALL_BUT_CAPS), *sections]
        self._merge_s = MERGE_LEASE_SHARE * min(lease_s for lease_s, _ in self._leases)

    # ------------------------------------------------------------------------------------------ called on any thread

    @property
    def state(self) -> agent_pb2.AgentState.ValueType:
        if self._silent_s() > self.lease_s:
            return agent_pb2.AGENT_STATE_DEGRADED
        return agent_pb2.AGENT_STATE_READY if self.connected else agent_pb2.AGENT_STATE_STALE

    def say_state(self) -> agent_pb2.AgentState.ValueType:
        """The state, and a line in the log where it has changed."""
        state = self.state
        if state != self._said:
            self._said = state
            name = agent_pb2.AgentState.Name(state).removeprefix("AGENT_STATE_")
            logger.info("meridian: %s (revision %d)", name, self.revision)
        return state

    def freeze_for(self, seconds: float) -> None:
        """Run as stock vLLM for so long from now; infinite for good."""
        self._frozen_until = self._clock() + seconds if seconds else 0.0

    def freeze_status(self, nonce: int = 0) -> agent_pb2.FreezeStatus:
        return agent_pb2.FreezeStatus(nonce=nonce, frozen=self.frozen(), locally=self._frozen_until == math.inf)

    # ----------------------------------------------------------------------------------------- the link's own thread

    def _run(self) -> None:
        attempt, order = 0, list[str]()
        while not self._stop.is_set():
            self.say_state()
            heard = False
            if not order:
                order = list(self._targets)
                self._shuffle(order)
            began_s, self._gave_up = self._clock(), False
            try:
                heard = self._stream(order.pop(0), _doubled(PATIENCE_S, attempt))
            except grpc.RpcError as error:
                logger.debug("meridian: stream ended: %s", error)
            except Exception:
                logger.exception("meridian: the stream failed")
            held = heard and not self._gave_up and self._clock() - began_s > SETTLED_S
            attempt = 0 if held else attempt + 1
            if heard:
                order = []
            self._stop.wait(_doubled(BACKOFF_S, attempt) * (0.5 + self._jitter()))

    def _stream(self, target: str, patience_s: float) -> bool:
        """One stream from connect to its end; returns whether the server answered at all."""
        heard, self._why = False, ""
        self._ring = Ring()
        self._outcomes_out = self._outcomes_in
        try:
            opened = self._credentials.open(target, CHANNEL_OPTIONS)
        except (OSError, ValueError) as error:
            self._complain(target, str(error), str(error))
            return False
        with opened as channel:
            call = agent_pb2_grpc.AgentServiceStub(channel).Connect(self._requests(self._ring), timeout=self._lasts_s())
            self._call = call
            if self._stop.is_set():
                call.cancel()
            # Neither a connection that never comes about nor a server that never answers ends by itself for long.
            patience = threading.Timer(patience_s, call.cancel)
            patience.daemon = True
            patience.start()
            try:
                for response in call:
                    if not heard:
                        heard = True
                        patience.cancel()
                        self._complaints.clear()
                        logger.info("meridian: connected to %s", target)
                    self._receive(response)
            except grpc.RpcError as error:
                if heard and not self._stop.is_set():
                    logger.warning("meridian: stream to %s ended: %s", target, self._why or _status(error))
                elif not self._stop.is_set():
                    self._complain(target, _code(error), _status(error))
            finally:
                patience.cancel()
                self._lost()
                call.cancel()
        return heard

    def _lasts_s(self) -> float | None:
        """How long the stream may last; None for as long as it goes."""
        rest_s = self._rest_s()
        return rest_s if 0 < rest_s < math.inf else None

    def _complain(self, target: str, kind: object, text: str) -> None:
        """Once for each kind, however often it is tried again."""
        if (target, kind) not in self._complaints:
            self._complaints.add((target, kind))
            logger.warning("meridian: no stream to %s: %s", target, text)

    def _lost(self) -> None:
        if self._lost_since is None:
            self._lost_since = self._unheard_since if self._unheard_since is not None else self._clock()
        self.connected = False
        if not self._stop.is_set():
            self.say_state()
        self._ring.put(None)

    def _receive(self, response: agent_pb2.ConnectResponse) -> None:
        self._unheard_since = None
        kind = response.WhichOneof("message")
        if kind != "welcome" and self._too_much(decisions_in(response.directives)):
            self._give_up("messages or decisions wait to be taken in")
        elif kind == "directives":
            if queued := self._queued.get(response.directives.step % ROUND_TRIP_STEPS):
                self.round_trip_ms = (self._clock() - queued) * 1e3
            with self.handover:
                self._settle_if_idle(response.directives)
                self._hand_over(response.directives)
        elif kind == "settings":
            self._receive_settings(response.settings)
        elif kind == "freeze":
            self._receive_freeze(response.freeze)
        elif kind == "welcome":
            self.inbox.clear()
            self._decisions_in = self._decisions_out
            self.inbox.append(None)
            self._lost_since = None
            self.snapshot_due = True
            self.connected = True
            self.say_state()
        elif kind == "going_away":
            logger.info("meridian: the control plane is going away: %s", response.going_away.reason)
            self.restart()

    def _hand_over(self, directives: agent_pb2.Directives) -> None:
        """What decides nothing only says how far the control plane is, once all before it has been taken in."""
        if self.inbox or len(directives.ListFields()) > (directives.step > 0):
            self._decisions_in += decisions_in(directives)
            self.inbox.append(directives)
        else:
            self.answered_step = directives.step

    def _too_much(self, decisions: int) -> bool:
        """Whether a message with so many decisions, on top of what waits, is more than any engine needs."""
        waiting = self._decisions_in - self._decisions_out + decisions
        messages = max(len(self.inbox), len(self.arrived), self._ring.qsize() - RING_RECORDS)
        return messages >= INBOX_MESSAGES or waiting > INBOX_DECISIONS

    def _give_up(self, why: str) -> None:
        """End a stream on which more comes than is needed: rather than lose a decision unseen, it begins anew."""
        logger.error("meridian: too many %s; connecting anew", why)
        self._gave_up = True
        self.restart()

    def _settle_if_idle(self, directives: agent_pb2.Directives) -> None:
        """Answer for an engine without live requests: the requests are gone, a plan holds from the next step on."""
        if not self.idle:
            return
        report = agent_pb2.StepReport(step=directives.step)
        for decisions in (directives.forces, directives.caps, directives.tiers, directives.probes):
            for decision in decisions:
                report.outcomes.add(decision_id=decision.decision_id, outcome=agent_pb2.OUTCOME_REQUEST_GONE)
            del decisions[:]
        if directives.plan.decision_id:
            outcome = agent_pb2.OUTCOME_SHADOWED if directives.plan.shadow else agent_pb2.OUTCOME_APPLIED
            if frozen := self.frozen():
                outcome = agent_pb2.OUTCOME_AGENT_OFF
            report.outcomes.add(decision_id=directives.plan.decision_id, outcome=outcome)
            directives.plan.decision_id = 0
            if frozen:
                directives.ClearField("plan")
        if report.outcomes:
            self._ring.put(agent_pb2.ConnectRequest(step=report))

    def _receive_settings(self, settings: agent_pb2.Settings) -> None:
        try:
            check(settings)
        except ValueError as error:
            # Not remembered: the revision of that number may be another one where policies are checked.
            self._refuse(settings, str(error), {})
            return
        try:
            markers = self._prepare(settings)
        except Exception as error:
            # No surprise in a tokenizer or parser may end the stream, which would bring the same settings again.
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._refuse(settings, text, {settings.revision: text})
            return
        status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=settings.revision)
        message = agent_pb2.ConnectRequest(settings_status=status)
        self._arrive(Arrived(message, self._ring, settings, markers))

    def _refuse(self, settings: agent_pb2.Settings, error: str, remembered: dict[int, str]) -> None:
        logger.error("meridian: revision %d refused, %d stays in force: %s", settings.revision, self.revision, error)
        newest = sorted({**self.refused, **remembered}.items())[-REFUSED:]
        self.refused = dict(newest)
        status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=self.revision, error=error)
        self._ring.put(agent_pb2.ConnectRequest(settings_status=status))

    def _receive_freeze(self, freeze: agent_pb2.Freeze) -> None:
        was = self.frozen()
        if self._frozen_until != math.inf:
            self.freeze_for(freeze.remaining_ms / 1000)
        if freeze.remaining_ms:
            logger.warning("meridian: frozen for %d s: %s", freeze.remaining_ms / 1000, freeze.reason)
        elif was and not self.frozen():
            logger.warning("meridian: thawed")
        status = agent_pb2.ConnectRequest(freeze_status=self.freeze_status(freeze.nonce))
        self._arrive(Arrived(status, self._ring))

    def _arrive(self, arrived: Arrived) -> None:
        self.arrived.append(arrived)
        with self.handover:
            if self.idle:
                self.taken_in(arrived)

    def _requests(self, ring: RecordRing) -> Iterator[agent_pb2.ConnectRequest]:
        """What gRPC sends, one message at a time; it waits here, on its own thread, for the engine's records."""
        yield agent_pb2.ConnectRequest(hello=self._hello())
        held: StepRecord | SnapshotRecord | agent_pb2.ConnectRequest | None = None
        while True:
            try:
                item = held if held is not None else ring.get(IDLE_WAIT_S if self.idle else MERGE_WAIT_S)
            except queue.Empty:
                continue
            held = None
            if item is None:
                return
            if isinstance(item, agent_pb2.ConnectRequest):
                yield item
            elif isinstance(item, SnapshotRecord):
                rows = [opened_message(row) for row in item.rows]
                yield agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=item.step, requests=rows))
            else:
                batch, held = self._gather(ring, item)
                self._outcomes_out += sum(len(record.outcomes) for record in batch)
                yield agent_pb2.ConnectRequest(step=step_report(batch))
                ring.rest(REST_S)

    def _gather(self, ring: RecordRing, first: StepRecord) -> tuple[list[StepRecord], Any]:
        """The records to merge into one report: what the interval asks for, and whatever else already waits."""
        batch, last_s = [first], self._clock() + self._merge_s
        while len(batch) < max(MERGE_RECORDS, self.report_interval_steps):
            missing = self.report_interval_steps - len(batch) if self._clock() < last_s else 0
            try:
                item = ring.get(MERGE_WAIT_S, missing) if missing > 0 else ring.get_nowait()
            except queue.Empty:
                return batch, None
            if item is None:
                ring.put(None)
                return batch, None
            if not isinstance(item, StepRecord) or not mergeable(batch, item):
                return batch, item
            batch.append(item)
        return batch, None


def _doubled(bounds: tuple[float, float], attempt: int) -> float:
    low, high = bounds
    return min(high, low * (1 << min(attempt, 10)))


def _code(error: grpc.RpcError) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _status(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code()}: {error.details()}"
    return str(error)
