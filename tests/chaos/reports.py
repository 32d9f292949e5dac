"""Messages that an engine under test sends to its driver."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Done:
    """A request that has ended. case: the index of its prompt."""

    case: int
    tokens: tuple[int, ...]
    reason: str
    began_s: float
    ended_s: float


@dataclass
class Report:
    """Events since the last report. Times are of the monotonic clock, which all processes share.

    longest_s: longest time from one step's tokens to the next one's. states: times at which the agent's state changed,
    with the state and whether decisions of its current stream were in force. ring, inbox: the largest queue lengths
    seen. fork_held_s: how long the handlers before a fork delayed the last fork.
    """

    steps: int = 0
    tokens: int = 0
    longest_s: float = 0.0
    finished: list[Done] = field(default_factory=list)
    states: list[tuple[float, str, bool]] = field(default_factory=list)
    ring: int = 0
    inbox: int = 0
    dropped: int = 0
    fault: str = ""
    rss_mb: float = 0.0
    fork_held_s: float = 0.0
