"""Keeps what is known of a request that counts when its stream ends and that goes on in the engine process's next
stream, so that long requests count as often as short ones."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from meridian_control.common.table_columns import NO_END
from meridian_control.policy.effects import shortest_lease_s

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from meridian_control.capabilities.control_group.cohorts import Cohort
    from meridian_control.capabilities.control_group.requests import ControlRequest
    from meridian_control.common.opened_request import Identity, OpenedRequest
    from meridian_control.policy.model import Policy
    from meridian_control.policy.shortening_kinds import Kind


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A request as it was in the newest report of a stream that has ended.

    cohort: where it waits to be counted. until: time until which the agent obeys without a stream. phase, think_tokens,
    first_end: as in the request table. reentered: whether it has begun to think again. ended_by: the kind of shortening
    that has ended the thinking of a treated request first. stop_tokens: thinking tokens at which shortening would have
    ended that of a request of the control group, -1 if it would not have.
    """

    identity: Identity
    cohort: Cohort
    until: datetime
    phase: int
    think_tokens: int
    first_end: int = NO_END
    reentered: bool = False
    ended_by: Kind | None = None
    stop_tokens: int = -1

    def is_still(self, opened: OpenedRequest, phase: int) -> bool:
        """Return whether this is the request that a snapshot lists, and its thinking has not ended or begun again
        meanwhile: nothing tells then what has ended it. phase: the request's present phase."""
        goes_on = phase == self.phase and opened.think_tokens >= self.think_tokens
        return goes_on and opened.identity == self.identity


def lease(policy: Policy) -> timedelta:
    """Return how long an agent without a stream goes on to obey all that ends thinking."""
    return timedelta(seconds=shortest_lease_s(policy.fallback, policy.scheduler, policy.entropy))


def drop(left: Iterable[GoingOn]) -> None:
    """Let the requests of later cohorts count without those that do not go on."""
    for before in left:
        before.cohort.leave()


def stop_tokens(request: ControlRequest | None, before: GoingOn | None) -> int:
    """Return the thinking tokens at which shortening would have ended the thinking of a request of the control group,
    -1 if it would not have."""
    if before is not None and before.stop_tokens >= 0:
        return before.stop_tokens
    return request.stop_tokens if request is not None else -1
