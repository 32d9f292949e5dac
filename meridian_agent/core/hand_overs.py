"""Holds the decisions to hand requests over to another engine at the end of their thinking, and reports the one outcome
of each decision.

The module owns which request is to be handed over, and to where; `engine/hand_over` makes vLLM stop the request. Runs
on the engine-core thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.phases import Phase
from meridian_agent.core.request_info import MAX_TEXT
from meridian_agent.core.step_record import NOT_KNOWN, Outcome

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.phases import Markers
    from meridian_agent.core.step_record import Report

# Reason why an engine without a KV connector neither hands requests over nor answers those of other engines.
NO_CONNECTOR = "the engine has no KV connector"
# Reason why no request can be handed over whose end marker a forced end writes over several steps.
SEVERAL_TOKENS = "the end marker has several tokens"
# Largest number of characters of the URL in a decision. The reference has at most MAX_TEXT, because the other engine
# reads no more of it.
MAX_URL = 2048
# Finish reasons of vLLM after which nobody waits for the rest of a request.
GONE = ("abort", "client_gone", "error")


class Decided(NamedTuple):
    """A decision that is in force. url: base URL of the other engine's OpenAI server. ref: the decision's reference."""

    decision_id: int
    shadow: bool
    url: str
    ref: str


def stops(markers: Markers) -> list[int]:
    """Return the tokens after which a request is handed over: the end markers that a forced end writes. The list is
    empty if one of them has several tokens. Other markers, such as the beginning of a tool call, are also text of the
    answer, which the client would lack."""
    ends = {markers.ends[0], *(end for _, end in markers.own_ends)}
    if not markers.known or any(len(end) != 1 for end in ends):
        return []
    return sorted(token for (token,) in ends)


class HandOvers:
    """The decisions in force, one for a request. report: records the outcome of a decision."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._decided: dict[LiveRequest, Decided] = {}
        # Requests whose decision has changed since the engine last looked.
        self._changed: dict[LiveRequest, None] = {}
        # Why no request of this engine can be handed over; empty if requests can be.
        self.refusal = NO_CONNECTOR

    def accept(self, message: agent_pb2.HandOver, live: LiveRequest, markers: Markers) -> None:
        """Take in a decision; an empty URL takes the one before back."""
        before = self._take(live)
        if before is not None:
            self._report(before.decision_id, Outcome.SUPERSEDED, live)
        if not message.url:
            self._report(message.decision_id, Outcome.APPLIED, live)
        elif reason := self._refusal(message, live, markers):
            self._report(message.decision_id, Outcome.REFUSED, live, reason)
        elif live.phase is Phase.OUTPUT:
            self._report(message.decision_id, Outcome.ENDED_NATURALLY, live)
        else:
            self._decided[live] = Decided(message.decision_id, message.shadow, message.url, message.ref)
            self._changed[live] = None

    def _refusal(self, message: agent_pb2.HandOver, live: LiveRequest, markers: Markers) -> str:
        if len(message.url) > MAX_URL or len(message.ref) > MAX_TEXT:
            return "the URL or the reference is too long"
        if live.phase is Phase.UNKNOWN:
            return NOT_KNOWN
        if not live.info.hand_over_candidate:
            return "no relay stands ready to continue the request"
        if not stops(markers):
            return SEVERAL_TOKENS
        return self.refusal

    def _take(self, live: LiveRequest) -> Decided | None:
        if live in self._decided:
            self._changed[live] = None
        return self._decided.pop(live, None)

    def of(self, live: LiveRequest) -> Decided | None:
        """Return the decision in force that stops a request; None if there is none, or if it is in shadow."""
        decided = self._decided.get(live)
        return None if decided is None or decided.shadow else decided

    def take_changed(self) -> list[LiveRequest]:
        """Return the live requests whose decision has changed since the last call."""
        if not self._changed:
            return []
        changed, self._changed = list(self._changed), {}
        return changed

    def ended_thinking(self, live: LiveRequest) -> None:
        """Report the outcome for a request that goes on to its answer on this engine."""
        if (decided := self._take(live)) is not None:
            outcome = Outcome.SHADOWED if decided.shadow else Outcome.ENDED_NATURALLY
            self._report(decided.decision_id, outcome, live)

    def close(self, live: LiveRequest, finish_reason: str, blocks: int | None) -> None:
        """Report the outcome for a request that has ended. blocks: number of KV blocks that are kept for the other
        engine; None if the request was not handed over."""
        decided = self._decided.pop(live, None)
        self._changed.pop(live, None)
        if decided is None:
            return
        if blocks is not None:
            self._report(decided.decision_id, Outcome.APPLIED, live, f"{blocks} block{'s'[: blocks != 1]}")
        else:
            outcome = Outcome.REQUEST_GONE if finish_reason in GONE else Outcome.ENDED_NATURALLY
            self._report(decided.decision_id, outcome, live)

    def drop(self, outcome: Outcome | None, detail: str = "") -> None:
        """Drop all decisions with this outcome; None reports no outcome."""
        for live in list(self._decided):
            decided = self._take(live)
            if outcome is not None and decided is not None:
                self._report(decided.decision_id, outcome, live, detail)
