"""The simulator's own record of one request: its phase, its limits, and the decisions that may force its end.

Each sampled token is checked against the record; an `AssertionError` names the violation. The module knows an engine's
shape, and of the agent only the phase machine. `books` passes the decisions on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian_agent.core.phases import Markers, Phase, PhaseState

if TYPE_CHECKING:
    from tests.sim.engine import Shape

NO_LIMIT = 1 << 40


@dataclass
class Watched:
    request_id: str
    own_cap: int | None
    default_cap: int | None
    state: PhaseState
    markers: Markers
    # Whether the agent tracks the request; False if the agent was off when the request came and has not read it since.
    known: bool = True
    cap: tuple[int | None, bool] | None = None
    # The part of the directives (ORDER, RULES or OPERATOR) of an accepted force that has not begun, or 0.
    force: int = 0
    ending_left: int = 0
    # Limits when the last two sets of masks were made, newest last.
    limits: tuple[int, int] = (NO_LIMIT, NO_LIMIT)
    # Whether markers changed during the request, so that its counts cannot be checked.
    unsure: bool = False
    # The step of the newest token, whether a phase of thinking began in it, and whether one began in the step before.
    step: int = 0
    began: bool = False
    began_before: bool = False
    # Steps in a row that left the request out, and the most that a plan has allowed meanwhile.
    skipped: int = 0
    may_skip: int = 0

    def forget(self) -> None:
        """Note that the agent is off, which voids its decisions for this request."""
        self.known, self.cap, self.default_cap, self.force, self.ending_left = False, None, None, 0, 0
        self.joins()

    def adopted(self, default_cap: int | None) -> None:
        """Note that an agent that has come back has read the request again."""
        self.known, self.default_cap, self.limits = True, default_cap, (NO_LIMIT, NO_LIMIT)

    def limit(self) -> int:
        policy = self.default_cap if self.cap is None else None if self.cap[1] else self.cap[0]
        return min(cap if cap is not None else NO_LIMIT for cap in (policy, self.own_cap))

    def joins(self) -> None:
        """Note that the request is in a step, or has a reason of its own not to be."""
        self.skipped = self.may_skip = 0

    def left_out(self, bound: int) -> None:
        """Note a step without the request. bound: how many steps in a row the plan in force allows."""
        self.skipped, self.may_skip = self.skipped + 1, max(bound, self.may_skip)
        assert self.skipped <= self.may_skip + 1, (
            f"{self.request_id} is left out {self.skipped} times in a row, {self.may_skip} are allowed"
        )

    def masked(self, markers: Markers) -> None:
        """Note the limit, because the step's masks are about to be made by an agent with these markers."""
        self.unsure = self.unsure or self.markers != markers
        self.limits = self.limits[1], self.limit()

    def sampled(self, token: int, forced: bool, step: int, shape: Shape, frozen: bool) -> None:
        """Check the request's next token, sampled in the engine's step `step`. forced: whether a mask left no other
        token."""
        if self.step != step:
            self.step, self.began_before, self.began = step, self.began, False
        at = self.state.think_tokens if self.state.phase is Phase.THINK else -1
        self._check(forced, at, shape, frozen)
        before = self.state.phase
        self.state.feed(token, self.markers)
        self.began = self.began or (before is not Phase.THINK and self.state.phase is Phase.THINK)
        if self.state.phase is not Phase.THINK:
            self.force = 0

    def _check(self, forced: bool, at: int, shape: Shape, frozen: bool) -> None:
        """Check the token against the limits. at: thinking tokens before it; -1 if the request does not think."""
        # Masks are made a step ahead with asynchronous scheduling, and also if only the workers know the drafts.
        now = self.limit()
        late = self.limits if shape.is_async or shape.hidden else (now,)
        if frozen:
            # An ending that is half written is left as it is; caps apply again after the freeze.
            assert not forced, f"{self.request_id} is forced while frozen"
            self.ending_left = self.force = 0
        elif self.ending_left:
            assert forced, f"the ending of {self.request_id} is broken off"
            self.ending_left -= 1
        elif forced:
            by_cap = at >= min(now, *late)
            assert at >= 0, f"{self.request_id} is forced outside thinking"
            assert by_cap or self.force, f"thinking of {self.request_id} is ended at {at} tokens for no reason"
            self.ending_left = len(self.state.ending(self.markers)) - 1
            self.force = 0
        else:
            limit = max(now, *late)
            # In these cases a mask cannot know yet that thinking began in the step before, or among drafts that only
            # the worker knows.
            began = (shape.is_async and self.began_before) or (shape.hidden and self.began)
            assert at < limit or began, f"{self.request_id} thinks on at {at} tokens, past its cap of {limit}"
