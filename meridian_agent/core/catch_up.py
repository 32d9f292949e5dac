"""Reads the tokens of requests that were in the engine before the agent, a limited number in each step, to find the
phase of each request.

The agent tracks new requests from their first token on, however many older requests wait here. Every older request is
read to its newest token, and is tracked from then on. Pure but for the requests that it reads; runs on the engine-core
thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian_agent.core.phases import Markers, PhaseState, TokenEvent, Work, begin_after, begin_unread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_agent.vllm_types import Request

# Tokens of a new prompt to read at once; if the last marker is further from the prompt's end, the coming steps read on.
NEW_TOKENS = 65_536
# Tokens of text to read in a step, which takes 0.1 to 0.2 ms; each request counts as at least REQUEST_TOKENS.
STEP_TOKENS, REQUEST_TOKENS = 8192, 512


@dataclass(slots=True)
class RequestReading:
    """The reading of one request: its prompt backwards until a marker is found, then its generated tokens forwards."""

    ref: Request
    markers: Markers
    supports_think_disable: bool
    state: PhaseState | None = None
    # Number of prompt tokens that are still to be read; later the number of generated tokens that have been read.
    at: int = -1

    def read(self, work: Work) -> PhaseState | None:
        """Read on; return the state after the newest token once that token has been read, None until then."""
        if self.state is not None and self.at > len(self.ref.output_token_ids):
            # With a streaming session's next input, vLLM has taken the generated tokens into the prompt.
            self.state, self.at = None, -1
        if self.state is None:
            self._read_prompt(work)
        if self.state is None:
            return None
        tokens = self.ref.output_token_ids
        self.at = self.state.feed_some(tokens, self.at, self.markers, work)
        return self.state if self.at == len(tokens) else None

    def _read_prompt(self, work: Work) -> None:
        """Look for the prompt's last marker, from the prompt's end backwards."""
        if (prompt := self.ref.prompt_token_ids) is None:
            self.state, self.at = begin_unread(), 0
            return
        event, self.at = self.markers.search_back(prompt, self.at if self.at >= 0 else len(prompt), work)
        if event is not TokenEvent.TEXT or self.at == 0:
            after = len(prompt) - self.at
            self.state = begin_after(self.markers, prompt, event, after, self.supports_think_disable)
            self.at = 0


def state_of_new(request: Request, markers: Markers, supports_think_disable: bool) -> PhaseState | None:
    """Return the state in which its prompt leaves a new request; None if the search takes too long for one step."""
    return RequestReading(request, markers, supports_think_disable).read(Work(NEW_TOKENS))


class CatchUp:
    """The requests that are still to be read, oldest first."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._waiting = deque(requests)
        self._reading: RequestReading | None = None

    def __bool__(self) -> bool:
        return self._reading is not None or bool(self._waiting)

    def extend(self, requests: Iterable[Request]) -> None:
        """Add requests after all others."""
        self._waiting.extend(requests)

    def put_back(self, requests: list[Request]) -> None:
        """Add requests before all others, because they have to be read again later."""
        self._waiting.extendleft(reversed(requests))

    def some(self, markers: Markers, supports_think_disable: bool) -> list[tuple[Request, PhaseState]]:
        """Do the reading of one step; return the requests that have been read to their newest token, each with its
        state."""
        read, work = [], Work(STEP_TOKENS)
        while work.left > 0 and self:
            reading = self._reading
            # If the markers have changed, the request is read again from the beginning.
            if reading is None or reading.markers is not markers:
                ref = reading.ref if reading is not None else self._waiting.popleft()
                reading = self._reading = RequestReading(ref, markers, supports_think_disable)
            if reading.ref.is_finished():
                self._reading = None
                continue
            before = work.left
            if (state := reading.read(work)) is not None:
                read.append((reading.ref, state))
                self._reading = None
                work.left = min(work.left, before - REQUEST_TOKENS)
        return read
