"""Defines the records of the decision log: decisions, the signals that their rules saw, and the lives of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.decision_log.request_ids import is_called
from meridian_control.decisions.table_columns import RANK_HISTORY, SIGNAL_COLUMNS, SIGNAL_ROW

if TYPE_CHECKING:
    from datetime import datetime

    from meridian_control.budgets.stages import Shortening
    from meridian_control.handover.results import Handover
    from meridian_control.policy.model import Policy
    from meridian_control.pressure.controller import LevelChange

# Largest numbers of newest probes and of other newest events kept of one life. Probes have a limit of their own,
# because one request may have thousands of probes.
LIFE_PROBES, LIFE_EVENTS = 64, 128

Key = tuple[str, str, str]


class Signals(NamedTuple):
    """The signals of a request as the rules saw them. NaN and 0 stand for a signal that was not measured."""

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
    # End-marker ranks at the last sentence ends, newest first.
    boundary_ranks: tuple[int, ...]
    # Cap in thinking tokens, None for no cap.
    max_think_tokens: int | None
    # Cycle in which the thinking repeats: tokens of a round, and tokens that repeat; 0 for no cycle.
    loop_period_tokens: int = 0
    loop_tokens: int = 0
    # Number of EAT probes in a row, up to the newest one, that had the same trial answer.
    same_answer: int = 0
    # End-marker margins and RPDI at the last sentence ends, and the moving means and variances of EAT after the samples
    # before the newest one; newest first, as many as the policy's confirmation reads.
    boundary_margins_nats: tuple[float, ...] = ()
    boundary_rpdi: tuple[float, ...] = ()
    earlier_eat_ema_nats: tuple[float, ...] = ()
    earlier_eat_ema_variance: tuple[float, ...] = ()
    # Tokens among the newest thinking tokens that repeat earlier thinking, 0 if the agent reported none.
    repeated_tokens: int = 0
    # Thinking tokens at which the newest EAT sample was measured.
    eat_think_tokens: int = 0


@dataclass(eq=False, slots=True)
class LifeEvent:
    """An event in a request's life, with the phase and the token counts of the request after the event."""

    number: int
    time: datetime
    kind: str
    phase: int
    think_tokens: int
    output_tokens: int
    detail: str = ""


class Circumstances(NamedTuple):
    """The values that all decisions share that a session makes at once about requests with one policy.

    window_tokens: length of the entropy window.
    """

    time: datetime
    session_id: str
    shadow: bool
    revision: int
    policy: Policy
    window_tokens: int


@dataclass(eq=False, slots=True)
class Decision:
    """A decision about an engine or one of its requests. `outcome` is OUTCOME_UNSPECIFIED until it is known.

    `is_logged` says whether the decision log has the decision, as part of its request's life. Then the fields without a
    default are set: `seen` is the request's row of the table at the decision, packed as SIGNAL_ROW has it. The row is
    unpacked when it is read, because few decisions ever are.
    """

    decision_id: int
    kind: str
    reason: str
    slot: int | None = None
    request_id: str = ""
    # Newest reported step of the engine when the decision was made.
    step: int = 0
    # The cap that a decision of kind cap sets, in thinking tokens; 0 otherwise.
    cap_tokens: int = 0
    outcome: agent_pb2.Outcome.ValueType = agent_pb2.OUTCOME_UNSPECIFIED
    # Thinking tokens of the request when the outcome was reached, and the outcome's detail.
    outcome_think_tokens: int = 0
    detail: str = ""
    is_logged: bool = False
    number: int = field(init=False)
    life: Life = field(init=False)
    under: Circumstances = field(init=False)
    seen: bytes = field(init=False)
    outcome_time: datetime | None = None
    measured_eat_nats: float | None = None
    # Reason that an operator gave for an end of thinking.
    operator_reason: str = ""
    # The handover with its result, for a decision of kind hand_over.
    hand_over: Handover | None = None
    # The budget or pressure entry that lowered the cap or made soft close begin earlier, None if none did; and the
    # newest change of level of the pressure entry.
    shortening: Shortening | None = None
    level_change: LevelChange | None = None

    @property
    def counted_as(self) -> str:
        return f"{self.kind}/{self.reason}" if self.kind in ("force", "hand_over") else self.kind

    @property
    def time(self) -> datetime:
        return self.under.time

    @property
    def session_id(self) -> str:
        return self.under.session_id

    @property
    def shadow(self) -> bool:
        return self.under.shadow

    @property
    def revision(self) -> int:
        return self.under.revision

    @property
    def policy(self) -> Policy:
        return self.under.policy

    @property
    def signals(self) -> Signals:
        return unpacked(self.seen, self.under.window_tokens, self.policy.entropy.confirm_sentence_ends)


