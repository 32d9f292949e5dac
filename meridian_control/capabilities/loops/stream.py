"""Ends thinking that repeats itself, once per report and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.capabilities.loops import rule
from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from meridian_control.engine.part import Stream, Turn


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
            for slot in rule.loops(own, self._table, among).tolist():
                self._stream.end_thinking(turn, agent_pb2.FORCE_REASON_LOOP, slot, shadow=own.loop.shadow)
