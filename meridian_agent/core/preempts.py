"""Holds the decisions that let waiting requests preempt thinking ones, and reports the one outcome of each decision.

The module owns which requests wait with such a decision; `engine/preemption` carries the decisions out in vLLM. Runs on
the engine-core thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.step_record import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian.v1 import agent_pb2

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_record import Report

# Largest number of requests in a decision that may be preempted; this project's control plane names 64.
MAX_VICTIMS = 128
JOINED = "the request joined a step without a preemption"


class Claim(NamedTuple):
    """A decision in force: a meridian.v1.Preempt with its victims as live requests. The limits are as there."""

    decision_id: int
    shadow: bool
    victims: tuple[LiveRequest, ...]
    max_prompt_tokens: int
    max_preemptions: int
    recomputed_tokens_per_s: int
    max_wait_s: float


class Preempts:
    """The decisions in force by the waiting request, in the order in which they arrived. report: records the outcome of
    a decision. refusal: why this engine preempts nothing for waiting requests; empty if it can."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.claims: dict[LiveRequest, Claim] = {}
        self.refusal = ""

    def accept(self, message: agent_pb2.Preempt, live: LiveRequest, victims: Sequence[LiveRequest]) -> None:
        """Take in a decision about a waiting request; one without victims takes the one before back. victims: the
        requests that may be preempted, as far as they live."""
        self.settle(live, Outcome.SUPERSEDED)
        if not message.victims:
            self._report(message.decision_id, Outcome.APPLIED, live)
            return
        if self.refusal:
            self._report(message.decision_id, Outcome.REFUSED, live, self.refusal)
            return
        self.claims[live] = Claim(
            message.decision_id,
            message.shadow,
            tuple(victims),
            message.max_prompt_tokens,
            message.max_preemptions,
            message.recomputed_tokens_per_s,
            message.max_wait_ms / 1e3,
        )

    def put_last(self, lives: Iterable[LiveRequest]) -> None:
        """Let these requests stand behind all others, which then have their turn first."""
        for live in lives:
            self.claims[live] = self.claims.pop(live)

    def settle(self, live: LiveRequest, outcome: Outcome | None, detail: str = "") -> None:
        """End the decision about a request, if there is one, with this outcome; None reports no outcome."""
        claim = self.claims.pop(live, None)
        if claim is not None and outcome is not None:
            self._report(claim.decision_id, outcome, live, detail)

    def drop(self, outcome: Outcome | None) -> None:
        """End all decisions with this outcome; None reports no outcome."""
        for live in list(self.claims):
            self.settle(live, outcome)
