"""Follows the control group of one engine, and asks for the probes that judge what shortening would have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_control.engine.control_requests import HARM_PROBE
from meridian_control.engine.part import Part

if TYPE_CHECKING:
    from meridian_control.engine.part import Stream, Turn


class ControlGroup(Part):
    """The control group of one engine."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def ends(self, turn: Turn) -> None:
        if self._stream.ends_thinking:
            self._stream.policies.control.pass_caps()

    def decide(self, turn: Turn) -> None:
        policies = self._stream.policies
        for slot in policies.control.probes_due(policies.of) if self._stream.may_probe else ():
            self._stream.probe(turn, HARM_PROBE, np.array([slot]))
