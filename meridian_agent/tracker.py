"""The live requests of one engine as the agent sees them, and the record of each engine step.

Owns slots, phases, counts and the pending decisions of each request; steps of nothing but text it leaves to `run`.
Knows no vLLM type beyond opaque references, no policy and no network. Runs on the engine-core thread only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meridian_agent.phases import FLAG_BY_CAP, FLAG_FORCED, Markers, Phase, PhaseState, begin
from meridian_agent.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.signals import Told

# Between plans the phase alone orders requests; the control plane's ranks use the same scale (lower is more urgent).
# Where phases are not known all requests rank alike, so vLLM's own order holds.
PHASE_RANK = {Phase.OUTPUT: 0, Phase.UNKNOWN: 256, Phase.PROMPT: 256, Phase.THINK: 544}


NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What policy may match on. Never text."""

    request_id: str
    model: str
    tenant: str
    slo_class: str
    prompt_tokens: int
    max_tokens: int
    max_think_tokens: int | None
    effort: str = ""
    min_think_tokens: int | None = None
    traceparent: str = ""


@dataclass(slots=True)
class Cap:
    decision_id: int
    max_think_tokens: int
    shadow: bool
    reported: bool = False


@dataclass(slots=True)
class Ending:
    """A forced end of thinking under way: which of its tokens come next."""

    tokens: tuple[int, ...]
    decision_id: int
    # Begun by a cap, the request's own or one of the control plane's, not by a force.
    by_cap: bool = False
    # Begun by a soft close, which ends with the order.
    by_order: bool = False
    position: int = 0

    def advance(self) -> int:
        """One more of its tokens was generated; returns row flags once it is complete."""
        self.position += 1
        if self.position < len(self.tokens):
            return 0
        return FLAG_FORCED | (FLAG_BY_CAP if self.by_cap else 0)


@dataclass(slots=True, eq=False)
class Tracked:
    """One live request. `ref` is vLLM's own request object, opaque here."""

    slot: int
    info: RequestInfo
    # As of the last step that was worked out; `state` is as of the last step.
    own_state: PhaseState
    opened_step: int
    ref: Any
    # Holds until the first cap decision comes.
    default_cap: int | None = None
    cap: Cap | None = None
    ending: Ending | None = None
    # Ending tokens written into this step's masks, by row.
    expected: dict[int, int] = field(default_factory=dict)
    forced: bool = False
    # Thinking was ended by a cap that had no decision of its own yet.
    capped: bool = False
    rank: int | None = None
    # Step of the first report that knows the request's phase: a rank decided from an older one is for another phase.
    phase_step: int = 0
    tier: tuple[int, int, bool] | None = None
    preempted: bool = False
    skipped_steps: int = 0
    # Step the request last joined, for fair rotation of those left out.
    joined_step: int = 0
    # Sentence and paragraph flags of the newest token, while thinking; as of the last step that was worked out.
    own_boundary: int = 0
    # Of steps of several tokens: thinking tokens at the last sentence end no probe was placed at, and its flags.
    passed: tuple[int, int] = (0, 0)
    # Thinking tokens from which on the coming step may need a forced token.
    watch_from: int = NEVER
    # Likeliest token after the end marker in the newest probe, and how many probes in a row it has been.
    trial_answer: int = -1
    same_answer: int = 0
    # Waits for what is decided from its probe: until when, on the monotonic clock, and the report that asked for it.
    held_until: float = 0.0
    asked_in: int = 0
    # Tokens of the ending that the request's own parameters were looked at for, and whether they allow all of them.
    checked: tuple[int, ...] = ()
    allowed: bool = True
    # KV blocks an answer had when it was preempted, each with its hash then.
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    run: Run | None = None

    @property
    def state(self) -> PhaseState:
        if self.run is not None and self.run.steps:
            self.run.spread()
        return self.own_state

    @property
    def boundary(self) -> int:
        """Sentence and paragraph flags of the newest token, while thinking."""
        if self.run is not None and self.run.steps:
            self.run.spread()
        return self.own_boundary

    def since_boundary(self, flags: int, most: int) -> int | None:
        """Tokens after the newest one that has these flags, None where they are more than `most`: as many as a step may
        have on top of its first."""
        if self.boundary & flags == flags:
            return 0
        at, passed = self.passed
        tokens = self.state.think_tokens - at
        return tokens if passed & flags == flags and tokens <= most else None

    def text_steps(self) -> int:
        """Steps of a token of text each that concern nobody: until the one after which a cap is looked at, or one in
        shadow is reached. 0 where the next may be such a step already."""
        state, cap = self.state, self.cap
        if state.phase is Phase.PROMPT or self.ending is not None:
            return 0
        if state.phase in (Phase.OUTPUT, Phase.UNKNOWN):
            return NEVER
        shadow = cap.max_think_tokens if cap is not None and cap.shadow and not cap.reported else NEVER
        return min(self.watch_from, shadow) - state.think_tokens - 1

    @property
    def effective_rank(self) -> int:
        return PHASE_RANK[self.state.phase] if self.rank is None else self.rank

    @property
    def limit(self) -> int | None:
        """Thinking tokens after which an end is forced here, stream or no stream: the smallest cap that is in force."""
        policy = self.default_cap if self.cap is None else None if self.cap.shadow else self.cap.max_think_tokens
        own = self.info.max_think_tokens
        return policy if own is None else own if policy is None else min(own, policy)


