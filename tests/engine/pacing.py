"""Steps that wait for the control plane, so that a decision comes one step after its report on however busy a machine.

The module knows which reports an agent of this process has sent on its stream, and which decisions it has received. The
module reads the link and changes nothing in it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
from meridian.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc

from meridian_agent.core.step_record import StepRecord
from meridian_agent.link.control_stream import ControlStream
from meridian_agent.link.messages import DECISION_KINDS
from meridian_agent.link.record_queue import RecordQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.processes import Control

# Limit against hanging, and the polling interval; even a busy machine answers within milliseconds.
PATIENCE_S, LOOK_S = 120.0, 0.0005
# Seconds of rest after the control plane has refused a call because one caller made too many.
REST_S = 0.05
# Shortest and longest pause of an agent between two streams, in place of the product's own.
SOON_S = (0.02, 0.2)
# Types of a ring's items that are steps; a tuple is a TextStep, whose first field is the step's number.
STEPS = (StepRecord, tuple)


@functools.cache
def watch() -> None:
    """Make each stream's ring note the steps laid on it, each with the outcomes told so far, and the number of
    decisions received; call it before an engine is made."""
    lay, receive = RecordQueue.lay, ControlStream._receive

    def laid(ring: Any, item: Any, presses: bool = False, due: bool = False) -> None:
        if isinstance(item, STEPS):
            steps: deque[tuple[int, int]] = ring.__dict__.setdefault("steps", deque())
            step, outcomes = (item[0], 0) if isinstance(item, tuple) else (item.step, len(item.outcomes))
            ring.told = getattr(ring, "told", 0) + outcomes
            steps.append((step, ring.told))
            # Only the steps that wait and the newest one that was taken are asked for.
            while len(steps) > ring.qsize() + 2:
                steps.popleft()
        lay(ring, item, presses, due)

    def received(link: ControlStream, response: agent_pb2.ConnectResponse) -> None:
        ring: Any = link.outbox.ring
        receive(link, response)
        ring.heard = getattr(ring, "heard", 0) + sum(map(bool, _ids(response.directives)))

    setattr(RecordQueue, "lay", laid)  # noqa: B010
    setattr(ControlStream, "_receive", received)  # noqa: B010


def _ids(directives: agent_pb2.Directives) -> list[int]:
    each = [getattr(directives, kind) for kind in DECISION_KINDS]
    return [directives.plan.decision_id, *(decision.decision_id for kind in each for decision in kind)]


class Settled:
    """Waits until the control plane has answered all reports and the agent has received the answers.

    Records that the link keeps back for a larger report are not waited for.
    """

    def __init__(self, scheduler: Any, control: Control) -> None:
        self._scheduler, self._control = scheduler, control

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[Callable[[], None]]:
        """Yield a function to be called after each step."""
        with self._control.channel() as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            yield lambda: self._wait(stub)

    def __call__(self) -> None:
        """Wait once. Raises TimeoutError if no answer comes."""
        with self.between_steps() as wait:
            wait()

    def _wait(self, stub: Any) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        if self._scheduler._agent is None:
            return
        link = self._scheduler._agent.link
        link.outbox.ring.wake()
        while link.lease.connected and not self._answered(link, stub):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {PATIENCE_S} s: the control plane to answer the newest report")
            time.sleep(LOOK_S)

    def _answered(self, link: ControlStream, stub: Any) -> bool:
        ring: Any = link.outbox.ring
        waiting = _waiting(ring)
        if waiting and (not ring._wanted or ring.suffices(ring._wanted, ring._patient)):
            # The link's sender is about to take the records.
            return False
        steps: deque[tuple[int, int]] = getattr(ring, "steps", deque())
        if len(steps) == waiting:
            return True
        try:
            found = stub.ListEngines(fleet_pb2.ListEnginesRequest(), timeout=PATIENCE_S).engines
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            # On a quiet machine steps follow each other faster than one caller may ask.
            time.sleep(REST_S)
            return False
        engine = next((e for e in found if e.state == fleet_pb2.CONNECTION_STATE_CONNECTED), None)
        if engine is None or _waiting(ring) != waiting:
            return False
        step, told = steps[-waiting - 1]
        # A decision that the control plane never sends, because its request ended in the report, is not open.
        return bool(engine.step >= step and engine.open_decisions == getattr(ring, "heard", 0) - told)


def _waiting(ring: Any) -> int:
    """Return the number of steps that the link's sender has not taken yet."""
    return sum(isinstance(item, STEPS) for item in tuple(ring._items))
