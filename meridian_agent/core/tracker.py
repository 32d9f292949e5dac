"""Tracks the live requests of one engine, and fills the record of each engine step.

The module owns slots, phases and counts; `TextRun` counts the steps of requests that generate nothing but text.
Knows no vLLM type beyond opaque references, no policy and no network. Runs on the engine-core thread only.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Any

from meridian_agent.core.live_request import LiveRequest
from meridian_agent.core.phases import FLAG_MARKER, Markers, Phase, PhaseState, begin
from meridian_agent.core.request_info import NEVER, RequestInfo, in_sample
from meridian_agent.core.sentences import ROW_FLAGS, newest_end
from meridian_agent.core.step_record import StepRecord
from meridian_agent.core.text_run import NO_TOKEN, Several, TextRun, several_of
from meridian_agent.core.think_limit import limit_in, may_lengthen, watch_shadow
from meridian_agent.core.token_cycles import LoopWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meridian_agent.core.sentences import SentenceTable
    from meridian_agent.core.step_signals import SignalBytes
    from meridian_agent.vllm_types import Request

# Number of slots that rest after a close before they are used again. A report cannot merge a step that opens a slot
# with the step that closed it, so an early use would cut one report into two.
RESTING_SLOTS = 8
# Number of slots; no control plane takes in a request with a higher one.
MAX_SLOTS = 1 << 16


class Tracker:
    """The live requests by id and by slot, and the record of the current step. tokens_per_step: largest number of
    tokens that a step may bring a request."""

    def __init__(self, markers: Markers, tokens_per_step: int = 1) -> None:
        self.markers = markers
        self.run = TextRun(tokens_per_step)
        self.loops = LoopWatch(tokens_per_step)
        self.supports_think_disable = True
        # Whether a step is scheduled before the tokens of the step before it are known.
        self.steps_ahead = False
        # Settings.merge_openings and Settings.merge_answers.
        self.merge_openings = self.merge_answers = False
        # Cap of new requests, and the answer reserves (0 for none) of new completions and of new chats.
        self.default_cap: int | None = None
        self.default_reserves = 0, 0
        # Share of new requests that are measured, a fraction; the largest number of them in a row, 0 for single ones;
        # and how many of such a cluster are still to come.
        self._measured_share, self._cluster_requests, self._cluster_left = 1.0, 0, 0
        self.by_id: dict[str, LiveRequest] = {}
        self.by_slot: dict[int, LiveRequest] = {}
        # Ended requests with an eviction tier, while a KV connector keeps their blocks.
        self.unfreed: dict[str, LiveRequest] = {}
        # Requests that may need a forced token in the coming step, and preempted requests that wait. The requests are
        # the keys of a dict, which keeps the order of arrival; the order of a set would depend on memory addresses.
        self.due: dict[LiveRequest, None] = {}
        self.preempted: dict[LiveRequest, None] = {}
        # Requests whose thinking has ended and whose first answer token had not come when `take_answered` was called
        # last; and requests whose answer has begun since then.
        self.before_answer: dict[LiveRequest, None] = {}
        self.answered: list[LiveRequest] = []
        # Thinking tokens between a rule's end and the cap in force, summed over such ends.
        self.saved_tokens = 0
        self._closed_think_tokens = 0
        # The record of the current step; None while it is empty.
        self.begun: StepRecord | None = None
        self.answering = 0
        self.thinking = 0
        # Ids of the live requests of whose next tokens nobody reads the entropy.
        self.unmeasured_ids = set[str]()
        # Ranks, phases or membership changed since the running queue was last ordered.
        self.reorder = False
        # Tokens that a request may generate beyond the next one before its limit is checked again, so limits are
        # checked this much earlier.
        self.lookahead = 0
        # The newest token of each row of the step that was noted last, empty if no request may join the run; and all
        # its tokens, None if each row has one.
        self._tokens: list[int] = []
        self._several: Several | None = None
        # Free slots as a heap, and the slots that were closed last, oldest first.
        self._free: list[int] = []
        self._resting: deque[int] = deque()
        self._next_slot = 0
        # Number of the newest record.
        self.newest = 0

    def use(
        self,
        markers: Markers,
        supports_think_disable: bool = True,
        merge_openings: bool = False,
        merge_answers: bool = False,
    ) -> None:
        """Read the coming tokens with these markers. The limits of live requests may depend on the markers' length."""
        self.markers, self.supports_think_disable = markers, supports_think_disable
        self.merge_openings, self.merge_answers = merge_openings, merge_answers
        # The run looks for markers of one token only, and such markers leave the tails as they are.
        self.run.end()
        for live in self.by_id.values():
            live.own_state.tail = live.own_state.tail if markers.longest > 1 else []
            self.watch_limit(live)

    def limit_new(self, cap: int | None, reserves: tuple[int, int], over: bool) -> None:
        """Give new requests the settings' cap and answer reserve, but neither if the lease of caps is `over`. reserves:
        the reserve of completions, and that of chats."""
        self.default_cap, self.default_reserves = (None, (0, 0)) if over else (cap, reserves)

    def thinking_before_newest(self, live: LiveRequest) -> PhaseState | None:
        """Return the state of a request before its newest token, which vLLM has just added to it; None if the request
        did not think there, or if that token ends its thinking."""
        state, tokens = live.state.copy(), live.ref.output_token_ids
        new = live.ref.num_output_tokens - state.generated_tokens
        if not 0 < new <= self.run.tokens_per_step:
            return None
        for token in tokens[-new:-1]:
            state.feed(token, self.markers)
        if state.phase is not Phase.THINK:
            return None
        after = state.copy()
        after.feed(tokens[-1], self.markers)
        return state if after.phase is Phase.THINK else None

    def measure(self, share: float, cluster_requests: int = 0) -> list[LiveRequest]:
        """Measure this share of new requests, a fraction, up to so many in a row, 0 for single ones. From 1 on, return
        the live requests that are not measured yet: `begin_to_measure` is to be called for each, once its tokens have
        been read."""
        self._measured_share, self._cluster_requests, self._cluster_left = share, cluster_requests, 0
        return [live for live in self.by_id.values() if not live.measured] if self.measures_all else []

    @property
    def measures_all(self) -> bool:
        return self._measured_share >= 1

    def _is_measured(self, request_id: str) -> bool:
        """Return whether a new request is measured: it follows in a cluster, or begins one.

        If one request in 1/p begins a cluster of n, a cluster and the mean gap of (1 - p)/p requests before it make
        n + (1 - p)/p, so p is chosen such that n of these are the share.
        """
        if self._cluster_left:
            self._cluster_left -= 1
            return True
        share, cluster = self._measured_share, max(1, min(self._cluster_requests, len(self.by_id)))
        if not in_sample(request_id, share / (share + cluster * (1 - share))):
            return False
        self._cluster_left = cluster - 1
        return True

    def begin_to_measure(self, live: LiveRequest, sentence: int) -> None:
        """Measure a live request from its next token on. sentence: as in LiveRequest."""
        self.run.leave(live)
        live.measured, live.own_sentence = True, sentence
        self._note_whether_read(live)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free for another request."""
        return not self._free and self._next_slot >= MAX_SLOTS

    def open(self, info: RequestInfo, prompt: list[int], step: int, ref: Request) -> LiveRequest:
        """Start tracking a request that was just admitted to the engine."""
        return self.enter(info, begin(self.markers, prompt, self.supports_think_disable), step, ref)

    def enter(
        self,
        info: RequestInfo,
        state: PhaseState,
        step: int,
        ref: Request,
        preempted: bool = False,
        *,
        queued_s: float | None = None,
        sentence: int = 0,
    ) -> LiveRequest:
        """Start tracking a request in a given state. queued_s, sentence: as in LiveRequest."""
        slot = heapq.heappop(self._free) if self._free else self._next_slot
        self._next_slot = max(self._next_slot, slot + 1)
        # Under asynchronous scheduling the engine's step number alone does not distinguish this record from the
        # previous one.
        step = max(step, self.newest + 1)
        limits = self.default_cap, self.default_reserves[info.chat]
        live = LiveRequest(
            slot,
            info,
            state,
            step,
            ref,
            *limits,
            self._is_measured(info.request_id),
            preempted=preempted,
            queued_s=queued_s,
            own_sentence=sentence,
            run=self.run,
        )
        if preempted:
            self.preempted[live] = None
        if queued_s is None:
            self.loops.begin(slot)
        self.by_id[info.request_id] = self.by_slot[slot] = live
        live.take_think_tokens()
        if state.output_tokens:
            live.answered = True
        self._count(state.phase, 1)
        self._note_whether_read(live)
        self.watch_limit(live)
        self.run.changed()
        self.record.opened.append(live.opened_row())
        # The first request after idle time presses, because the sender of an idle engine sleeps longer.
        if not self.merge_openings or info.has_early_cap or len(self.by_id) == 1:
            self.record.urgent = True
        return live

    def reread(self, live: LiveRequest, state: PhaseState, sentence: int = 0) -> None:
        """Replace the state of a tracked request, because its tokens have been read with other markers. sentence: as in
        LiveRequest."""
        self.run.leave(live)
        self._count(live.own_state.phase, -1)
        reserve = self.default_reserves[live.info.chat]
        live.reread(state, sentence, self.default_cap, reserve, known_from=self.newest + 1)
        live.take_think_tokens()
        self._count(state.phase, 1)
        self._note_whether_read(live)
        self.reorder = self.record.urgent = True
        self.watch_limit(live)

    def join_step(self, live: LiveRequest, began_s: float) -> None:
        """Note that a request joins a step, which may be its first one. began_s: as in LiveRequest.leave_queue."""
        if (waited_s := live.leave_queue(began_s)) is not None:
            self.record.joined.append((live.slot, waited_s * 1e3))
            self.loops.begin(live.slot)

    def preempt(self, live: LiveRequest) -> None:
        """Note that a request was preempted and is back in the queue."""
        self.run.leave(live)
        live.preempted = True
        self.preempted[live] = None
        self.record.preempted.append(live.slot)

    def resume(self, live: LiveRequest) -> None:
        """Note that a preempted request generates tokens again."""
        live.preempted = False
        self.preempted.pop(live, None)
        self.record.resumed.append(live.slot)

    def _note_whether_read(self, live: LiveRequest) -> None:
        """Note whether somebody reads the entropy of a request's next token, because its phase may have changed."""
        phase = live.own_state.phase
        if live.measured and (phase is Phase.THINK or (phase is Phase.PROMPT and self.steps_ahead)):
            self.unmeasured_ids.discard(live.info.request_id)
        else:
            self.unmeasured_ids.add(live.info.request_id)

    def _count(self, phase: Phase, by: int) -> None:
        if phase is Phase.THINK:
            self.thinking += by
        elif phase is Phase.OUTPUT:
            self.answering += by

    def _look_for_answer(self, live: LiveRequest) -> None:
        """Note that a request's answer has begun, or that its first token is expected, which may be counted in the
        run. Text that may be the beginning of a start marker is no answer yet."""
        self.before_answer.pop(live, None)
        if live.state.output_tokens > 0 and not live.state.opening(self.markers):
            live.answered = True
            self.answered.append(live)
        elif live.phase is Phase.OUTPUT:
            self.before_answer[live] = None

    def take_answered(self) -> list[LiveRequest]:
        """Return the requests whose first answer token has come since the last call."""
        for live in list(self.before_answer):
            self._look_for_answer(live)
        answered, self.answered = self.answered, []
        return answered

    def take_closed_think_tokens(self) -> int:
        """Return the untaken thinking tokens of requests that have ended; below 0 if markers have taken tokens back."""
        closed, self._closed_think_tokens = self._closed_think_tokens, 0
        return closed

    def watch_limit(self, live: LiveRequest) -> None:
        """Add a thinking request to `due` if it is near its limit or being ended, and remove it otherwise. It stays in
        the run while its limit is far; no limit concerns any other request until it thinks."""
        if live.own_state.phase is not Phase.THINK and live.ending is None:
            self.due.pop(live, None)
            return
        limit = limit_in(live, live.state, self.markers)
        early = self.lookahead if limit is None else self.lookahead + may_lengthen(self.markers, limit)
        live.watch_from = NEVER if limit is None else limit.tokens - early
        if live.state.phase is Phase.THINK:
            watch_shadow(live, self.markers)
        if live.state.phase is Phase.THINK and (live.ending or live.state.think_tokens >= live.watch_from):
            self.due[live] = None
        else:
            self.due.pop(live, None)
        self.run.watch(live)

    @property
    def sentences(self) -> SentenceTable:
        """The machine that finds the ends of sentences in the engine's vocabulary."""
        return self.run.sentences

    @sentences.setter
    def sentences(self, table: SentenceTable) -> None:
        self.run.sentences = table

    def note(self, request_ids: list[str], sampled: Sequence[Sequence[int]], ended: Iterable[str] = ()) -> list[int]:
        """Find the members of the run that a step brought text and nothing else; return the other rows, which must be
        looked at one by one.

        request_ids: ids in the order of the runner's rows. sampled: the new tokens of each row. ended: ids of requests
        that may have ended in the step.
        """
        run, markers = self.run, self.markers
        if markers.longest > 1 or len(sampled) != len(request_ids):
            return self.note_nothing(request_ids)
        if not run.has_rows(request_ids):
            run.arrange(request_ids)
        starts_and_ends = markers.by_last.keys()
        try:
            tokens = self._tokens = [token for (token,) in sampled]
            self._several = None
        except ValueError:
            most = run.tokens_per_step
            tokens = self._tokens = [new[-1] if 0 < len(new) <= most else NO_TOKEN for new in sampled]
            run.leave_rows([row for row, token in enumerate(tokens) if token == NO_TOKEN])
            self._several = None
            if most > 1:
                self._several = several_of(sampled)
                tokens = self._several.tokens
        if not starts_and_ends.isdisjoint(tokens):
            run.leave_rows([row for row, new in enumerate(sampled) if not starts_and_ends.isdisjoint(new)])
        for request_id in ended:
            if live := self.by_id.get(request_id):
                run.leave(live)
        return run.ready()

    def note_nothing(self, request_ids: list[str]) -> list[int]:
        """Return all rows of a step in which no request may be or become a member of the run."""
        self.run.end()
        self._tokens, self._several = [], None
        return list(range(len(request_ids)))

    def count(self, others: Sequence[int], signals: SignalBytes | None = None) -> None:
        """Count the noted step for the members of the run. others: the rows that are looked at one by one. signals:
        signals of the step's rows."""
        run, record = self.run, self.record
        # A request that joins the run with its tokens of this step is a member from then on.
        text = run.count(self._tokens, self._several) if self._tokens else ()
        if run.members:
            record.text, record.lengths = text, run.lengths_for(signals)
            record.sentences, record.states = run.sentences, run.text_states
            record.slots, record.phases, record.rows = run.slots, run.phases, run.rows
            if others:
                # The lists are copied, because rows will be added.
                record.slots, record.phases, record.rows = [*run.slots], [*run.phases], [*run.rows]

    def looked_at(self, others: Sequence[int]) -> None:
        """Note that the requests of these rows of the noted step were looked at one by one; those that generated tokens
        may join the run."""
        run, whole = self.run, bool(self._tokens)
        for row in others if whole else ():
            if live := self.by_id.get(run.request_ids[row]):
                if self._tokens[row] != NO_TOKEN and live not in self.due and live not in self.preempted:
                    run.join(live, row)
                whole = whole and live.run_row >= 0
        run.whole = whole

    def feed(self, live: LiveRequest, tokens: Sequence[int], first_row: int) -> bool:
        """Count a request's new tokens; return whether thinking ended in them."""
        self.run.leave(live)
        if len(tokens) == 1 and live.ending is None and self.markers.is_text(tokens[0], live.state.phase):
            return self._feed_text(live, tokens[0], first_row)
        record, state, markers, ended = self.record, live.state, self.markers, False
        for offset, token in enumerate(tokens):
            before = state.phase
            phase, flags = state.feed(token, markers)
            if live.ending is not None and live.expected.get(offset) == token:
                flags |= live.ending.advance()
            here = 0
            if phase is Phase.THINK and live.measured and not flags & FLAG_MARKER:
                live.own_sentence = self.sentences.step(live.own_sentence, token)
                here = self.sentences.flags[live.own_sentence]
            else:
                live.own_sentence = 0
            if flags:
                # A sentence end before a marker no longer counts.
                live.passed = 0, 0
            elif here and (known := newest_end(here)) is not None:
                live.passed = state.think_tokens - known[0], known[1]
            record.add_row(live.slot, phase, flags | here & ROW_FLAGS, first_row + offset)
            if state.phase is not before:
                self._count(before, -1)
                self._count(state.phase, 1)
                self._note_whether_read(live)
                live.enter_phase(self.newest + 1)
                self.reorder = True
                answers = state.phase is Phase.OUTPUT and self.thinking and not self.merge_answers
                if answers or not self.merge_openings:
                    record.urgent = True
                ended = ended or before is Phase.THINK
        live.expected.clear()
        if not live.answered:
            self._look_for_answer(live)
        self.watch_limit(live)
        return ended

    def _feed_text(self, live: LiveRequest, token: int, row: int) -> bool:
        """Count one token of text that does not change the phase; this common case gives the same result as `feed` at a
        lower cost."""
        state, flags = live.state, 0
        state.text_run += 1
        if state.phase is Phase.THINK:
            state.think_tokens += 1
            if live.measured:
                live.own_sentence = self.sentences.step(live.own_sentence, token)
                flags = self.sentences.flags[live.own_sentence] & ROW_FLAGS
            if state.think_tokens >= live.watch_from:
                self.due[live] = None
        else:
            state.output_tokens += state.phase is Phase.OUTPUT
            state.unknown_tokens += state.phase is Phase.UNKNOWN
            live.own_sentence = 0
            if not live.answered:
                self._look_for_answer(live)
        self.record.add_row(live.slot, state.phase, flags, row)
        return False

    def look_for_loops(self) -> None:
        """Add to the record the looks at the requests whose turn it is."""
        if not self.loops.is_turn_of_any():
            return
        looks, is_urgent = self.loops.looks(self.by_slot)
        if looks:
            self.record.looks += looks
            self.record.urgent = self.record.urgent or is_urgent

    def close(self, live: LiveRequest, reason: int) -> None:
        """Forget a request; its slot becomes free once the record that reports its end is taken."""
        self.run.leave(live)
        self.run.changed()
        del self.by_id[live.info.request_id]
        del self.by_slot[live.slot]
        self._count(live.state.phase, -1)
        self.unmeasured_ids.discard(live.info.request_id)
        self._closed_think_tokens += live.take_think_tokens()
        self.before_answer.pop(live, None)
        self.due.pop(live, None)
        self.preempted.pop(live, None)
        self.record.closed.append((live.slot, reason))
        if live.tier is not None:
            self.unfreed[live.info.request_id] = live

    def freeing(self, request_id: str) -> LiveRequest | None:
        """Return the request whose blocks vLLM is about to free, which may have ended before; None if it is not
        known."""
        return self.by_id.get(request_id) or self.unfreed.pop(request_id, None)

    def with_blocks(self) -> Iterator[LiveRequest]:
        """Yield the live requests, and the ended ones whose blocks are not free yet."""
        yield from self.by_id.values()
        yield from self.unfreed.values()

    @property
    def record(self) -> StepRecord:
        """The record of the current step."""
        if self.begun is None:
            self.begun = StepRecord()
        return self.begun

    def number(self, step: int) -> int:
        """Return the number of a record for this step of the engine, above the previous record's."""
        self.newest = max(step, self.newest + 1)
        return self.newest

    def take_record(self) -> StepRecord:
        """Return the finished record, with its number, and begin a new record.

        A slot is never closed and opened in the same record, because the record's columns do not say which came first,
        and the slots that were closed last rest.
        """
        record, self.begun = self.record, None
        record.step = self.number(record.step)
        self._resting.extend(slot for slot, _ in record.closed)
        while len(self._resting) > RESTING_SLOTS:
            heapq.heappush(self._free, self._resting.popleft())
        return record

    def snapshot(self) -> list[tuple[Any, ...]]:
        return [live.opened_row() for live in self.by_id.values()]
