"""One engine's connection: its session, and the responses that wait to be sent to its agent.

Owns the outgoing queue and its bound. Runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian.v1 import agent_pb2

    from meridian_control.session.session import Session

# Responses a slow engine may leave waiting before its stream is closed; it comes back with a snapshot.
QUEUE_MESSAGES = 1024


@dataclass(eq=False, slots=True)
class Connection:
    """A session and what waits to be sent to its agent; None closes the stream."""

    session: Session
    outgoing: asyncio.Queue[agent_pb2.ConnectResponse | None] = field(
        default_factory=lambda: asyncio.Queue(QUEUE_MESSAGES)
    )
    overflowed: bool = False
    # Why this side ends the stream, once it does.
    closing: str = ""
    # Brings back the last good revision, where the newest was refused.
    restoring: asyncio.Task[None] | None = None

    def close(self, reason: str) -> None:
        """End the stream, after what waits."""
        self.closing = reason
        self.put([None])

    def put(self, responses: Iterable[agent_pb2.ConnectResponse | None]) -> None:
        for response in responses:
            try:
                self.outgoing.put_nowait(response)
            except asyncio.QueueFull:
                self.overflowed = True
