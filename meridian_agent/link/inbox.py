"""Holds the decisions that have arrived: the link's thread adds them, the engine's thread takes them out.

The module owns the messages of one stream and the count of their decisions, and makes the outcomes for an engine
without requests. Neither thread waits for the other.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.link.messages import DECISION_KINDS, decisions_in, parts_of

if TYPE_CHECKING:
    from meridian_agent.link.lease import Lease

INBOX_MESSAGES = 4096
# Largest number of decisions that may wait for the engine, and of outcomes that may wait to be sent: four for each
# request of the largest engine.
INBOX_DECISIONS = 1 << 18
# Largest number of decisions in a message for the engine's thread, which takes whole messages in between two steps.
PART_DECISIONS = 256


class Inbox:
    """The inbox of one engine."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        # Directives in order of arrival; None marks the start of a new stream.
        self.messages: deque[agent_pb2.Directives | None] = deque()
        # Step of the newest report whose answer has arrived and whose decisions the engine has all taken out.
        self.answered_step = 0
        # Numbers of decisions put in and taken out; each number is written by one thread only.
        self._in = self._out = 0

    # ------------------------------------------------------------------------------ called on the engine-core thread

    def take(self) -> tuple[agent_pb2.Directives | None, int]:
        """Take out the oldest message and return it with the number of its decisions. Raises IndexError if no message
        waits."""
        message = self.messages.popleft()
        size = 0 if message is None else decisions_in(message)
        self._out += size
        return message, size

    def is_over(self, message: agent_pb2.Directives) -> bool:
        """Return whether no further part of this message waits, which was taken out last."""
        try:
            return self.messages[0] is None or self.messages[0].step != message.step
        except IndexError:
            return True

    def new_stream_waits(self) -> bool:
        """Return whether the mark of a new stream is still in the inbox, so that the engine's record belongs to the old
        stream."""
        try:
            return bool(self.messages) and self.messages[0] is None
        except IndexError:
            # The link's thread has just cleared the inbox.
            return False

    def skip_to_new_stream(self) -> None:
        """Drop the messages that were sent to the previous agent, up to the mark of a new stream."""
        with contextlib.suppress(IndexError):
            while self.messages[0] is not None:
                self.take()

    # ----------------------------------------------------------------------------------------- the link's own thread

    def begin(self) -> None:
        """Begin a new stream: drop the messages of the old stream, and add the mark of the new one."""
        self.messages.clear()
        self._in = self._out
        self.messages.append(None)
        self._lease.call_for_attention()

    def put(self, directives: agent_pb2.Directives) -> None:
        """Add a message, in parts if it is large. A message without a decision is only noted as answered, unless
        another message waits before it; of several such messages in a row the newest one waits."""
        if _is_empty(directives):
            if not self.messages:
                self.answered_step = directives.step
                return
            # The engine's thread may take out the last message meanwhile.
            with contextlib.suppress(IndexError):
                if (last := self.messages[-1]) is not None and _is_empty(last):
                    self.messages[-1] = directives
                    return
        parts = [*parts_of(directives, PART_DECISIONS)]
        self._in += sum(map(decisions_in, parts))
        # All parts at once, because `is_over` looks for the next one.
        self.messages.extend(parts)
        self._lease.call_for_attention()

    def too_much(self, decisions: int, elsewhere: int) -> bool:
        """Return whether too much waits: more decisions, with these added, or more messages than any engine needs.
        elsewhere: number of messages in the fullest other queue."""
        waiting = self._in - self._out + decisions
        return max(len(self.messages), elsewhere) >= INBOX_MESSAGES or waiting > INBOX_DECISIONS

    def settle_if_idle(self, directives: agent_pb2.Directives) -> agent_pb2.StepReport | None:
        """Return the outcomes of directives for an engine without live requests: a plan counts as applied, and all
        other decisions end as REQUEST_GONE.

        Decisions with an outcome are removed from the directives. Returns None if the engine is busy or no decision has
        an outcome.
        """
        if not self._lease.idle:
            return None
        report = agent_pb2.StepReport(step=directives.step)
        for decisions in (getattr(directives, kind) for kind in DECISION_KINDS):
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


def _is_empty(directives: agent_pb2.Directives) -> bool:
    return len(directives.ListFields()) <= (directives.step > 0)
