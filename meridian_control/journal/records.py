"""Defines the records of the decision log: decisions, the signals that their rules saw, and the lives of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.common.opened_request import OPENED_BYTES
from meridian_control.common.table_columns import NOT_PROBED, RANK_HISTORY, SIGNAL_COLUMNS, SIGNAL_ROW
from meridian_control.journal.request_ids import is_called
from meridian_control.policy.shortening_kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from meridian.v1 import fleet_pb2
    from numpy.typing import NDArray

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.policy.model import Policy, Who

# About as many bytes as an event takes; a decision without the row that its rule saw; a life without its request.
EVENT_BYTES, DECISION_BYTES, LIFE_BYTES = 512, 448, 512

Key = tuple[str, str, str, int]

# A comparison: name and value of the signal, an operator, name and value of the limit.
Compared = tuple[str, float, str, str, float]

# Reasons of caps that no entry of the policy has lowered.
OWN_CAPS = ("hard_cap", "lifted")
# Kinds of the events between which an engine is frozen.
FREEZE = "frozen", "thawed"
# Kinds of decision that are counted together, whatever their reason.
COUNTED_TOGETHER = ("cap", "plan", "tier", "probe")


class Seen(Protocol):
    """The live requests of an engine in one state, as their rules saw them; columns are [requests]."""

    window: NDArray[np.float32]

    @property
    def think_tokens(self) -> NDArray[np.int64]: ...

    @property
    def output_tokens(self) -> NDArray[np.int64]: ...

    @property
    def probed_tokens(self) -> NDArray[np.int64]: ...

    def packed_row(self, index: int) -> bytes:
        """Return the signals of one request, packed as SIGNAL_ROW has them."""
        ...


class Detail:
    """The detail that a capability adds to a decision in the log. A capability overrides only what it has.

    ref: reference under which other lives belong to the decision's life, too; empty for none.
    """

    __slots__ = ()
    ref = ""

    def compared(self, policy: Policy) -> Iterable[Compared]:
        """Return the values that the capability compared. policy: the one that held for the request."""
        return ()

    def fill(self, message: fleet_pb2.LoggedDecision) -> None:
        """Fill in the capability's fields of the decision's message."""


class Shortening(NamedTuple):
    """The shortening of a request by an entry of the policy. section, name: those of the entry. stage: the request's
    stage. without: the request's policy without the entry."""

    section: str
    name: str
    stage: int
    without: Policy

    @property
    def kind(self) -> Kind:
        return Kind(self.section, self.name)


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
    # RPDI at the last sentence ends, and the moving means and variances of EAT after the samples before the newest one;
    # newest first, as many as the policy's confirmation reads.
    boundary_rpdi: tuple[float, ...] = ()
    earlier_eat_ema_nats: tuple[float, ...] = ()
    earlier_eat_ema_variance: tuple[float, ...] = ()
    # Thinking tokens at which the newest EAT sample was measured.
    eat_think_tokens: int = 0


# The signals of a request that thinks, of which no signal is kept.
NOT_MEASURED = Signals(
    phase=agent_pb2.PHASE_THINK,
    think_tokens=0,
    output_tokens=0,
    entropy_nats=math.nan,
    end_rank=0,
    rpdi=math.nan,
    eat_nats=math.nan,
    eat_ema_nats=math.nan,
    eat_ema_variance=0.0,
    eat_samples=0,
    boundary_ranks=(),
    max_think_tokens=None,
)


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


class TokenCounts(NamedTuple):
    """Thinking tokens and answer tokens of the requests that decisions are about, [decisions].

    A probe has nothing else if its rule reads nothing else.
    """

    think_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


class RequestChange(NamedTuple):
    """An event of a request in a step, with the request's phase and token counts after the event.

    flags: flags of the token row, 0 if the event has no row.
    """

    kind: str
    flags: int
    step: int
    slot: int
    phase: int
    think_tokens: int
    output_tokens: int


