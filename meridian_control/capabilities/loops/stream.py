"""Ends thinking that repeats itself, once per report and at its end.

The rule reads exact cycles of tokens. The agent finds them, and ends the report with the step in which it found one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.engine.part import Stream, Turn
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.policy.model import Policy


class Loops(Part):
    """The loops of one engine's requests."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._table = stream, stream.table

    @classmethod
    def of(cls, stream: Stream) -> Loops | None:
        return cls(stream) if stream.ends_thinking else None

    def ends(self, turn: Turn) -> None:
        if not self._table.has_loops:
            return
        for own, among in turn.groups:
            for slot in loops(own, self._table, among).tolist():
                self._stream.end_thinking(turn, agent_pb2.FORCE_REASON_LOOP, slot, shadow=own.loop.shadow)


def loops(policy: Policy, table: RequestTable, among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the slots whose thinking ends now because it repeats itself, [ends].

    No thinking floor holds except the request's own: a loop adds nothing, however early it begins. among: [slots] with
    the requests that the policy holds for, all requests if absent.
    """
    loop = policy.loop
    if not loop.enabled or not len(table.loop_tokens.nonzero()[0]):
        return np.zeros(0, np.intp)
    ends = (table.loop_tokens >= loop.min_tokens) & (table.loop_tokens >= loop.min_rounds * table.loop_period)
    ends &= table.thinking & (table.end_decided == 0) & (table.think_tokens >= table.own_min_think_tokens)
    if loop.shadow:
        # A rule in shadow fires once per request.
        ends &= (table.shadow_decided & (1 << agent_pb2.FORCE_REASON_LOOP)) == 0
    return np.flatnonzero(ends if among is None else ends & among)
