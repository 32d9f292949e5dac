"""Knows what holds on an engine, and since when nothing was heard: settings, leases, a freeze, and the state they come
to.

Owns these facts, which the engine's thread and the link's both read; each is one assignment. Knows no stream and does
no I/O; time is passed in.
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

# Longest a record waits for the others of its report interval, and what part of the shortest lease: the answer to it
# must come within that. An engine that falls idle still reports.
MERGE_WAIT_S, MERGE_LEASE_SHARE = 0.25, 0.25


class Lease:
    """One engine's. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        # Set on the link's thread: records may flow.
        self.connected = False
        # Set on the engine's thread: no request is live, so no step will come to report outcomes.
        self.idle = True
        self.revision = 0
        # The newest settings that have been put in force, with their markers.
        self.held: tuple[agent_pb2.Settings, Any] | None = None
        self.report_interval_steps = 1
        self.lease_s = 30.0
        # Leases with what ends past them.
        self._leases: list[tuple[float, int]] = [(self.lease_s, ALL_BUT_CAPS)]
        self._shortest_s = self.lease_s
        self.merge_s = min(MERGE_WAIT_S, MERGE_LEASE_SHARE * self._shortest_s)
        # Until when nothing of ours may hold; infinite where the environment says so.
        self._frozen_until = 0.0
        self._said = agent_pb2.AGENT_STATE_UNSPECIFIED
        # Since when there was no stream that answered, and since when this one has not answered.
        self._lost_since: float | None = clock()
        self._unheard_since: float | None = None

    # -------------------------------------------------------------------------------------------- the control plane

    def begins(self) -> None:
        """A request has come to an idle engine: what was said of those before it waits for no answer."""
        self.idle = False
        if self.connected:
            self._lost_since = self._unheard_since = None

    def falls_idle(self) -> None:
        """No request is live any more."""
        self.idle = True

    def asks(self, now: float) -> None:
        """Something was said that is to be answered."""
        if self._unheard_since is None:
            self._unheard_since = now

    def heard(self) -> None:
        """The control plane has answered."""
        self._lost_since = self._unheard_since = None

    def found(self) -> None:
        """A stream has begun. Where decisions are in force, only an answer says that somebody knows of them."""
        self._unheard_since = None
        if self.idle:
            self._lost_since = None
        self.connected = True

    def lost(self) -> None:
        """The stream is over; silence on it counts."""
        if self._lost_since is None:
            self._lost_since = self._unheard_since if self._unheard_since is not None else self.clock()
        self.connected = False

    def silent_s(self) -> float:
        """How long nothing was answered, on whatever stream, or there was none; 0 while all is well."""
        if self.connected and self.idle:
            return 0.0
        return self._since(self._lost_since if self._lost_since is not None else self._unheard_since)

    def unheard_s(self) -> float:
        """The same on this stream alone."""
        return 0.0 if self.idle else self._since(self._unheard_since)

    def _since(self, then: float | None) -> float:
        return 0.0 if then is None else self.clock() - then

    # ------------------------------------------------------------------------------------------------- what holds

    def hold(self, settings: agent_pb2.Settings, markers: Any) -> None:
        """Put the link's own part of settings in force."""
        self.held = settings, markers
        self.revision = settings.revision
        self.lease_s = settings.lease_ms / 1000
        self.report_interval_steps = max(1, settings.report_interval_steps)
        own = ((settings.scheduler_lease_ms, ORDER | CAPS), (settings.entropy_lease_ms, RULES))
        sections = [(ms / 1000, parts) for ms, parts in (*own, (settings.kv_memory_lease_ms, MEMORY)) if ms]
        self._leases = [(self.lease_s, ALL_BUT_CAPS), *sections]
        self._shortest_s = min(lease_s for lease_s, _ in self._leases)
        self.merge_s = min(MERGE_WAIT_S, MERGE_LEASE_SHARE * self._shortest_s)

    def over(self, silent_s: float) -> int:
        """The parts of directives that a silence of so long has ended."""
        parts = 0
        if silent_s <= self._shortest_s:
            return parts
        for lease_s, ending in self._leases:
            if silent_s > lease_s:
                parts |= ending
        return parts

    def frozen(self) -> bool:
        """Whether the engine is to run as stock vLLM."""
        return self._frozen_until > 0 and self.clock() < self._frozen_until

    @property
    def frozen_here(self) -> bool:
        """Whether this engine's own environment says so, for good."""
        return self._frozen_until == math.inf

    def freeze_for(self, seconds: float) -> None:
        """Run as stock vLLM for so long from now; infinite for good."""
        self._frozen_until = self.clock() + seconds if seconds else 0.0

    def freeze_status(self, nonce: int = 0) -> agent_pb2.FreezeStatus:
        return agent_pb2.FreezeStatus(nonce=nonce, frozen=self.frozen(), locally=self.frozen_here)

    # -------------------------------------------------------------------------------------------------- how it is

    @property
    def state(self) -> agent_pb2.AgentState.ValueType:
        if self.silent_s() > self.lease_s:
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
