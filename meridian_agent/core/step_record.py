"""Holds the record of one engine step. The engine-core thread fills a record; the link's threads read it after the
engine has queued it. Names the outcomes of decisions, which the record carries, and the eviction tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_FROM_OUTPUT, FLAG_MARKER, TAKE_BACK_SHIFT, Phase
from meridian_agent.core.sentences import NO_SENTENCES, NO_STATES, SentenceTable, States
from meridian_agent.core.step_signals import SignalBytes, first_rows

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.token_cycles import Look


class MeasuredProbe(NamedTuple):
    """The result of an EAT probe; `ProbeColumns` in agent.proto describes each field."""

    decision_id: int
    slot: int
    think_tokens: int
    eat_nats: float
    cost_tokens: int
    same_answer: int
    empty_answer: bool
    other_answer: bool


# A plain number, because the members of an enumeration take longer to compare with.
THINK = int(Phase.THINK)

# Names of the fields of meridian.v1.AgentCounters, in the order of `StepRecord.counters`.
COUNTERS = (
    "preempted_think",
    "output_critical",
    "blocks_reclaimed",
    "think_skips",
    "reports_dropped",
    "probe_tokens",
    "agent_seconds",
    "scheduler_seconds",
    "round_trip_ms",
    "calm_steps",
    "full_steps",
    "recomputed_tokens",
    "blocks_expired",
    "worker_seconds",
    "thread_seconds",
)

# The first fields of a StepRecord, in their order: a step that brought each request of the run text and changed nothing
# else. The engine's thread makes a plain tuple of them in each such step.
TextStep: TypeAlias = tuple[
    int,
    float,
    float,
    int,
    int,
    list[int],
    list[int],
    list[int],
    Sequence[int],
    SentenceTable,
    States,
    SignalBytes | None,
    Sequence[int],
]

# Reason for refusing decisions about thinking on an engine whose thinking markers are not known.
NOT_KNOWN = "it is not known whether the request thinks: the markers are not known, or the prompt came as embeddings"


class Outcome(IntEnum):
    """The values of meridian.v1.Outcome. Each decision gets exactly one of them."""

    # The agent has carried the decision out: a forced end is written, a plan or a change of a cap is in force, a tier
    # has acted on the freed blocks, a probe is measured, a request has left for another engine.
    APPLIED = agent_pb2.OUTCOME_APPLIED
    # The moment came in which the agent would have acted, but the decision is in shadow.
    SHADOWED = agent_pb2.OUTCOME_SHADOWED
    # A newer decision about the same thing has taken the decision's place, or another end of thinking came before it.
    SUPERSEDED = agent_pb2.OUTCOME_SUPERSEDED
    # Thinking, or the whole request, ended before the decision was to act: by the model, or, if the decision arrived
    # later than that, by anything else.
    ENDED_NATURALLY = agent_pb2.OUTCOME_ENDED_NATURALLY
    # The request was aborted or had ended, or its slot belongs to a later request by now.
    REQUEST_GONE = agent_pb2.OUTCOME_REQUEST_GONE
    # The engine cannot carry the decision out; the outcome's detail says why.
    REFUSED = agent_pb2.OUTCOME_REFUSED
    # A freeze began or a lease ran out before the decision had acted.
    AGENT_OFF = agent_pb2.OUTCOME_AGENT_OFF


class Tier(IntEnum):
    """The values of meridian.v1.EvictionTier."""

    REUSABLE = agent_pb2.EVICTION_TIER_REUSABLE
    UNREACHABLE = agent_pb2.EVICTION_TIER_UNREACHABLE


# The tiers that this agent knows; a newer control plane may send others.
TIERS = frozenset(map(int, Tier))


class Report(Protocol):
    """A function that records the outcome of a decision."""

    def __call__(
        self, decision_id: int, outcome: Outcome, live: LiveRequest | None = None, detail: str = ""
    ) -> None: ...


class Gauges(NamedTuple):
    """Share of the KV cache that is in use, and the numbers of running and of waiting requests."""

    kv_used: float = 0.0
    running: int = 0
    waiting: int = 0


class _TextFields(NamedTuple):
    step: int
    ended_s: float
    step_time_ms: float
    prefill_tokens: int
    state: int
    slots: list[int]
    phases: list[int]
    rows: list[int]
    text: Sequence[int]
    sentences: SentenceTable
    states: States
    told: SignalBytes | None
    lengths: Sequence[int]


class TextRecord(_TextFields):
    """The record of a TextStep without lengths, as a StepRecord that nobody changes. Nearly all steps have one, and to
    make it takes a third of the time that a StepRecord takes."""

    __slots__ = ()
    is_text, urgent, presses = True, False, False
    gauges: ClassVar[Gauges | None] = None
    flags: ClassVar[list[int]] = []
    opened: ClassVar[tuple[Any, ...]] = ()
    joined = probes = looks = loops = preempted = resumed = closed = opened
    handed_over = clients_gone = continued = preemptions = outcomes = counters = opened

    def row_flags(self) -> list[int]:
        return _row_flags(self)


@dataclass(slots=True)
class StepRecord:
    """Everything that happened in one engine step, as plain lists that gRPC's thread turns into a StepReport. The
    fields up to `lengths` are those of a TextStep."""

    step: int = 0
    # End of the step, in seconds on the link's clock.
    ended_s: float = 0.0
    step_time_ms: float = 0.0
    prefill_tokens: int = 0
    # The agent's state, a meridian.v1.AgentState.
    state: int = 0
    # Slot and phase of each token, and the row that it was sampled from.
    slots: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    # Tokens of the run's members, whose rows come before all other rows and whose flags are computed later; and the
    # table of sentences with its states after these tokens. `flags` has the flags of the other rows.
    text: Sequence[int] = ()
    sentences: SentenceTable = NO_SENTENCES
    states: States = NO_STATES
    # Signals of the step's rows as the worker sent them.
    told: SignalBytes | None = None
    # With drafts, the number of tokens of each member of the run, whose slot, phase and row in the runner come once
    # until `spread`; empty if all columns have an element for each token.
    lengths: Sequence[int] = ()
    flags: list[int] = field(default_factory=list)
    # The engine's gauges; None if they are to be read when the report is made.
    gauges: Gauges | None = None
    opened: list[tuple[Any, ...]] = field(default_factory=list)
    probes: list[MeasuredProbe] = field(default_factory=list)
    # Looks for repetition, which the thread that sends the record replaces by what they find.
    looks: list[Look] = field(default_factory=list)
    # Cycles in the newest thinking tokens: (slot, tokens of a round, tokens that repeat).
    loops: list[tuple[int, int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    closed: list[tuple[int, int]] = field(default_factory=list)
    # Slots of closed requests that another engine continues.
    handed_over: list[int] = field(default_factory=list)
    # Slots of closed requests whose clients have gone.
    clients_gone: list[int] = field(default_factory=list)
    # Requests that continue another engine's and have their first token: (slot, transferred tokens, milliseconds).
    continued: list[tuple[int, int, float]] = field(default_factory=list)
    # Requests that have joined a step for the first time: (slot, queueing time in milliseconds).
    joined: list[tuple[int, float]] = field(default_factory=list)
    # Requests that were preempted for waiting ones: (decision id, slot, tokens that are expected to be computed again).
    preemptions: list[tuple[int, int, int]] = field(default_factory=list)
    # Outcomes of decisions: (decision id, outcome, thinking tokens, detail, DecisionOutcome.reason).
    outcomes: list[tuple[int, int, int, str, int]] = field(default_factory=list)
    # The values of COUNTERS, in the last record of a report.
    counters: tuple[float, ...] = ()
    # The record must be sent at once: a request has arrived or changed its phase in this step and a decision about it
    # is urgent, a request is held for a decision from it, or no other step follows.
    urgent: bool = False

    @property
    def presses(self) -> bool:
        """Whether the record is sent without waiting for others, because a decision about the next steps may follow
        from it."""
        return self.urgent or bool(self.preempted or self.resumed)

    @property
    def is_empty(self) -> bool:
        """Whether the step changed no request and no decision."""
        return self.is_text and not self.slots

    @property
    def is_text(self) -> bool:
        """Whether the report of the step has nothing but token rows and gauges."""
        requests = self.opened or self.joined or self.preempted or self.resumed or self.closed or self.continued
        return not (requests or self.probes or self.loops or self.preemptions or self.outcomes)

    def tell(self, step: TextStep) -> None:
        """Take over a step that brought each request of the run text and nothing else."""
        for name, value in zip(_TextFields._fields, step, strict=True):
            setattr(self, name, value)

    def begun(self) -> set[int]:
        """Return the slots of the requests that have arrived in the step; others that it opens are older than the
        agent."""
        return {slot for slot, *_, queued, _ in self.opened if queued}

    def keep(self, slots: AbstractSet[int]) -> None:
        """Drop what a snapshot says: the tokens and the changes of all requests but those in these slots."""
        self.spread()
        flags, self.text = self.row_flags(), ()
        kept = [row for row, slot in enumerate(self.slots) if slot in slots]
        self.slots, self.phases, self.rows, self.flags = (
            [column[row] for row in kept] for column in (self.slots, self.phases, self.rows, flags)
        )
        self.opened = [row for row in self.opened if row[0] in slots]
        self.closed = [row for row in self.closed if row[0] in slots]
        self.preempted, self.resumed, self.handed_over, self.clients_gone = (
            [slot for slot in of if slot in slots]
            for of in (self.preempted, self.resumed, self.handed_over, self.clients_gone)
        )

    def add_row(self, slot: int, phase: int, flags: int, row: int) -> None:
        """Add the row of one generated token."""
        self.slots.append(slot)
        self.phases.append(phase)
        self.flags.append(flags)
        self.rows.append(row)

    def spread(self) -> None:
        """Give each token of the run's members an element of `slots`, `phases` and `rows`. A row is then one of the
        worker's signals, which has a row for each draft token, too."""
        lengths, (slots, phases, rows) = self.lengths, (self.slots, self.phases, self.rows)
        if not lengths:
            return
        members, self.lengths = len(lengths), ()
        firsts = rows[:members]
        if isinstance(self.told, tuple):
            first_row = first_rows(self.told)
            firsts = [first_row[row] for row in firsts]
        self.slots = [slot for slot, n in zip(slots, lengths, strict=False) for _ in range(n)] + slots[members:]
        self.phases = [phase for phase, n in zip(phases, lengths, strict=False) for _ in range(n)] + phases[members:]
        spread = [row for first, n in zip(firsts, lengths, strict=True) for row in range(first, first + n)]
        self.rows = spread + rows[members:]

    def think_tokens(self) -> Counter[int]:
        """Return the thinking tokens of the rows by slot; below 0 if a marker has taken tokens back."""
        self.spread()
        counted: Counter[int] = Counter()
        for slot, phase, flags in zip(self.slots, self.phases, self.row_flags(), strict=True):
            if not flags & FLAG_MARKER:
                counted[slot] += phase == THINK
            elif not flags & FLAG_FROM_OUTPUT:
                counted[slot] -= flags >> TAKE_BACK_SHIFT
        return counted

    def row_flags(self) -> list[int]:
        """Return the flags of each row; for a member of the run these are only the ends of sentences and paragraphs of
        thinking."""
        return _row_flags(self)


Record: TypeAlias = StepRecord | TextRecord


def record_of(step: TextStep) -> Record:
    """Return the record of a step of text."""
    return StepRecord(*step) if step[-1] else TextRecord._make(step)


def _row_flags(record: Record) -> list[int]:
    flags: list[int] = text_flags([record], np.array(record.phases, np.uint32)).tolist()
    return flags + record.flags


def text_flags(records: Sequence[Record], phases: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.uint32]:
    """Return the flags of the rows of the run's members, step by step; only those of thinking have any. records: steps
    of the same members. phases: those of each record, [rows]."""
    members = len(records[0].text)
    thinks = phases[:members] == THINK
    if not thinks.any():
        return np.zeros(len(records) * members, np.uint32)
    # With the newest states, those of the steps before are computed, too.
    records[-1].states.get()
    states = [record.states.get()[:members] for record in records]
    flags: NDArray[np.uint32] = records[0].sentences.row_flags(np.concatenate(states)).reshape(-1, members) * thinks
    return flags.ravel()
