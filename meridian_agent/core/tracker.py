"""The live requests of one engine as the agent sees them, and the record of each engine step.

Owns slots, phases, counts and the pending decisions of each request; steps of nothing but text it leaves to `Run`.
Knows no vLLM type beyond opaque references, no policy and no network. Runs on the engine-core thread only.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from meridian_agent.core.live_request import NEVER, LiveRequest, RequestInfo, TextRun, opened_row
from meridian_agent.core.phases import Markers, Phase, PhaseState, begin
from meridian_agent.core.step_record import StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tracker:
    """Live requests by id and by slot, and the record being filled."""

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self.run = TextRun()
        self.supports_think_disable = True
        self.default_cap: int | None = None
        self.by_id: dict[str, LiveRequest] = {}
        self.by_slot: dict[int, LiveRequest] = {}
        # Requests that may need a forced token in the coming step, and those that wait after a preemption: as keys, in
        # the order in which they came, for a set is in that of their addresses.
        self.due: dict[LiveRequest, None] = {}
        self.preempted: dict[LiveRequest, None] = {}
        self.record = StepRecord()
        self.answering = 0
        self.thinking = 0
        self._answering_ids: frozenset[str] | None = frozenset()
        # Ranks, phases or membership changed since the running queue was last ordered.
        self.reorder = False
        # Tokens of a step that may come on top of the first one: a cap must be looked at this much earlier.
        self.lookahead = 0
        # The requests of the last step that was no part of a run: a run begins when two such steps have the same
        # requests.
        self._last_ids: list[str] = []
        self._free: list[int] = []
        self._next_slot = 0
        self._last_step = 0

    def open(self, info: RequestInfo, prompt: list[int], step: int, ref: Any) -> LiveRequest:
        """Start tracking a request that was just admitted to the engine."""
        return self.enter(info, begin(self.markers, prompt, self.supports_think_disable), step, ref)

    def enter(self, info: RequestInfo, state: PhaseState, step: int, ref: Any, preempted: bool = False) -> LiveRequest:
        """Start tracking a request in the state it is in."""
        slot = heapq.heappop(self._free) if self._free else self._take_slot()
        # Under asynchronous scheduling the engine's step alone does not tell this record from the one before.
        step = max(step, self._last_step + 1)
        live = LiveRequest(slot, info, state, step, ref, self.default_cap, preempted=preempted, run=self.run)
        if preempted:
            self.preempted[live] = None
        self.by_id[info.request_id] = self.by_slot[slot] = live
        self._count(state.phase, 1)
        self.watch_limit(live)
        self.reorder = True
        self.record.opened.append(opened_row(live))
        return live

    def reread(self, live: LiveRequest, state: PhaseState) -> None:
        """Go on with a tracked request in another state: its tokens have been read with other markers."""
        self.run.end()
        self._count(live.own_state.phase, -1)
        live.reread(state, self.default_cap, self._last_step + 1)
        self._count(state.phase, 1)
        self.reorder = self.record.urgent = True
        self.watch_limit(live)

    def preempt(self, live: LiveRequest) -> None:
        """A request has gone back to the queue."""
        live.mark_preempted()
        self.preempted[live] = None
        self.record.preempted.append(live.slot)

    def resume(self, live: LiveRequest) -> None:
        """A preempted request generates again."""
        live.mark_resumed()
        self.preempted.pop(live, None)
        self.record.resumed.append(live.slot)

    def _take_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1

    @property
    def answering_ids(self) -> frozenset[str]:
        """Requests that answer; the same object until one begins or ends."""
        if self._answering_ids is None:
            answering = (r for r, live in self.by_id.items() if live.own_state.phase is Phase.OUTPUT)
            self._answering_ids = frozenset(answering)
        return self._answering_ids

    def _count(self, phase: Phase, by: int) -> None:
        self._answering_ids = None
        if phase is Phase.THINK:
            self.thinking += by
        elif phase is Phase.OUTPUT:
            self.answering += by

    def watch_limit(self, live: LiveRequest) -> None:
        """Put a thinking request among those looked at before the mask is built once its cap is near."""
        self.run.end()
        limit = live.limit
        live.watch_from = NEVER if limit is None else limit - self.lookahead
        if live.state.phase is Phase.THINK and (live.ending or live.state.think_tokens >= live.watch_from):
            self.due[live] = None
        else:
            self.due.pop(live, None)

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
            tracked = [live for request_id in request_ids if (live := self.by_id.get(request_id))]
            if len(tracked) == len(request_ids):
                self.run.begin(self._last_ids, tracked)

    def feed(self, live: LiveRequest, tokens: Sequence[int], first_row: int) -> bool:
        """Account a step's new tokens; returns whether thinking ended in them."""
        self.run.end()
        if len(tokens) == 1 and live.ending is None and self.markers.is_text(tokens[0], live.state.phase):
            return self._feed_text(live, tokens[0], first_row)
        record, state, markers, ended = self.record, live.state, self.markers, False
        for offset, token in enumerate(tokens):
            before = state.phase
            phase, flags = state.feed(token, markers)
            if live.ending is not None and live.expected.get(offset) == token:
                flags |= live.ending.advance()
            here = self.boundaries[token] if phase is Phase.THINK and token < len(self.boundaries) else 0
            if here or flags:
                # Nothing before a marker is looked back at.
                live.passed = (0, 0) if flags else (state.think_tokens, here)
            live.own_boundary = here
            record.add_row(live.slot, phase, flags | here, first_row + offset)
            if state.phase is not before:
                self._count(before, -1)
                self._count(state.phase, 1)
                live.enter_phase(self._last_step + 1)
                self.reorder = record.urgent = True
                ended = ended or before is Phase.THINK
        live.expected.clear()
        self.watch_limit(live)
        return ended

    def _feed_text(self, live: LiveRequest, token: int, row: int) -> bool:
        """The common case, one token of text in a phase that goes on; the same as `feed` without its cost."""
        state = live.state
        state.text_run += 1
        if state.phase is Phase.THINK:
            state.think_tokens += 1
            live.own_boundary = self.boundaries[token] if token < len(self.boundaries) else 0
            if state.think_tokens >= live.watch_from:
                self.due[live] = None
        else:
            state.output_tokens += state.phase is Phase.OUTPUT
            live.own_boundary = 0
        self.record.add_row(live.slot, state.phase, live.own_boundary, row)
        return False

    def close(self, live: LiveRequest, reason: int) -> None:
        """Forget a request; its slot is free again once the record that says so is taken."""
        self.run.end()
        self._last_ids = []
        del self.by_id[live.info.request_id]
        del self.by_slot[live.slot]
        self._count(live.state.phase, -1)
        self.due.pop(live, None)
        self.preempted.pop(live, None)
        self.record.closed.append((live.slot, reason))

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
        return [opened_row(live) for live in self.by_id.values()]
