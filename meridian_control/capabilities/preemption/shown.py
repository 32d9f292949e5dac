"""Shows preemptions in the decision log and on the status page. All functions are pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian_control.capabilities.preemption.rule import NO_PLACE
from meridian_control.journal.records import Detail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.journal.records import Compared
    from meridian_control.policy.model import Policy


@dataclass(frozen=True, slots=True)
class ClaimDetail(Detail):
    """What the decision log shows of a decision: why the request waited, the running requests and how many may run, the
    fraction of the KV cache in use, and how many requests might be preempted."""

    reason: str
    running: int
    max_running: int
    kv_used: float
    victims: int

    def compared(self, policy: Policy) -> Iterator[Compared]:
        if self.reason == NO_PLACE:
            yield "running", self.running, ">=", "places", self.max_running
        else:
            yield "kv_used", self.kv_used, "of", "the KV cache", 1.0
        yield "preemptible requests", self.victims, ">", "none", 0


def preempted_for(info: OpenedRequest, tokens: int) -> str:
    """Return for whom a request was preempted, and what that costs. info: the request that waited."""
    named = (("tenant", info.tenant), ("SLO class", info.slo_class))
    of = " and ".join(f"{name} {value}" for name, value in named if value)
    return f"request {info.request_id}{f' of {of}' if of else ''}: {tokens} tokens to compute again"
