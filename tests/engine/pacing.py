"""Steps that wait for the control plane, so that a decision comes one step after its report on however busy a machine.

The control plane must answer every report, as `tests.answering` does. An answer comes after all decisions that were
made before it, so once the newest report is answered every decision has come. The module reads the link and changes
nothing that the link does.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.link.control_stream import ControlStream
from tests.engine import PATIENCE_S

# The polling interval; even a busy machine answers within milliseconds.
LOOK_S = 0.0005
# Shortest and longest pause of an agent between two streams, in place of the product's own.
SOON_S = (0.02, 0.2)


@functools.cache
def _watch() -> None:
    """Let each stream note while it takes a message in: it notes an answer before it delivers the decisions in it."""
    receive = ControlStream._receive

    def received(link: Any, response: agent_pb2.ConnectResponse) -> None:
        link.takes_in = True
        try:
            receive(link, response)
        finally:
            link.takes_in = False

    setattr(ControlStream, "_receive", received)  # noqa: B010


class Settled:
    """Waits until the control plane has answered all reports and the agent has received the answers.

    Records that the link keeps back for a larger report are not waited for.
    """

    def __init__(self, scheduler: Any) -> None:
        _watch()
        self._scheduler = scheduler

    def __call__(self) -> None:
        """Wait once. Raises TimeoutError if no answer comes."""
        deadline_s = time.monotonic() + PATIENCE_S
        if self._scheduler._agent is None:
            return
        link = self._scheduler._agent.link
        link.outbox.ring.wake()
        while link.lease.connected and not _answered(link):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {PATIENCE_S} s: the control plane to answer the newest report")
            time.sleep(LOOK_S)


def waits(agent: Any, kind: str) -> bool:
    """Return whether a decision of this kind, a field of Directives, has arrived and waits for the engine. An answer to
    settings or a thaw is no answer to a report, so `Settled` does not wait for it."""
    arrived = tuple(agent.link.inbox.messages)
    return any(field.name == kind for message in arrived if message is not None for field, _ in message.ListFields())


def _answered(link: Any) -> bool:
    """Return whether the link's sender waits for more records, and all that it has sent is answered."""
    ring = link.outbox.ring
    waits = ring._wanted and not ring.suffices(ring._wanted, ring._patient)
    # The order matters: the sender notes a report before it waits again, and a report counts as answered while the link
    # takes the answer in.
    return bool(waits and not link.outbox._unanswered and not getattr(link, "takes_in", False))
