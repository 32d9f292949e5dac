"""Requests that an agent finds in the engine when it begins: their tokens are read again, some in each step.

New requests are known from their first token on whatever waits here, and none of these is cut short or skipped: one is
known as soon as it has been read to its newest token. Pure but for the requests it reads; engine-core thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_agent.phases import Event, Markers, PhaseState, after_prompt, tail_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# Tokens that are read in a step, tenths of a millisecond where markers are rare; a request counts as REQUEST_TOKENS
# at least.
STEP_TOKENS, REQUEST_TOKENS = 8192, 256


@dataclass(slots=True)
class Reading:
    """One request: its prompt from the end until a marker is found, then what it generated, from the beginning."""

    ref: Any
    markers: Markers
    supports_think_disable: bool
    state: PhaseState | None = None
    # Tokens of the prompt that are still to be looked at, then tokens generated that have been.
    at: int = -1

    def read(self, tokens: int) -> int:
        """Read on; returns how many of so many tokens are left. The request is read to its end if any are."""
        if self.state is None:
            tokens = self._read_prompt(tokens)
        if self.state is not None:
            new = self.ref.output_token_ids[self.at : self.at + tokens]
            self.state.feed_all(new, self.markers)
            self.at += len(new)
            tokens -= len(new)
        return tokens

    def _read_prompt(self, tokens: int) -> int:
        prompt = self.ref.prompt_token_ids or []
        if self.at < 0:
            self.at = len(prompt)
        start = max(0, self.at - tokens)
        event, after = self.markers.last_event(prompt, start, self.at)
        tokens -= self.at - start
        self.at = start
        if event is not Event.TEXT or start == 0:
            phase = after_prompt(event, after, self.supports_think_disable)
            self.state, self.at = PhaseState(phase, tail=tail_of(self.markers, prompt)), 0
        return tokens


class Adoption:
    """Those that are still to be read."""

    def __init__(self, requests: Iterable[Any]) -> None:
        self._waiting = deque(requests)
        self._reading: Reading | None = None

    def __bool__(self) -> bool:
        return self._reading is not None or bool(self._waiting)

    def some(self, markers: Markers, supports_think_disable: bool) -> list[tuple[Any, PhaseState]]:
        """A step's share: the requests that have been read to their newest token, with the state they are in."""
        found, left = [], STEP_TOKENS
        while left > 0 and self:
            reading = self._reading
            # Other markers, another reading.
            if reading is None or reading.markers is not markers:
                ref = reading.ref if reading is not None else self._waiting.popleft()
                reading = self._reading = Reading(ref, markers, supports_think_disable)
            if reading.ref.is_finished():
                self._reading = None
                continue
            before, left = left, reading.read(left)
            if left > 0 and reading.state is not None:
                found.append((reading.ref, reading.state))
                self._reading = None
                left -= max(0, REQUEST_TOKENS - (before - left))
        return found