class Behind(NamedTuple):
    """The policy that holds for a request, as far as decisions with one reason depend on it.

    shortening: the entry that has shortened the policy, None if none has. detail: what the entry's capability shows of
    it. engine: the facts of the engine that overrides match on. is_spared: whether decisions are in shadow
    only because the request is held out. is_default_cap: whether the cap is the default one, because a held-out
    request's own policy has a lower one.
    """

    revision: int
    policy: Policy
    shortening: Shortening | None
    detail: Detail | None
    engine: Who
    is_spared: bool = False
    is_default_cap: bool = False


class Circumstances(NamedTuple):
    """The values that all decisions share that a session makes at once, for one reason, about requests with one policy.

    number: place in the order of the log. first_id: id of the first of these decisions; their ids are consecutive.
    seen: the values that their rule saw, for each decision: rows packed as SIGNAL_ROW has them, or token counts.
    window_tokens: length of the entropy window. probed_tokens: for each probe the thinking tokens at the EAT probe
    before it.
    """

    number: int
    first_id: int
    time: datetime
    session_id: str
    behind: Behind
    seen: tuple[bytes, ...] | TokenCounts
    window_tokens: int
    probed_tokens: NDArray[np.int64] | None = None


@dataclass(eq=False, slots=True)
class Decision:
    """A decision about an engine or one of its requests. `outcome` is OUTCOME_UNSPECIFIED until it is known.

    The fields without a default are set while the decision log has the decision, as part of its request's life. The
    signals are unpacked when somebody reads them, because few decisions ever are read.
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
    # Whether the decision is only counted and not carried out.
    shadow: bool = False
    outcome: agent_pb2.Outcome.ValueType = agent_pb2.OUTCOME_UNSPECIFIED
    # Thinking tokens of the request when the outcome was reached, and the outcome's detail.
    outcome_think_tokens: int = 0
    detail: str = ""
    # Number of lists of the log that have the decision, and one more if the outcome is to be written to a file.
    holders: int = 0
    life: Life = field(init=False)
    under: Circumstances = field(init=False)
    outcome_time: datetime | None = None
    measured_eat_nats: float | None = None
    # Reason that an operator gave for an end of thinking.
    operator_reason: str = ""
    # What the capability that has made the decision shows of it.
    own_detail: Detail | None = None

    @staticmethod
    def size_under(under: Circumstances) -> int:
        """Return about the memory of a decision in the log, without its life."""
        return DECISION_BYTES if isinstance(under.seen, TokenCounts) else DECISION_BYTES + len(under.seen[0])

    @property
    def counted_as(self) -> str:
        return self.kind if self.kind in COUNTED_TOGETHER else f"{self.kind}/{self.reason}"

    @property
    def number(self) -> int:
        return self.under.number

    @property
    def time(self) -> datetime:
        return self.under.time

    @property
    def session_id(self) -> str:
        return self.under.session_id

    @property
    def revision(self) -> int:
        return self.under.behind.revision

    @property
    def policy(self) -> Policy:
        return self.under.behind.policy

    @property
    def own_policy(self) -> Policy:
        """The policy of the decision's request without the entry that shortens it."""
        behind = self.under.behind
        return behind.policy if behind.shortening is None else behind.shortening.without

    def path_of(self, section: str, name: str) -> str:
        """Return the dotted path of the value of a field that held for the decision's request."""
        return self.own_policy.path_of(self.under.behind.engine.of(self.life.opened), section, name)

    @property
    def shortening(self) -> Shortening | None:
        """The entry that lowered the cap, made soft close begin earlier or put the rule in force, None if none did."""
        entry, changed = self.under.behind.shortening, self._shortened_field
        if entry is None or changed is None:
            return None
        now, without = (getattr(getattr(policy, changed[0]), changed[1]) for policy in (self.policy, entry.without))
        # The control group's rules are in shadow although no entry has changed that.
        is_in_shadow = changed == ("entropy", "shadow") and now
        return entry if now != without and not is_in_shadow else None

    @property
    def _shortened_field(self) -> tuple[str, str] | None:
        """Section and field of the value that an entry may have changed for the decision, None if none may have."""
        if self.kind == "cap" and self.reason not in OWN_CAPS:
            return "scheduler", "max_think_tokens"
        if self.kind != "force":
            return None
        if self.reason == "soft_close":
            return "scheduler", "soft_think_tokens"
        return ("entropy", "shadow") if self.reason in ENTROPY_REASONS else None

    @property
    def details(self) -> list[Detail]:
        """The details of the decision, from the capability that made it and from the one whose entry led to it."""
        by_entry = self.under.behind.detail if self.shortening is not None else None
        return [detail for detail in (self.own_detail, by_entry) if detail is not None]

    @property
    def probed_tokens(self) -> int:
        """The thinking tokens at the EAT probe before this one; NOT_PROBED if there was none or this is no probe."""
        before, index = self.under.probed_tokens, self.decision_id - self.under.first_id
        return NOT_PROBED if before is None else int(before[index])

    @property
    def signals(self) -> Signals:
        under, index = self.under, self.decision_id - self.under.first_id
        if isinstance(under.seen, TokenCounts):
            think_tokens, output_tokens = (int(column[index]) for column in under.seen)
            return NOT_MEASURED._replace(think_tokens=think_tokens, output_tokens=output_tokens)
        return unpacked(under.seen[index], under.window_tokens, self.policy.entropy.confirm_sentence_ends)


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
        think_tokens=row["think_tokens"],
        output_tokens=row["output_tokens"],
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
        boundary_rpdi=tuple(row["boundary_rpdi"][:read]),
        earlier_eat_ema_nats=tuple(row["earlier_eat_ema_nats"][:sampled]),
        earlier_eat_ema_variance=tuple(row["earlier_eat_ema_variance"][:sampled]),
        eat_think_tokens=max(0, row["eat_think_tokens"]),
    )


