"""Replay a recording: a `Session` is given the recorded messages and must give the same answers, byte for byte.

The simulator, which records in memory, and `tests.soak`, which reads the files of `meridianctl record`, share the
module.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.common.slices import at_once
from meridian_control.engine.session import Session
from meridian_control.fleet.trace_records import given_freezes
from meridian_control.policy import formats as forms
from tests.sim.invariants import Invariants

# Messages that a session itself sends in answer to a message; the fleet sends all others.
SAID = ("settings", "directives")


class Replayed:
    """Replays one recorded session from its Hello on; its messages go through the invariants too.

    Every violation raises an AssertionError.
    """

    def __init__(self, hello: fleet_pb2.TraceRecord, invariants: Invariants) -> None:
        self.session = Session(hello.session_id, hello.up.hello, _time(hello), parts=STREAM_PARTS)
        self.invariants = invariants
        self.counters: dict[str, float] = {}
        self._expected: deque[bytes] = deque()
        self._now = _time(hello)

    def take(self, record: fleet_pb2.TraceRecord) -> None:
        """Take the next record of this session."""
        self._now = _time(record)
        if record.HasField("policy"):
            self._say(self._policy(record.policy))
        elif record.HasField("up"):
            self.invariants.heard(self.session, self.counters, record.up)
            self._say(self.session.on_message(record.up, self._now))
            self.invariants.knows(self.session)
        elif record.HasField("end_thinking"):
            ended = self.session.on_end_thinking(record.end_thinking.request_id, "", self._now)
            self._say(ended.responses if ended is not None else [])
        elif not record.HasField("down"):
            self.session.on_record(record)
        elif record.down.HasField("freeze"):
            self.session.on_freezes(given_freezes(record), self._now)
        elif record.down.WhichOneof("message") in SAID:
            assert self._expected, "a replay says less than what was recorded"
            said = record.down.SerializeToString(deterministic=True)
            assert said == self._expected.popleft(), "a replay says something else than what was recorded"

    def end(self, cut_off: bool = False) -> int:
        """End the replay and return the number of decisions whose outcome was not recorded.

        cut_off: the recording may have ended in the middle of the session's answers.
        """
        assert cut_off or not self._expected, "a replay says more than what was recorded"
        left = len(self.session.open_decisions)
        at_once(self.session.closing(self._now))
        self.invariants.left(self.session)
        return left

    def _policy(self, given: fleet_pb2.TracedPolicy) -> list[agent_pb2.ConnectResponse]:
        policy = forms.from_proto(given.policy)
        # A policy older than the one before is the policy that the agent has in force because it refuses the newest.
        give = self.session.on_last_good if given.revision < self.session.revision else self.session.on_policy
        return give(given.revision, policy)

    def _say(self, responses: list[agent_pb2.ConnectResponse]) -> None:
        for response in responses:
            self.invariants.said(self.session, response)
            self._expected.append(response.SerializeToString(deterministic=True))


def _time(record: fleet_pb2.TraceRecord) -> datetime:
    return record.time.ToDatetime(UTC)
