"""Defines the records of the decision log: a decision, what its rule saw, and the life of the request that it is
about."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from meridian.v1 import agent_pb2

from meridian_control.decision_log.request_ids import shortened

if TYPE_CHECKING:
    from datetime import datetime

    from meridian_control.policy.model import Policy

# Kept of one life, the newest: probes, of which there may be thousands, and all else.
LIFE_PROBES, LIFE_EVENTS = 64, 128

Key = tuple[str, str, str]


class Signals(NamedTuple):
    """A request as the rules saw it; NaN and 0 for what was not measured."""

    phase: int
    think_tokens: int
    output_tokens: int
    entropy_nats: float
    end_rank: int
    rpdi: float
    eat_nats: float
    eat_ema_nats: float
    eat_ema_variance: float
    eat_samples: int
    # Newest first.
    boundary_ranks: tuple[int, ...]
    # None for no cap.
    max_think_tokens: int | None


@dataclass(eq=False, slots=True)
class LifeEvent:
    """An event in a request's life, and the request's state from then on."""

    number: int
    time: datetime
    kind: str
    phase: int
    think_tokens: int
    output_tokens: int
    detail: str = ""


@dataclass(eq=False, slots=True)
class LoggedDecision:
    """A decision about a request, whose policy held then. The outcome is unspecified until it is known."""

    number: int
    time: datetime
    life: Life
    session_id: str
    decision_id: int
    kind: str
    reason: str
    shadow: bool
    revision: int
    policy: Policy
    signals: Signals
    outcome: agent_pb2.Outcome.ValueType = agent_pb2.OUTCOME_UNSPECIFIED
    outcome_time: datetime | None = None
    outcome_think_tokens: int = 0
    detail: str = ""
    measured_eat_nats: float | None = None


@dataclass(eq=False, slots=True)
class Life:
    """One request from its opening to its end, as far as this replica heard of it."""

    engine_id: str
    incarnation: str
    # The session that tells of it.
    session_id: str
    opened: agent_pb2.RequestOpened
    open_time: datetime
    joined_late: bool
    close_time: datetime | None = None
    think_tokens: int = 0
    output_tokens: int = 0
    events: deque[LifeEvent | LoggedDecision] = field(default_factory=lambda: deque(maxlen=LIFE_EVENTS))
    probes: deque[LifeEvent | LoggedDecision] = field(default_factory=lambda: deque(maxlen=LIFE_PROBES))
    left_out: int = 0

    @property
    def key(self) -> Key:
        return self.engine_id, self.incarnation, self.opened.request_id

    def __len__(self) -> int:
        return len(self.events) + len(self.probes)

    def in_order(self) -> list[LifeEvent | LoggedDecision]:
        return sorted((*self.events, *self.probes), key=lambda event: event.number)

    def is_called(self, request_id: str) -> bool:
        """Whether that is its id, or the client's part of it; an empty one is everybody's."""
        own = self.opened.request_id
        return request_id in ("", own) or (request_id in own and request_id in shortened(own))


@dataclass(slots=True)
class Decision:
    """One decision, from when it is made until its outcome is known."""

    decision_id: int
    kind: str
    reason: str
    slot: int | None = None
    request_id: str = ""
    # Newest step of the engine when it was made.
    step: int = 0
    outcome: agent_pb2.Outcome.ValueType = agent_pb2.OUTCOME_UNSPECIFIED
    # In the decision log, where the request's life is kept.
    logged: LoggedDecision | None = None

    @property
    def counted_as(self) -> str:
        return f"force/{self.reason}" if self.kind == "force" else self.kind
