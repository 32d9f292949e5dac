"""Runs the stream to the control plane, on a thread of its own.

The module owns the channel, reconnects, and handles each message of the stream. Messages that wait are in `inbox`,
`mailbox` and `outbox`, and what is in force is in `lease`; the engine-core thread uses these four and never waits.
Knows no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import threading
import time
from typing import TYPE_CHECKING

import grpc
from meridian.v1 import agent_pb2, agent_pb2_grpc

from meridian_agent.core.bad_settings import BadSettings
from meridian_agent.core.guard import MAX_FAULT
from meridian_agent.core.request_info import MAX_ID, clean
from meridian_agent.link import tls_look
from meridian_agent.link.credentials import AgentCredentials
from meridian_agent.link.fork_safety import Forks
from meridian_agent.link.inbox import INBOX_DECISIONS, Inbox
from meridian_agent.link.lease import Lease
from meridian_agent.link.mailbox import Arrived, Mailbox
from meridian_agent.link.messages import decisions_in
from meridian_agent.link.outbox import Outbox
from meridian_agent.link.settings_check import check
from meridian_agent.link.thread_seconds import ThreadSeconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

logger = logging.getLogger("vllm.meridian")

# Number of refused revisions to remember, and the seconds to remember each: after that a control plane with another
# store may use the same number for another revision.
REFUSED, REFUSED_S = 16, 600.0
BACKOFF_S = (0.2, 5.0)
# Status codes with which gRPC reports a TLS handshake that fails, or one that the agent waits for in vain.
MAY_BE_TLS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
# Largest number of failures that are remembered, so that the log has each of them once.
COMPLAINTS = 64
# Seconds within which the control plane must answer the agent's end of the stream, and the agent leave it.
GOODBYE_S = 2.0
# A stream shorter than this many seconds counts as a failure, so the wait before the next stream keeps doubling.
SETTLED_S = 1.0
# Smallest number of seconds after which an agent with nothing to report sends a heartbeat, whatever Welcome says.
MIN_HEARTBEAT_S = 0.1
# Seconds to wait for a server's first answer, at first and at most; each failed attempt doubles them, because the
# server may only be slow.
PATIENCE_S = (10.0, 60.0)
# Texts with which gRPC's implementations refuse a message of the agent for its size. A text about CLIENT is about a
# message to the agent.
TOO_LARGE = re.compile("(?<!CLIENT: Received message )larger than max|exceeds (the )?maximum", re.IGNORECASE)
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 16 << 20),
    # Without this, gRPC pings the server for each answer, to learn how large its window should be.
    ("grpc.http2.bdp_probe", 0),
    # The link sets the pace of attempts itself: it builds a new channel for each.
    ("grpc.enable_retries", 0),
    # Each agent picks a random address if a name, such as that of a headless service, has several.
    ("grpc.service_config", '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}'),
]


class ControlStream:
    """One engine's connection to one of `targets`: a random target after a stream that worked, else the next target.

    hello: builds the first message of every stream.
    prepare: returns the thinking markers that settings name; raises BadSettings if this engine cannot obey the
        settings. Called on the link's thread.
    keep: receives settings once they are in force; must not wait.
    rest_s: returns the seconds until an agent that is off comes back, 0 while it is on. A stream whose Hello reports
        the agent as off ends after this time.
    clock: returns monotonic seconds.
    limits: returns the values that settings give the engine's limits. Called on the link's thread.
    is_paused: returns whether vLLM is paused. Called on the link's thread.
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
        credentials: AgentCredentials | None = None,
        rest_s: Callable[[], float] = lambda: 0.0,
        limits: Callable[[agent_pb2.Settings], agent_pb2.EngineLimitValues | None] = lambda _: None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.lease = lease = Lease(clock)
        self._targets, self._hello, self._prepare, self._limits = targets, hello, prepare, limits
        self._is_paused = is_paused
        self._credentials = credentials or AgentCredentials()
        self._jitter, self._shuffle, self._rest_s = jitter, shuffle, rest_s
        self._forks = Forks()
        self.inbox = Inbox(lease)
        self.mailbox = Mailbox(lease, self.inbox, keep)
        self.outbox = Outbox(lease, self.inbox, self.restart, self._give_up)
        # Refused revisions, each with the error and the time of the refusal.
        self._refused: dict[int, tuple[str, float]] = {}
        # Targets that are still to be tried, and the number of failed attempts in a row.
        self._order: list[str] = []
        self._attempt = 0
        # Target, text without numbers, and stamps of the credentials' files of each failure that the log already has.
        self._complaints: set[tuple[object, ...]] = set()
        # Reason the agent had for ending the stream, for the log; empty if the server or the network ended it. And the
        # level of that line: the end may belong to normal work.
        self._why, self._why_level = "", logging.WARNING
        # The agent ended the stream because too many messages or decisions waited, or because a lease had run out.
        self._gave_up = False
        # The stream that is being opened must end at once, because its Hello or its deadline may be out of date.
        self._outdated = False
        self._stop = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="meridian-link", daemon=True)
        # The processor time of the link's own thread, and of those that gRPC starts for each stream.
        self.thread_seconds = ThreadSeconds()

    def start(self) -> None:
        self._thread.start()
        self.thread_seconds.watch([self._thread])

    def stop(self, *, fails: bool = False) -> None:
        """End the stream and the thread, without waiting for them unless the process ends. The agent ends its side of
        the stream first, so that the control plane knows that the engine shuts down. Records that are not sent within
        GOODBYE_S are lost.

        fails: whether an error ends the engine. The stream then breaks off, as if the engine had been killed. Only the
        first call has an effect.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        if fails:
            self.restart("the engine fails")
            return
        self.outbox.ring.put(None)
        if threading.main_thread().is_alive():
            # The thread is no daemon, so that the process does not end before the control plane knows.
            threading.Thread(target=self._say_goodbye, name="meridian-goodbye").start()
        else:
            # At a process's end Python starts no thread, or waits for none.
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Wait for the end of the stream, and then end what is left of it."""
        if self._thread.ident is not None:
            self._thread.join(GOODBYE_S)
        self.restart("the engine stops")

    def restart(self, why: str = "its Hello is out of date", level: int = logging.INFO) -> None:
        """End the stream, also one that is just being opened; the next stream begins with a new Hello. why: for the
        log, which has it at this level."""
        self._outdated = True
        self._ends_for(why, level)
        if self._call is not None:
            self._call.cancel()

    def _ends_for(self, why: str, level: int) -> None:
        """Note why the stream ends and the level of that in the log, unless a reason is known."""
        if not self._why:
            self._why, self._why_level = why, level

    def step_aside(self) -> None:
        """Answer messages on the link's thread, because the engine calls no hook of the agent any more; a new Hello
        gives the reason."""
        self.mailbox.step_aside()
        self.restart("the agent is off")

    def come_back(self) -> None:
        """Drop what was sent to the previous agent, and let the new agent begin with a snapshot of all live
        requests."""
        self._refused = {}
        self.mailbox.clear()
        self.outbox.begin_again()
        self.inbox.skip_to_new_stream()
        self.mailbox.begin()

    @property
    def refused(self) -> dict[int, str]:
        """Revisions that were refused within the last REFUSED_S seconds, each with its error."""
        now = self.lease.clock()
        return {revision: error for revision, (error, at) in self._refused.items() if now - at < REFUSED_S}

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def lapsed(self) -> int:
        """Return the parts of the directives whose lease has run out.

        A stream that stays silent past a lease is ended as well: a new stream gives agent and control plane the same
        state again.
        """
        lease = self.lease
        if lease.connected and lease.over(unheard_s := lease.unheard_s()):
            self._gave_up = True
            self.restart(f"nothing heard for {unheard_s:.1f} s", logging.WARNING)
        return lease.over(lease.silent_s())

    # ----------------------------------------------------------------------------------------- the link's own thread

    def _run(self) -> None:
        """Open one stream after another until the link stops, whatever a stream fails with."""
        while not self._stop.is_set():
            wait_s = BACKOFF_S[1]
            try:
                wait_s = self._round()
            except Exception:
                with contextlib.suppress(Exception):
                    logger.exception("meridian: an error of the agent ended a stream")
            self.mailbox.let_go()
            self._stop.wait(wait_s)

    def _round(self) -> float:
        """Run one stream to one of the targets; return the seconds to wait before the next stream."""
        # A fault may have ended the previous stream before its end was noted.
        self.mailbox.lose_stream()
        self.lease.say_state()
        heard = False
        if not self._order:
            self._order = list(self._targets)
            self._shuffle(self._order)
        began_s, self._gave_up = self.lease.clock(), False
        try:
            heard = self._stream(self._order.pop(0), _doubled(PATIENCE_S, self._attempt))
        except grpc.RpcError as error:
            logger.debug("meridian: stream ended: %s", error)
        except Exception:
            logger.exception("meridian: the stream failed")
        held = heard and not self._gave_up and self.lease.clock() - began_s > SETTLED_S
        self._attempt = 0 if held else self._attempt + 1
        if held:
            self._order = []
        return _doubled(BACKOFF_S, self._attempt) * (0.5 + self._jitter())

    def _stream(self, target: str, patience_s: float) -> bool:
        """Run one stream from its connection to its end; return whether the server answered at all."""
        heard, self._outdated = False, False
        self._why, self._why_level = "", logging.WARNING
        ring = self.outbox.new_ring()
        try:
            shown = self._credentials.metadata()
            opened = self._credentials.open(target, CHANNEL_OPTIONS)
        except (OSError, ValueError) as error:
            self._complain(target, None, str(error))
            return False
        others = {*threading.enumerate()}
        with opened as channel:
            self._forks.opened(channel)
            messages = self._forks.held(self.outbox.messages(ring, self._hello))
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            call = stub.Connect(messages, timeout=self._lasts_s(), metadata=shown)
            self._call = call
            self.thread_seconds.watch({*threading.enumerate()} - others)
            # A connection that cannot be made, and a server that never answers, would otherwise keep the call open for
            # a long time.
            patience = _timer(patience_s, self._lose_patience, call, patience_s)
            try:
                if self._stop.is_set() or self._outdated:
                    call.cancel()
                patience.start()
                for response in call:
                    if not heard:
                        heard = True
                        patience.cancel()
                        self._complaints.clear()
                        logger.info("meridian: connected to %s", target)
                    self._receive_after_welcome(response)
            except grpc.RpcError as error:
                largest = max(self.outbox.largest_snapshot_bytes, self.outbox.bounds.report)
                if (refused_bytes := _refused_bytes(error, largest)) is not None:
                    self._gave_up = True
                    self.outbox.bounds.shrink(refused_bytes)
                    self._why = f"a message was too large, {_status(error)}; the next ones are smaller"
                if _code(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._ends_for("the agent's rest is over", logging.INFO)
                if heard and not self._stop.is_set():
                    logger.log(self._why_level, "meridian: stream to %s ended: %s", target, self._why or _status(error))
                elif not self._stop.is_set():
                    self._complain(target, _code(error), self._why or _status(error))
            else:
                if self._why:
                    logger.log(self._why_level, "meridian: stream to %s ended: %s", target, self._why)
            finally:
                patience.cancel()
                self._lost()
                call.cancel()
        return heard

    def _lose_patience(self, call: grpc.Call, patience_s: float) -> None:
        self._why_level = logging.WARNING
        self._why = f"no answer within {patience_s:.0f} s"
        call.cancel()

    def _lasts_s(self) -> float | None:
        """Return the seconds that the stream may last; None for no limit."""
        rest_s = self._rest_s()
        return rest_s if 0 < rest_s < math.inf else None

    def _complain(self, target: str, code: grpc.StatusCode | None, text: str) -> None:
        """Log a failure once for each target and text, however often the link tries again, and once more after the
        credentials' files have changed. code: that of a failed call, to look for a cause that gRPC does not name."""
        # Ports and waiting times differ from attempt to attempt.
        kind = (target, re.sub(r"\d+", "", text), self._credentials.stamps())
        if kind in self._complaints:
            return
        if len(self._complaints) >= COMPLAINTS:
            self._complaints.clear()
        self._complaints.add(kind)
        if code in MAY_BE_TLS and (cause := tls_look.trouble(target, self._credentials)):
            text = f"{cause} ({text})"
        logger.warning("meridian: no stream to %s: %s", target, text)

    def _lost(self) -> None:
        self.mailbox.let_go()
        self.mailbox.lose_stream()
        if not self._stop.is_set():
            self.lease.say_state()
        self.outbox.ring.put(None)

    def _receive_after_welcome(self, response: agent_pb2.ConnectResponse) -> None:
        """Handle a message, or end a stream that does not begin with a Welcome: no outcome could be reported on it."""
        if self.lease.connected or response.WhichOneof("message") in {"welcome", "going_away"}:
            self._receive(response)
            return
        self._gave_up = True
        self.restart("it began without a Welcome", logging.WARNING)

    def _receive(self, response: agent_pb2.ConnectResponse) -> None:
        kind = response.WhichOneof("message")
        elsewhere = max(len(self.mailbox.arrived), self.outbox.surplus)
        decisions = decisions_in(response.directives, INBOX_DECISIONS)
        if kind != "welcome" and self.inbox.too_much(decisions, elsewhere):
            self._give_up("messages or decisions wait for the engine")
        elif kind == "directives":
            waits_since = self.outbox.answered(response.directives.step)
            self.mailbox.deliver(response.directives, self.outbox.ring, waits_since)
        elif kind == "settings":
            self._receive_settings(response.settings)
        elif kind == "freeze":
            self._receive_freeze(response.freeze)
        elif kind == "welcome":
            self.inbox.begin()
            self.outbox.sparse_columns = response.welcome.reads_sparse_columns
            self.outbox.snapshot_parts = response.welcome.reads_snapshot_parts
            heartbeat_ms = response.welcome.heartbeat_ms
            self.outbox.heartbeat_s = max(MIN_HEARTBEAT_S, heartbeat_ms / 1000) if heartbeat_ms else 0.0
            self.lease.answers_soon = heartbeat_ms > 0
            # Each part of each snapshot repeats it, so an id that no control plane gives counts as none.
            session_id = response.welcome.session_id
            self.outbox.unreported.session_id = session_id if len(session_id) <= MAX_ID else ""
            self.outbox.snapshot_due = True
            if other := response.welcome.other_incarnation:
                logger.warning(
                    "meridian: another process (%s) is connected to the control plane under this engine's name: if it "
                    "still runs, give each engine a MERIDIAN_ENGINE_ID of its own",
                    clean(other, MAX_ID),
                )
            self.lease.found()
            self.mailbox.while_idle(self.outbox.begin_idle)
            self.lease.say_state()
        elif kind == "going_away":
            logger.info("meridian: the control plane is going away: %s", clean(response.going_away.reason, MAX_FAULT))
            self._leave("the control plane is going away")

    def _leave(self, why: str) -> None:
        """End the stream once all is sent that counts as brought; at the latest after GOODBYE_S, such as from an engine
        that makes no step meanwhile. why: for the log."""
        self._ends_for(why, logging.INFO)
        self.outbox.leave()
        if self._call is not None:
            _timer(GOODBYE_S, self._call.cancel).start()

    def _give_up(self, why: str) -> None:
        """End a stream on which too much waits: a new stream is better than a decision that gets lost without an
        outcome."""
        logger.error("meridian: too many %s; opening a new stream", why)
        self._gave_up = True
        self.restart(f"too many {why}", logging.WARNING)

    def _receive_settings(self, settings: agent_pb2.Settings) -> None:
        try:
            check(settings)
        except BadSettings as error:
            # This refusal is not remembered, because a control plane that checks its policies may use the number for
            # another revision.
            self._refuse(settings, str(error), {})
            return
        try:
            markers = self._prepare(settings)
        except Exception as error:
            # An exception in a tokenizer or a parser must not end the stream: the next stream would bring the same
            # settings again.
            text = str(error)
            if not isinstance(error, BadSettings):
                text = f"{type(error).__name__}: {error}"
                logger.exception("meridian: revision %d could not be taken in", settings.revision)
            text = clean(text, MAX_FAULT)
            self._refuse(settings, text, {settings.revision: text})
            return
        status = agent_pb2.SettingsStatus(
            nonce=settings.nonce, revision=settings.revision, engine_limits=self._limits(settings)
        )
        message = agent_pb2.ConnectRequest(settings_status=status)
        self.mailbox.arrive(Arrived(message, self.outbox.ring, settings, markers))

    def _refuse(self, settings: agent_pb2.Settings, error: str, remembered: dict[int, str]) -> None:
        in_force = self.lease.revision
        logger.error("meridian: revision %d refused, %d stays in force: %s", settings.revision, in_force, error)
        noted = [(revision, (text, self.lease.clock())) for revision, text in remembered.items()]
        earlier = [(revision, refusal) for revision, refusal in self._refused.items() if revision not in remembered]
        self._refused = dict([*earlier, *noted][-REFUSED:])
        status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=in_force, error=clean(error, MAX_FAULT))
        self.outbox.ring.put(agent_pb2.ConnectRequest(settings_status=status))

    def _receive_freeze(self, freeze: agent_pb2.Freeze) -> None:
        lease, was = self.lease, self.lease.frozen()
        if not lease.frozen_here:
            lease.freeze_for(freeze.remaining_ms / 1000)
        if freeze.remaining_ms:
            logger.warning("meridian: frozen for %d s: %s", freeze.remaining_ms / 1000, clean(freeze.reason, MAX_FAULT))
        elif was and not lease.frozen():
            logger.warning("meridian: thawed")
        status = lease.freeze_status(freeze.nonce)
        status.paused = self._is_paused()
        self.mailbox.arrive(Arrived(agent_pb2.ConnectRequest(freeze_status=status), self.outbox.ring))


def _timer(seconds: float, call: Callable[..., object], *args: object) -> threading.Timer:
    """Return a timer that is not started, and for which the process does not wait at its end."""
    timer = threading.Timer(seconds, call, args)
    timer.daemon = True
    return timer


def _doubled(bounds: tuple[float, float], attempt: int) -> float:
    low, high = bounds
    return min(high, low * (1 << min(attempt, 10)))


def _code(error: grpc.RpcError) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _refused_bytes(error: grpc.RpcError, largest: int) -> int | None:
    """Return the bytes of the agent's message that was refused for its size, None if none was. gRPC has no code of its
    own for such a refusal, and each of its implementations has another text. largest: the bytes, if the text does not
    say."""
    too_much, text = grpc.StatusCode.RESOURCE_EXHAUSTED, _status(error)
    if not isinstance(error, grpc.Call) or error.code() is not too_much or not TOO_LARGE.search(text):
        return None
    sizes = re.search(r"\((\d+) vs\. \d+\)", text)
    return int(sizes[1]) if sizes else largest


def _status(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code()}: {error.details()}"
    return str(error)