def unpacked(seen: bytes, window_tokens: int, confirm_sentence_ends: int) -> Signals:
    """Return the signals of one request from its row of the table, packed as SIGNAL_ROW has it.

    The RPDI is computed by the same formula as `signals.rpdi`. window_tokens: length of the entropy window.
    confirm_sentence_ends: number of sentence ends in a row that the rules read.
    """
    values = np.frombuffer(seen, SIGNAL_ROW)[0]
    row: dict[str, Any] = {name: values[name].tolist() for name in SIGNAL_COLUMNS}
    total, count, cap = row["entropy_sum"], row["entropy_count"], row["max_think_tokens"]
    known = min(row["boundary_count"], RANK_HISTORY)
    read = min(known, confirm_sentence_ends)
    sampled = max(0, min(row["eat_count"], confirm_sentence_ends) - 1)
    is_full = count >= window_tokens and total
    return Signals(
        phase=row["phase"],
        think_tokens=max(0, row["think_tokens"]),
        output_tokens=max(0, row["output_tokens"]),
        entropy_nats=row["entropy_nats"],
        end_rank=row["end_rank"],
        rpdi=row["entropy_window_sum"] / window_tokens / (total / count) if is_full else math.nan,
        eat_nats=row["eat_nats"],
        eat_ema_nats=row["eat_ema_nats"],
        eat_ema_variance=row["eat_ema_variance"],
        eat_samples=row["eat_count"],
        boundary_ranks=tuple(row["boundary_ranks"][:known]),
        max_think_tokens=cap if cap >= 0 else None,
        loop_period_tokens=row["loop_period"],
        loop_tokens=row["loop_tokens"],
        same_answer=row["same_answer"],
        boundary_margins_nats=tuple(row["boundary_margins"][:read]),
        boundary_rpdi=tuple(row["boundary_rpdi"][:read]),
        earlier_eat_ema_nats=tuple(row["earlier_eat_ema_nats"][:sampled]),
        earlier_eat_ema_variance=tuple(row["earlier_eat_ema_variance"][:sampled]),
        repeated_tokens=row["repeated_tokens"],
        eat_think_tokens=max(0, row["eat_think_tokens"]),
    )


@dataclass(eq=False, slots=True)
class Life:
    """The life of one request from its opening to its end, as far as this replica received it."""

    engine_id: str
    incarnation: str
    # Id of the session that last reported on the request.
    session_id: str
    opened: agent_pb2.RequestOpened
    open_time: datetime
    joined_late: bool
    close_time: datetime | None = None
    think_tokens: int = 0
    output_tokens: int = 0
    events: list[LifeEvent | Decision] = field(default_factory=list)
    probes: list[LifeEvent | Decision] = field(default_factory=list)
    left_out: int = 0
    # Whether the log adds events to the life: the request lives, and the log has not dropped the life.
    is_live: bool = False
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.engine_id, self.incarnation, self.opened.request_id

    def __len__(self) -> int:
        return len(self.events) + len(self.probes)

    def in_order(self) -> list[LifeEvent | Decision]:
        return sorted((*self.events, *self.probes), key=lambda event: event.number)

    def is_called(self, request_id: str) -> bool:
        """Return whether `request_id` is the id of the request or the client's part of that id; an empty id fits any
        request."""
        return not request_id or is_called(self.opened.request_id, request_id)
