"""The simulator's own record of one request: its phase, its limits, and the decisions that may force its end.

Each sampled token is checked against the record; an `AssertionError` names the violation. The module knows an engine's
shape, and of the agent only the phase machine and how much of a reserve holds. `books` passes the decisions on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meridian_agent.core.phases import Markers, Phase, PhaseState
from meridian_agent.core.think_limit import held_back
from tests.sim.engine import Shape

NO_LIMIT = 1 << 40


class Limits(NamedTuple):
    """Limits of a request's thinking: a cap in thinking tokens, and an answer reserve, 0 for none."""

    cap: int | None = None
    reserve: int = 0


NO_LIMITS = Limits(NO_LIMIT)


@dataclass
class Watched:
    request_id: str
    # Tokens that the request may generate, by its max_tokens and by the context.
    most_tokens: int
    own_cap: int | None
    default: Limits
    state: PhaseState
    markers: Markers
    # Whether the agent tracks the request; False if the agent was off when the request came and has not read it since.
    known: bool = True
    # The newest decided cap with its answer reserve, and whether it is in shadow; None before the first decision.
    cap: tuple[Limits, bool] | None = None
    # Tokens that the request has generated.
    generated: int = 0
    # The part of the directives (ORDER, RULES or OTHER_ENDS) of an accepted force that has not begun, or 0.
    force: int = 0
    ending_left: int = 0
    # The state before the newest token, and the number of ends of thinking before the one in which the model has
    # stopped and went on, -1 for none.
    before: PhaseState | None = None
    stopped_after: int = -1
    # Limits when the last two sets of masks were made, newest last.
    limits: tuple[Limits, Limits] = (NO_LIMITS, NO_LIMITS)
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
        self.known, self.cap, self.default, self.force, self.ending_left = False, None, Limits(), 0, 0
        self.stopped_after = -1
        self.joins()

    def adopted(self, default: Limits) -> None:
        """Note that an agent that has come back has read the request again."""
        self.known, self.default, self.limits = True, default, (NO_LIMITS, NO_LIMITS)

    def limit(self) -> Limits:
        policy = self.default if self.cap is None else Limits() if self.cap[1] else self.cap[0]
        cap = min(cap if cap is not None else NO_LIMIT for cap in (policy.cap, self.own_cap))
        return Limits(cap, policy.reserve)

    def _due(self, limits: Limits) -> bool:
        """Return whether these limits end the request's thinking before its next token."""
        cap, reserve = limits.cap, held_back(self.state, self.markers, limits.reserve, self.most_tokens)
        left = self.most_tokens - self.generated - len(self.markers.ending_of(self.state.start))
        over = (cap is not None and self.state.think_tokens >= cap) or (reserve > 0 and left <= reserve)
        return self.state.phase is Phase.THINK and over

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

    def goes_on(self) -> bool:
        """Return whether the request, whose newest token is a stop of the model, is to end its thinking and answer."""
        state, before = self.state, self.before
        if before is None or not before.phase is state.phase is Phase.THINK or before.ends == self.stopped_after:
            return False
        left = self.most_tokens - (self.generated - 1)
        return self.limit().reserve > 0 and left > len(before.ending(self.markers))

    def take_back(self) -> None:
        """Note that the newest token, a stop of the model, is taken back, so that a forced end has to follow."""
        self.generated -= 1
        if self.before is not None:
            self.state, self.stopped_after = self.before, self.before.ends
            self.ending_left = len(self.state.ending(self.markers))

    def sampled(self, token: int, forced: bool, step: int, shape: Shape, frozen: bool) -> None:
        """Check the request's next token, sampled in the engine's step `step`. forced: whether a mask left no other
        token."""
        if self.step != step:
            self.step, self.began_before, self.began = step, self.began, False
        self._check(forced, shape, frozen)
        before = self.state.phase
        self.state.feed(token, self.markers)
        thinks = self.state.phase is Phase.THINK
        self.began = self.began or (before is not Phase.THINK and thinks)
        assert not (forced and thinks) or self.ending_left, f"{self.request_id} thinks on after a whole forced end"
        if not thinks:
            self.force = 0

    def _check(self, forced: bool, shape: Shape, frozen: bool) -> None:
        """Check the token against the limits."""
        # Masks are made a step ahead with asynchronous scheduling, and also if only the workers know the drafts.
        now, at = self.limit(), self.state.think_tokens
        late = self.limits if shape.is_async or shape.hidden else ()
        if frozen:
            # An ending that is half written is left as it is; caps apply again after the freeze.
            assert not forced, f"{self.request_id} is forced while frozen"
            self.ending_left = self.force = 0
        elif self.ending_left:
            assert forced, f"the ending of {self.request_id} is broken off"
            self.ending_left -= 1
        elif forced:
            by_limit = any(map(self._due, (now, *late)))
            assert self.state.phase is Phase.THINK, f"{self.request_id} is forced outside thinking"
            assert by_limit or self.force, f"thinking of {self.request_id} is ended at {at} tokens for no reason"
            self.ending_left = len(self.state.ending(self.markers)) - 1
            self.force = 0
        else:
            # In these cases a mask cannot know yet that thinking began in the step before, or among drafts that only
            # the worker knows.
            began = (shape.is_async and self.began_before) or (shape.hidden and self.began)
            past = all(map(self._due, (now, *late)))
            assert not past or began, (
                f"{self.request_id} thinks on at {at} tokens, token {self.generated} of {self.most_tokens}, past its "
                f"cap of {now.cap} or its reserve of {now.reserve}"
            )
