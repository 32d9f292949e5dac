"""Requests that an agent finds in the engine when it begins: their tokens are read again, some in each step.

New requests are known from their first token on whatever waits here, and none of these is cut short or skipped: one is
known as soon as it has been read to its newest token. Pure but for the requests it reads; engine-core thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import Markers, PhaseState, TokenEvent, Work, begin_after

if TYPE_CHECKING:
    from collections.abc import Iterable

# Work of adding a request: a prompt whose last marker is further from its end is read on in the coming steps.
NEW_TOKENS = 65_536
# Work of a step, in tokens of text, one to two tenths of a millisecond; a request counts as REQUEST_TOKENS at least.
STEP_TOKENS, REQUEST_TOKENS = 8192, 512


@dataclass(slots=True)
class RequestReading:
    """One request: its prompt from the end until a marker is found, then what it generated, from the beginning."""

    ref: Any
    markers: Markers
    supports_think_disable: bool
    state: PhaseState | None = None
    # Tokens of the prompt that are still to be looked at, then tokens generated that have been.
    at: int = -1

    def read(self, work: Work) -> PhaseState | None:
        """Read on; returns the state that the newest token has left the request in once it has come to that."""
        if self.state is None:
            self._read_prompt(work)
        if self.state is None:
            return None
        tokens = self.ref.output_token_ids
        self.at = self.state.feed_some(tokens, self.at, self.markers, work)
        return self.state if self.at == len(tokens) else None

    def _read_prompt(self, work: Work) -> None:
        """Look for the prompt's last marker, from the end on."""
        prompt = self.ref.prompt_token_ids or []
        event, self.at = self.markers.search_back(prompt, self.at if self.at >= 0 else len(prompt), work)
        if event is not TokenEvent.TEXT or self.at == 0:
            after = len(prompt) - self.at
            self.state = begin_after(self.markers, prompt, event, after, self.supports_think_disable)
            self.at = 0


def state_of_new(request: Any, markers: Markers, supports_think_disable: bool) -> PhaseState | None:
    """The state in which its prompt leaves a new request; None where to find that would hold up the engine."""
    return RequestReading(request, markers, supports_think_disable).read(Work(NEW_TOKENS))


class CatchUp:
    """The number of requests that are still to be read."""

    def __init__(self, requests: Iterable[Any] = ()) -> None:
        self._waiting = deque(requests)
        self._reading: RequestReading | None = None

    def __bool__(self) -> bool:
        return self._reading is not None or bool(self._waiting)

    def add(self, request: Any) -> None:
        """One more, last."""
        self._waiting.append(request)

    def some(self, markers: Markers, supports_think_disable: bool) -> list[tuple[Any, PhaseState]]:
        """A step's share: the requests that have been read to their newest token, with the state they are in."""
        found, work = [], Work(STEP_TOKENS)
        while work.left > 0 and self:
            reading = self._reading
            # Other markers, another reading.
            if reading is None or reading.markers is not markers:
                ref = reading.ref if reading is not None else self._waiting.popleft()
                reading = self._reading = RequestReading(ref, markers, supports_think_disable)
            if reading.ref.is_finished():
                self._reading = None
                continue
            before = work.left
            if (state := reading.read(work)) is not None:
                found.append((reading.ref, state))
                self._reading = None
                work.left = min(work.left, before - REQUEST_TOKENS)
        return found