@dataclass(slots=True)
class StepRecord:
    """What one engine step did: plain lists, turned into a StepReport on the link's thread."""

    step: int = 0
    # On the link's clock.
    ended_s: float = 0.0
    step_time_ms: float = 0.0
    kv_used: float = 0.0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    # meridian.v1.AgentState
    state: int = 0
    opened: list[tuple[Any, ...]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    # In a step of a run: the tokens, instead of flags, and the sentence and paragraph flags by token id.
    text: Sequence[int] = ()
    boundaries: bytes = b""
    # Signals of the step's rows, as the worker told them, and the row each token was drawn from.
    told: Told | None = None
    rows: list[int] = field(default_factory=list)
    # (decision id, slot, thinking tokens, EAT in nats, cost in tokens, same answers in a row, answer would be empty)
    probes: list[tuple[int, int, int, float, int, int, bool]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    closed: list[tuple[int, int]] = field(default_factory=list)
    # (decision id, outcome, thinking tokens, detail)
    outcomes: list[tuple[int, int, int, str]] = field(default_factory=list)
    counters: tuple[Any, ...] = ()
    # A request has begun or ended to think in it or is held for what is decided from it, or no other step follows.
    urgent: bool = False

    @property
    def presses(self) -> bool:
        """Whether it does not wait for others of its interval: who joins the next steps may follow from it."""
        return self.urgent or bool(self.opened or self.preempted or self.resumed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened in the step to any request or decision."""
        lists = (self.opened, self.slots, self.probes, self.preempted, self.resumed, self.closed, self.outcomes)
        return not any(lists)

    def add_row(self, slot: int, phase: int, flags: int, row: int) -> None:
        """One generated token."""
        self.slots.append(slot)
        self.phases.append(phase)
        self.flags.append(flags)
        self.rows.append(row)

    def row_flags(self) -> list[int]:
        """Flags of each row; in a step of a run, where sentences and paragraphs of thinking end."""
        if not self.text:
            return self.flags
        known, flags = len(self.boundaries), self.boundaries
        rows = zip(self.text, self.phases, strict=True)
        return [flags[token] if phase == Phase.THINK and token < known else 0 for token, phase in rows]


def opened_row(tr: Tracked) -> tuple[Any, ...]:
    """The fields of RequestOpened, copied so that another thread may read them."""
    i, s = tr.info, tr.state
    return (tr.slot, i, int(s.phase), s.think_tokens, s.output_tokens, tr.forced, tr.preempted)


class Tracker:
    """Live requests by id and by slot, and the record being filled."""

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self.run = Run()
        self.supports_think_disable = True
        self.default_cap: int | None = None
        self.by_id: dict[str, Tracked] = {}
        self.by_slot: dict[int, Tracked] = {}
        # Requests that may need a forced token in the coming step, and those that wait after a preemption: as keys, in
        # the order in which they came, for a set is in that of their addresses.
        self.due: dict[Tracked, None] = {}
        self.preempted: dict[Tracked, None] = {}
        self.record = StepRecord()
        self.answering = 0
        self.thinking = 0
        self._answering_ids: frozenset[str] | None = frozenset()
        # Ranks, phases or membership changed since the running queue was last ordered.
        self.reorder = False
        # Tokens of a step that may come on top of the first one: a cap must be looked at this much earlier.
        self.lookahead = 0
        # Of the last step that was no part of a run: a run begins when two such steps have the same requests.
        self._last_ids: list[str] = []
        self._free: list[int] = []
        self._next_slot = 0
        self._last_step = 0

    def open(self, info: RequestInfo, prompt: list[int], step: int, ref: Any) -> Tracked:
        """Start tracking a request that was just admitted to the engine."""
        return self.enter(info, begin(self.markers, prompt, self.supports_think_disable), step, ref)

    def enter(self, info: RequestInfo, state: PhaseState, step: int, ref: Any, preempted: bool = False) -> Tracked:
        """Start tracking a request in the state it is in."""
        slot = heapq.heappop(self._free) if self._free else self._take_slot()
        # Under asynchronous scheduling the engine's step alone does not tell this record from the one before.
        step = max(step, self._last_step + 1)
        tr = Tracked(slot, info, state, step, ref, self.default_cap, preempted=preempted, run=self.run)
        if preempted:
            self.preempted[tr] = None
        self.by_id[info.request_id] = self.by_slot[slot] = tr
        self._count(state.phase, 1)
        self.watch_limit(tr)
        self.reorder = True
        self.record.opened.append(opened_row(tr))
        return tr

    def reread(self, tr: Tracked, state: PhaseState) -> None:
        """Go on with a tracked request in another state: its tokens have been read with other markers."""
        self.run.end()
        self._count(tr.own_state.phase, -1)
        tr.own_state = state
        self._count(state.phase, 1)
        tr.rank, tr.phase_step, self.reorder = None, self._last_step + 1, True
        # The cap that it began with may be one of settings that are long gone.
        tr.default_cap = self.default_cap if tr.cap is None else None
        tr.own_boundary, tr.passed, self.record.urgent = 0, (0, 0), True
        self.watch_limit(tr)

    def _take_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1

    @property
    def answering_ids(self) -> frozenset[str]:
        """Requests that answer; the same object until one begins or ends."""
        if self._answering_ids is None:
            answering = (r for r, tr in self.by_id.items() if tr.own_state.phase is Phase.OUTPUT)
            self._answering_ids = frozenset(answering)
        return self._answering_ids

    def _count(self, phase: Phase, by: int) -> None:
        self._answering_ids = None
        if phase is Phase.THINK:
            self.thinking += by
        elif phase is Phase.OUTPUT:
            self.answering += by

    def watch_limit(self, tr: Tracked) -> None:
        """Put a thinking request among those looked at before the mask is built once its cap is near."""
        self.run.end()
        limit = tr.limit
        tr.watch_from = NEVER if limit is None else limit - self.lookahead
        if tr.state.phase is Phase.THINK and (tr.ending or tr.state.think_tokens >= tr.watch_from):
            self.due[tr] = None
        else:
            self.due.pop(tr, None)

    @property
    def boundaries(self) -> bytes:
        """Sentence and paragraph flags by token id."""
        return self.run.boundaries

    @boundaries.setter
    def boundaries(self, flags: bytes) -> None:
        self.run.boundaries = flags

    def note(self, request_ids: list[str], sampled: Sequence[Sequence[int]]) -> bool:
        """Account a step as a whole; False, and nothing accounted, if it takes a look at each of its requests.

        request_ids: of the runner's rows. sampled: the tokens of each. To be asked only when no request of the step has
        ended in it.
        """
        run, record, markers = self.run, self.record, self.markers
        if not request_ids or run.request_ids != request_ids or self.due or self.preempted or markers.longest > 1:
            return False
        try:
            tokens = [token for (token,) in sampled]
        except ValueError:
            return False
        if len(tokens) != len(request_ids) or not markers.by_last.keys().isdisjoint(tokens) or not run.note(tokens):
            return False
        record.slots, record.phases, record.rows = run.slots, run.phases, run.rows
        record.text, record.boundaries = tokens, run.boundaries
        return True

    def noted_singly(self, request_ids: list[str]) -> None:
        """The step's requests have been accounted one by one: the next steps may be a run."""
        if request_ids != self._last_ids:
            # The runner's own list may be changed by it.
            self._last_ids = list(request_ids)
        elif self.markers.longest == 1 and not (self.due or self.preempted):
            tracked = [tr for request_id in request_ids if (tr := self.by_id.get(request_id))]
            if len(tracked) == len(request_ids):
                self.run.begin(self._last_ids, tracked)

    def feed(self, tr: Tracked, tokens: Sequence[int], first_row: int) -> bool:
        """Account a step's new tokens; returns whether thinking ended in them."""
        self.run.end()
        if len(tokens) == 1 and tr.ending is None and self.markers.is_text(tokens[0], tr.state.phase):
            return self._feed_text(tr, tokens[0], first_row)
        record, state, markers, ended = self.record, tr.state, self.markers, False
        for offset, token in enumerate(tokens):
            before = state.phase
            phase, flags = state.feed(token, markers)
            if tr.ending is not None and tr.expected.get(offset) == token:
                flags |= tr.ending.advance()
            here = self.boundaries[token] if phase is Phase.THINK and token < len(self.boundaries) else 0
            if here or flags:
                # Nothing before a marker is looked back at.
                tr.passed = (0, 0) if flags else (state.think_tokens, here)
            tr.own_boundary = here
            record.add_row(tr.slot, phase, flags | here, first_row + offset)
            if state.phase is not before:
                self._count(before, -1)
                self._count(state.phase, 1)
                tr.rank, tr.phase_step, self.reorder = None, self._last_step + 1, True
                record.urgent = True
                ended = ended or before is Phase.THINK
        tr.expected.clear()
        self.watch_limit(tr)
        return ended

    def _feed_text(self, tr: Tracked, token: int, row: int) -> bool:
        """The common case, one token of text in a phase that goes on; the same as `feed` without its cost."""
        state = tr.state
        state.text_run += 1
        if state.phase is Phase.THINK:
            state.think_tokens += 1
            tr.own_boundary = self.boundaries[token] if token < len(self.boundaries) else 0
            if state.think_tokens >= tr.watch_from:
                self.due[tr] = None
        else:
            state.output_tokens += state.phase is Phase.OUTPUT
            tr.own_boundary = 0
        self.record.add_row(tr.slot, state.phase, tr.own_boundary, row)
        return False

    def close(self, tr: Tracked, reason: int) -> None:
        """Forget a request; its slot is free again once the record that says so is taken."""
        self.run.end()
        self._last_ids = []
        del self.by_id[tr.info.request_id]
        del self.by_slot[tr.slot]
        self._count(tr.state.phase, -1)
        self.due.pop(tr, None)
        self.preempted.pop(tr, None)
        self.record.closed.append((tr.slot, reason))

    def take_record(self) -> StepRecord:
        """The finished record, its step above that of the one before; a new one is begun.

        A slot closed in a record is never opened in the same one: its columns would not say which came first.
        """
        record, self.record = self.record, StepRecord()
        record.step = self._last_step = max(record.step, self._last_step + 1)
        for slot, _ in record.closed:
            heapq.heappush(self._free, slot)
        return record

    def snapshot(self) -> list[tuple[Any, ...]]:
        return [opened_row(tr) for tr in self.by_id.values()]
