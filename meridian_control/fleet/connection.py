"""Connects one engine's session with its stream, by a bounded queue of responses that wait to be sent.

All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian.v1 import agent_pb2

    from meridian_control.decision_log.records import Decision
    from meridian_control.session.session import Session

# Number of waiting responses above which the stream of a slow engine is closed; its agent then reconnects with a
# snapshot.
QUEUE_MESSAGES = 1024


@dataclass(eq=False, slots=True)
class Connection:
    """A session and the queue of responses for its agent; None in the queue closes the stream."""

    session: Session
    outgoing: asyncio.Queue[agent_pb2.ConnectResponse | None] = field(
        default_factory=lambda: asyncio.Queue(QUEUE_MESSAGES)
    )
    overflowed: bool = False
    # Reason the control plane gives for ending the stream; empty while the stream is open.
    closing: str = ""
    # Error of the control plane that ends the stream; None while there is none.
    failure: Exception | None = None
    # Task that restores the last good revision after the engine refused the newest; None before that.
    restoring: asyncio.Task[None] | None = None
    # Set after every message of the agent, one for each call that waits for the outcome of a decision.
    waiting: set[asyncio.Event] = field(default_factory=set)

    def close(self, reason: str) -> None:
        """End the stream after the waiting responses have been sent."""
        self.closing = reason
        self.put([None])

    def fail(self, failure: Exception) -> None:
        """End the stream with an error of the control plane, after the waiting responses have been sent."""
        self.failure = failure
        self.close("internal")

    def wake(self) -> None:
        """Let the calls that wait for an outcome look again."""
        for event in self.waiting:
            event.set()

    async def wait_for_outcome(self, decision: Decision, wait_s: float) -> None:
        """Wait until a decision of the session has its outcome, for at most `wait_s` seconds."""
        event = asyncio.Event()
        self.waiting.add(event)
        try:
            async with asyncio.timeout(wait_s):
                while not decision.outcome:
                    await event.wait()
                    event.clear()
        except TimeoutError:
            pass
        finally:
            self.waiting.discard(event)

    def put(self, responses: Iterable[agent_pb2.ConnectResponse | None]) -> None:
        for response in responses:
            try:
                self.outgoing.put_nowait(response)
            except asyncio.QueueFull:
                self.overflowed = True