@dataclass(eq=False, slots=True)
class Life:
    """The life of one request from its opening to its end, as far as this replica received it."""

    engine_id: str
    incarnation: str
    # Id of the session that last reported on the request.
    session_id: str
    opened: OpenedRequest
    # Places in the order of the log, and times, of the begin and the end.
    open_number: int
    open_time: datetime
    joined_late: bool
    close_number: int = 0
    close_time: datetime | None = None
    close_reason: str = ""
    think_tokens: int = 0
    output_tokens: int = 0
    # The events between begin and end, without probes, which the log keeps by itself: a request may have thousands.
    events: list[LifeEvent | Decision] = field(default_factory=list)
    left_out: int = 0
    # Number of probes that were logged.
    probes: int = 0
    # Whether the log adds events to the life: the request lives, and the log has not dropped the life.
    is_live: bool = False
    key: Key = field(init=False)
    # As how many events the life's begin counts: a request may have several KB of texts.
    weight: int = field(init=False)
    # Number of decisions in the log that refer to the life, so that it stays in memory.
    referring: int = 0

    def __post_init__(self) -> None:
        self.key = self.engine_id, self.incarnation, *self.opened.identity
        self.weight = 1 + (self.opened.held_bytes - OPENED_BYTES) // EVENT_BYTES

    @property
    def held_bytes(self) -> int:
        """About the memory of the life without its events."""
        return LIFE_BYTES + self.opened.held_bytes

    @property
    def refs(self) -> set[str]:
        """The references that connect this life with others: those of the life's decisions, and its own."""
        details = (event.own_detail for event in self.events if isinstance(event, Decision))
        return {*(detail.ref for detail in details if detail is not None), self.opened.handed_over_ref} - {""}

    def history(self) -> list[LifeEvent | Decision]:
        """Return all events but probes, in their order, from the begin on."""
        opened, unknown = self.opened, agent_pb2.PHASE_UNSPECIFIED
        tokens = opened.think_tokens, opened.output_tokens
        detail = "signals not measured" if opened.unmeasured else ""
        begin = LifeEvent(self.open_number, self.open_time, "opened", opened.phase, *tokens, detail)
        events = [begin, *self.events]
        if self.close_time is not None:
            tokens = self.think_tokens, self.output_tokens
            events.append(LifeEvent(self.close_number, self.close_time, "closed", unknown, *tokens, self.close_reason))
        return events

    def is_called(self, request_id: str) -> bool:
        """Return whether `request_id` is the id of the request or the client's part of that id; an empty id fits any
        request."""
        return not request_id or is_called(self.opened.request_id, request_id)
