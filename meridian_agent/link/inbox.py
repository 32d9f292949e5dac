"""Holds the decisions that wait to be taken in: the link's thread fills it, the engine's empties it.

Owns the messages of one stream and the count of their decisions; answers for an engine that has no request they could
be for. Neither thread waits for the other.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.link.messages import decisions_in

if TYPE_CHECKING:
    from meridian_agent.link.lease import Lease

INBOX_MESSAGES = 4096
# Decisions that wait to be taken in, or their outcomes to be sent: four for each request of the largest engine.
INBOX_DECISIONS = 1 << 18


class Inbox:
    """One engine's."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        # Directives in order of arrival; None marks the start of a new stream.
        self.messages: deque[agent_pb2.Directives | None] = deque()
        # Newest report that was answered, with everything that was decided from it taken in.
        self.answered_step = 0
        # Decisions put in and taken out, each counted by one thread.
        self._in = self._out = 0

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def take(self) -> tuple[agent_pb2.Directives | None, int]:
        """The oldest message, with the number of its decisions. Raises IndexError when there is none."""
        message = self.messages.popleft()
        size = 0 if message is None else decisions_in(message)
        self._out += size
        return message, size

    def new_stream_waits(self) -> bool:
        """Whether the engine has yet to take in that a new stream began: its record speaks of the old one."""
        try:
            return self.messages[0] is None
        except IndexError:
            return False

    def skip_to_new_stream(self) -> None:
        """Let go what was said to an agent that is no more."""
        with contextlib.suppress(IndexError):
            while self.messages[0] is not None:
                self.take()

    # ----------------------------------------------------------------------------------------- the link's own thread

    def begin(self) -> None:
        """A new stream: what the old one said is void."""
        self.messages.clear()
        self._in = self._out
        self.messages.append(None)

    def put(self, directives: agent_pb2.Directives) -> None:
        """Add a message. One without a decision only says how far the control plane is, once no message waits before
        it."""
        if self.messages or len(directives.ListFields()) > (directives.step > 0):
            self._in += decisions_in(directives)
            self.messages.append(directives)
        else:
            self.answered_step = directives.step

    def too_much(self, decisions: int, elsewhere: int) -> bool:
        """Whether so many decisions on top of what waits, or so many messages elsewhere, are more than any engine
        needs."""
        waiting = self._in - self._out + decisions
        return max(len(self.messages), elsewhere) >= INBOX_MESSAGES or waiting > INBOX_DECISIONS

    def settle_if_idle(self, directives: agent_pb2.Directives) -> agent_pb2.StepReport | None:
        """Answer for an engine without live requests: the requests are gone, a plan holds from the next step on.

        What has its outcome is taken out of the directives; None where nothing has.
        """
        if not self._lease.idle:
            return None
        report = agent_pb2.StepReport(step=directives.step)
        for decisions in (directives.forces, directives.caps, directives.tiers, directives.probes):
            for decision in decisions:
                report.outcomes.add(decision_id=decision.decision_id, outcome=agent_pb2.OUTCOME_REQUEST_GONE)
            del decisions[:]
        if directives.plan.decision_id:
            outcome = agent_pb2.OUTCOME_SHADOWED if directives.plan.shadow else agent_pb2.OUTCOME_APPLIED
            if frozen := self._lease.frozen():
                outcome = agent_pb2.OUTCOME_AGENT_OFF
            report.outcomes.add(decision_id=directives.plan.decision_id, outcome=outcome)
            directives.plan.decision_id = 0
            if frozen:
                directives.ClearField("plan")
        return report if report.outcomes else None
