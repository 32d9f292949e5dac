"""What an engine under test tells its driver."""

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
    """What happened since the last report. Times are of the monotonic clock, which all processes share.

    busy_s: the time it was let run. longest_s: from one step's tokens to the next one's. states: when the agent was
    seen in which state, and whether decisions of the stream it is on were in force. ring, inbox: the most that was seen
    waiting. live: requests that the agent knows of. cpu_s: processor time of the engine's processes since they started,
    where a metered engine counts it, without what they spend waiting for each other. fork_held_s: for how long what
    runs before a fork held the last one up.
    """

    busy_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    longest_s: float = 0.0
    finished: list[Done] = field(default_factory=list)
    states: list[tuple[float, str, bool]] = field(default_factory=list)
    ring: int = 0
    inbox: int = 0
    live: int = 0
    dropped: int = 0
    revision: int = 0
    fault: str = ""
    rss_mb: float = 0.0
    threads: int = 0
    files: int = 0
    fork_held_s: float = 0.0
