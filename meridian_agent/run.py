"""Steps in which the same requests generate one token of text each, which is what nearly all steps are.

Such steps are noted as a whole, at a cost that hardly grows with the requests; what they mean for each request is
worked out when somebody looks at it, at the latest when one of them comes near its cap. Owns what is noted and not yet
worked out. Runs on the engine-core thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_agent.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.tracker import Tracked


class Run:
    """The run under way, if any; one object for as long as the tracker.

    request_ids: in the order of the runner's rows; empty while there is no run. slots, phases, rows: columns of each
    step's record, never changed once made. steps: noted and not worked out yet.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.slots: list[int] = []
        self.phases: list[int] = []
        self.rows: list[int] = []
        # Sentence and paragraph flags by token id.
        self.boundaries = b""
        self.steps = 0
        self._tracked: list[Tracked] = []
        self._newest: Sequence[int] = ()
        # Steps that may still be noted before one brings a request to where its cap is looked at.
        self._left = 0

    def begin(self, request_ids: list[str], tracked: list[Tracked]) -> None:
        """Begin with requests that think or answer, or whose phase is not known, none of them being ended."""
        left = [tr.text_steps() for tr in tracked]
        if not left or min(left) <= 0:
            return
        self.request_ids, self._tracked, self._left = request_ids, tracked, min(left)
        self.slots = [tr.slot for tr in tracked]
        self.phases = [int(tr.own_state.phase) for tr in tracked]
        self.rows = list(range(len(tracked)))

    def end(self) -> None:
        """Something is about to change for one of the requests."""
        if self.request_ids:
            self.spread()
            self.request_ids, self._tracked = [], []

    def note(self, tokens: Sequence[int]) -> bool:
        """Take in a step's tokens, one of text for each request; False, and nothing taken in, where a cap is near."""
        if self._left <= 0:
            return False
        self._left -= 1
        self.steps += 1
        self._newest = tokens
        return True

    def spread(self) -> None:
        """Work out what the noted steps mean for each request."""
        steps, self.steps = self.steps, 0
        if not steps:
            return
        known = len(self.boundaries)
        for tr, token in zip(self._tracked, self._newest, strict=True):
            state = tr.own_state
            state.text_run += steps
            if state.phase is Phase.THINK:
                state.think_tokens += steps
                tr.own_boundary = self.boundaries[token] if token < known else 0
            else:
                state.output_tokens += steps * (state.phase is Phase.OUTPUT)
                tr.own_boundary = 0
