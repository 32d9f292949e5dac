"""Knows what is in force on an engine and since when its control plane has been silent: settings, leases, a freeze, and
the state that follows from them.

The module owns these facts; the engine's thread and the link's thread both read the facts, so each fact changes in one
assignment. Knows no stream and does no I/O; the clock is passed in.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

logger = logging.getLogger("vllm.meridian")

# Longest time in seconds, and largest part of the shortest lease, that a record waits for other records of its report
# interval: the answer to the report must arrive within the lease. The record of an engine that falls idle never waits
# for others.
MERGE_WAIT_S, MERGE_LEASE_SHARE = 0.5, 0.25
# Seconds after which the answer to a report is late. The control plane answers at least once a second.
LATE_S = 3.0
# The log line of each state. The log limits the lines of one template, so a stream that often comes and goes must not
# use up the lines that tell of lost leases.
SAYS = {
    state: f"meridian: {name.removeprefix('AGENT_STATE_')} (revision %d)"
    for name, state in agent_pb2.AgentState.items()
}


class Lease:
    """The lease of one engine. clock: returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        # A stream is up, so records can be sent. Set on the link's thread.
        self.connected = False
        # Whether something waits for the engine in the inbox or the mailbox. Several threads read it; it changes in
        # `call_for_attention` and `give_attention` only.
        self.attention = False
        # No request is live, so no step will follow that could report outcomes. Set on the engine's thread.
        self.idle = True
        # Clock time at which the newest idle time began; and the silence before it, which goes on with the next report:
        # until then there is nothing to answer.
        self._idle_since = clock()
        self._carried_s = 0.0
        # Seconds of the newest idle time that has ended, at `_idle_since`.
        self._idle_s = 0.0
        self.revision = 0
        # The newest settings that have been put in force, with their markers.
        self.held: tuple[agent_pb2.Settings, Any] | None = None
        self.report_interval_steps, self.report_interval_ms = 1, 0
        # Settings.merge_loops and Settings.merge_unmeasured.
        self.merge_loops = self.merge_unmeasured = False
        self.lease_s = 30.0
        # (seconds, parts of the directives that end after this much silence) of each lease.
        self._leases: list[tuple[float, int]] = [(self.lease_s, ALL_BUT_CAPS)]
        self._shortest_s = self.lease_s
        self.merge_s = min(MERGE_WAIT_S, MERGE_LEASE_SHARE * self._shortest_s)
        # Clock time until which the engine runs as stock vLLM; infinite if MERIDIAN_FREEZE is set.
        self._frozen_until = 0.0
        self._said = agent_pb2.AGENT_STATE_UNSPECIFIED
        # Clock time since which no stream has answered, and since which a report on this stream waits for its first
        # answer; None if an answer has arrived or nothing waits.
        self._lost_since: float | None = clock()
        self.unheard_since: float | None = None
        # Whether the stream's control plane answers within LATE_S even if the engine makes no step, because it asks for
        # heartbeats.
        self.answers_soon = False

    # -------------------------------------------------------------------------------------------- the control plane

    def begins(self) -> None:
        """End the idle time, because a request has arrived."""
        self._leave_out_idle_time()
        if self.idle and self.connected and self.unheard_since is not None:
            self._carried_s, self.unheard_since = self.clock() - self.unheard_since, None
        self.idle = False

    def falls_idle(self) -> None:
        """Begin an idle time, because no request is live any more."""
        if not self.idle:
            self._idle_since = self.clock()
        self.idle = True

    def _leave_out_idle_time(self) -> None:
        """Let a silence count as if the idle time so far had not been: an idle engine with a stream waits for no
        answer. The caller holds the mailbox's lock, so that no answer arrives meanwhile."""
        if self.idle and self.connected:
            began_s, self._idle_since = self._idle_since, self.clock()
            self._idle_s = self._idle_since - began_s
            self._lost_since = self._until_now(self._lost_since, began_s)
            self.unheard_since = self._until_now(self.unheard_since, began_s)

    def _until_now(self, then: float | None, end_s: float) -> float | None:
        """Return since when a silence lasts that began at `then` and does not count after `end_s`."""
        return None if then is None else self.clock() - max(0.0, end_s - then)

    def call_for_attention(self) -> None:
        """Let the engine look into the inbox and the mailbox before its next step. Any thread calls this, after it has
        put something there, so that no look can miss it."""
        self.attention = True

    def give_attention(self) -> None:
        """Note that the engine's thread is about to look into the inbox or the mailbox. It calls this before it looks,
        so that what arrives during the look calls for another one."""
        self.attention = False

    def asks(self, now: float) -> None:
        """Note that a report waits for its answer since `now`, unless an older report does."""
        if self.unheard_since is None:
            self.unheard_since, self._carried_s = now - self._carried_s, 0.0

    def heard(self, waits_since: float | None = None) -> None:
        """Note that the control plane has answered. waits_since: time since which the oldest report waits that the
        answer does not name, None if none does: answers that are late renew no lease beyond what they answer."""
        if waits_since is not None and not self.idle and waits_since < self._idle_since - self._idle_s:
            waits_since += self._idle_s
        self._lost_since, self.unheard_since, self._carried_s = None, waits_since, 0.0

    def found(self) -> None:
        """Note that a stream has begun. While decisions are in force this renews no lease: only an answer shows that
        the control plane still knows of the decisions."""
        self.unheard_since, self._carried_s = None, 0.0
        if self.idle:
            self._lost_since = None
        self.connected = True

    def lost(self) -> None:
        """Note that the stream has ended; its silence before the end counts towards the lease."""
        self._leave_out_idle_time()
        if self._lost_since is None:
            unheard_since = self.unheard_since
            self._lost_since = self.clock() - self._carried_s if unheard_since is None else unheard_since
        self.connected = False

    def silent_s(self) -> float:
        """Return the seconds for which the control plane has not answered, over all streams and the time between them;
        0 if no answer is overdue."""
        if self.connected and self.idle:
            return 0.0
        return self._since(self._lost_since if self._lost_since is not None else self.unheard_since)

    def unheard_s(self) -> float:
        """Return the seconds for which a report on this stream has waited for an answer."""
        return 0.0 if self.idle else self._since(self.unheard_since)

    def _since(self, then: float | None) -> float:
        return 0.0 if then is None else self.clock() - then

    def steady_until(self) -> float:
        """Return the time on the clock until which neither the parts that silence ends, nor the state, nor a freeze
        change, if no stream begins or ends meanwhile and no message arrives. A report that is sent from now on waits
        for its answer for at least the shortest lease, less the silence that goes on with it."""
        silent_s, unheard_s = self.silent_s(), self.unheard_s()
        if self.connected and (silent_s > self._shortest_s or unheard_s > self._shortest_s or self._late):
            # An answer would renew leases that have run out, or the answers would be in time again.
            return 0.0
        # With the next report the silence before it goes on.
        carried_s = self._carried_s
        coming = [lease_s - silent_s - carried_s for lease_s, _ in self._leases if lease_s >= silent_s]
        if self.connected and self.answers_soon:
            coming.append(LATE_S - unheard_s - carried_s)
        if self.frozen():
            coming.append(self._frozen_until - self.clock())
        return self.clock() + min(coming) if coming else math.inf

    # --------------------------------------------------------------------------------- settings, leases and freezes

    def hold(self, settings: agent_pb2.Settings, markers: Any) -> None:
        """Put in force the part of the settings that concerns the link: the revision, when reports are sent, and the
        leases."""
        self.held = settings, markers
        self.revision = settings.revision
        self.lease_s = settings.lease_ms / 1000
        self.report_interval_steps = max(1, settings.report_interval_steps)
        self.report_interval_ms = settings.report_interval_ms
        self.merge_loops, self.merge_unmeasured = settings.merge_loops, settings.merge_unmeasured
        own = ((settings.scheduler_lease_ms, ORDER | CAPS), (settings.entropy_lease_ms, RULES))
        sections = [(ms / 1000, parts) for ms, parts in (*own, (settings.kv_memory_lease_ms, MEMORY)) if ms]
        self._leases = [(self.lease_s, ALL_BUT_CAPS), *sections]
        self._shortest_s = min(lease_s for lease_s, _ in self._leases)
        self.merge_s = min(MERGE_WAIT_S, MERGE_LEASE_SHARE * self._shortest_s)

    def over(self, silent_s: float) -> int:
        """Return the parts of the directives that a silence of `silent_s` seconds ends."""
        parts = 0
        if silent_s <= self._shortest_s:
            return parts
        for lease_s, ending in self._leases:
            if silent_s > lease_s:
                parts |= ending
        return parts

    def frozen(self) -> bool:
        """Return whether a freeze is in force, in which the engine runs as stock vLLM."""
        return self._frozen_until > 0 and self.clock() < self._frozen_until

    @property
    def frozen_here(self) -> bool:
        """Whether the engine's own environment (MERIDIAN_FREEZE) has frozen the engine for good."""
        return self._frozen_until == math.inf

    def freeze_for(self, seconds: float) -> None:
        """Freeze the engine for this many seconds from now; 0 ends a freeze, and infinity has no end."""
        self._frozen_until = self.clock() + seconds if seconds else 0.0

    def freeze_status(self, nonce: int = 0) -> agent_pb2.FreezeStatus:
        return agent_pb2.FreezeStatus(nonce=nonce, frozen=self.frozen(), locally=self.frozen_here)

    # ------------------------------------------------------------------------------------------------- the state

    @property
    def state(self) -> agent_pb2.AgentState.ValueType:
        if self.silent_s() > self.lease_s:
            return agent_pb2.AGENT_STATE_DEGRADED
        in_time = self.connected and not self._late
        return agent_pb2.AGENT_STATE_READY if in_time else agent_pb2.AGENT_STATE_STALE

    @property
    def _late(self) -> bool:
        """Whether answers to reports are so late that the decisions in force are old."""
        return self.answers_soon and self.unheard_s() > LATE_S

    def say_state(self) -> agent_pb2.AgentState.ValueType:
        """Return the state; log it if it has changed."""
        state = self.state
        if state != self._said:
            self._said = state
            logger.info(SAYS[state], self.revision)
        return state
