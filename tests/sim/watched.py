"""One request by books of the simulator's own: its phase, its limits, what it is to be forced to.

Each token that is sampled is held against them; an `AssertionError` names what was broken. Knows no engine but its
shape, and nothing of the agent's but the phase machine. `books` says what was decided.
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
    # The agent has it: not one that was off when it came, nor one that has not come so far since.
    known: bool = True
    cap: tuple[int | None, bool] | None = None
    # The part of a force that was accepted and has not begun.
    force: int = 0
    ending_left: int = 0
    # Limits when the last masks were made, newest last.
    limits: tuple[int, int] = (NO_LIMIT, NO_LIMIT)
    # Markers changed while it lived: its counts are not ours to know.
    unsure: bool = False
    # The step of its newest token; whether a phase of thinking began in it, and in the one before.
    step: int = 0
    began: bool = False
    began_before: bool = False
    # Steps in a row that it was left out of, and the most that a plan has allowed meanwhile.
    skipped: int = 0
    may_skip: int = 0

    def forget(self) -> None:
        """The agent is off: whatever it was told of this is void."""
        self.known, self.cap, self.default_cap, self.force, self.ending_left = False, None, None, 0, 0
        self.joins()

    def adopted(self, default_cap: int | None) -> None:
        """An agent that has come back has read it again."""
        self.known, self.default_cap, self.limits = True, default_cap, (NO_LIMIT, NO_LIMIT)

    def limit(self) -> int:
        policy = self.default_cap if self.cap is None else None if self.cap[1] else self.cap[0]
        return min(cap if cap is not None else NO_LIMIT for cap in (policy, self.own_cap))

    def joins(self) -> None:
        """It is in a step, or has a reason of its own not to be."""
        self.skipped = self.may_skip = 0

    def left_out(self, bound: int) -> None:
        """A step goes without it. bound: how often in a row the plan in force allows that."""
        self.skipped, self.may_skip = self.skipped + 1, max(bound, self.may_skip)
        assert self.skipped <= self.may_skip + 1, (
            f"{self.request_id} is left out {self.skipped} times in a row, {self.may_skip} are allowed"
        )

    def masked(self, markers: Markers) -> None:
        """The step's masks are about to be made, by an agent that goes by these markers."""
        self.unsure = self.unsure or self.markers != markers
        self.limits = self.limits[1], self.limit()

    def sampled(self, token: int, forced: bool, step: int, shape: Shape, frozen: bool) -> None:
        """Its next token, in the engine's step of that number. forced: a mask left no other token."""
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
        """at: thinking tokens before this one; -1 while it does not think."""
        # With asynchronous scheduling a mask is made a step ahead, and drafts that only workers know are.
        now = self.limit()
        late = self.limits if shape.is_async or shape.hidden else (now,)
        if frozen:
            # An ending that is half written is left as it is; caps hold again afterwards.
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
            # There a mask can also not know yet that thinking began in the step before, nor where only the worker knows
            # the drafts that it begins among them.
            began = (shape.is_async and self.began_before) or (shape.hidden and self.began)
            assert at < limit or began, f"{self.request_id} thinks on at {at} tokens, past its cap of {limit}"
