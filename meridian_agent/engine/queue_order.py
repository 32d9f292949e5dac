"""Applies a dispatch plan to vLLM's queues: which requests run first, which are left out, and how many tokens prompts
may take.

The module owns the order that it has made, so that it can undo the order; the control plane decides the ranks. Knows
only how many probes there are. Runs on the engine-core thread, before vLLM schedules.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian.v1 import agent_pb2

from meridian_agent.core.live_request import PHASE_RANK
from meridian_agent.core.phases import Phase
from meridian_agent.engine import prefill_limits, stock_restore
from meridian_agent.vllm_adapter import request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meridian_agent.core.directives import DispatchPlan
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.vllm_types import Request, Scheduler

# Number of requests at the end of a sorted list that the agent looks at, to find out whether the list is still sorted.
MAX_APPENDED = 8
# Under vLLM's priority policy the agent adds rank / RANK_SCALE to a request's priority.
MAX_RANK, RANK_SCALE = agent_pb2.PHASE_RANK_MAX, agent_pb2.PHASE_RANK_MAX + 1
# Bound for the priorities to which a fraction is added: below it the sum is exact in a float, which has 53 bits. A
# priority beyond it, such as a time in nanoseconds, stays as it is, and ranks do not decide there.
PRIORITY_BOUND = (1 << 53) // RANK_SCALE


class Limit(NamedTuple):
    """The value of one of vLLM's own limits for one step. owner: the object that has the limit as an attribute."""

    owner: Any
    name: str
    value: int


class QueueOrder:
    """The queues of one engine, and the traces that plans have left in them."""

    def __init__(self, tracker: Tracker, scheduler: Scheduler) -> None:
        self._tracker = tracker
        self._is_fcfs = scheduler_api.fcfs(scheduler)
        self._can_cut = not scheduler_api.uncuttable(scheduler)
        self._least_piece = scheduler_api.least_piece(scheduler)
        self._can_redraw = scheduler_api.can_redraw(scheduler)
        # Whether the running list, the priorities or the waiting queue differ from stock vLLM's.
        self.ordered = False
        self.think_skips = 0
        # Id of the last request in the running list after the newest sort; an id, because the request itself would stay
        # in memory.
        self._tail = ""
        # Whether a prompt in pieces was last in the running list after the newest sort.
        self.prompts_last = False

    def obey(self, scheduler: Scheduler, plan: DispatchPlan) -> None:
        """Order the queues, and leave out the sequences for which the plan's shares have no place."""
        self._order(scheduler)
        if plan.think_per_step is not None and self._streams(scheduler, Phase.OUTPUT):
            self._leave_out(scheduler, Phase.THINK, plan.think_per_step, plan.max_skip_steps)
        elif plan.output_per_step is not None and self._streams(scheduler, Phase.THINK):
            self._leave_out(scheduler, Phase.OUTPUT, plan.output_per_step, plan.max_skip_steps)

    def undo(self, scheduler: Scheduler) -> None:
        """Undo the order that plans have made."""
        self._tail = ""
        if self.ordered:
            stock_restore.order(scheduler)
            self.ordered = False

    def preempting(self, request: Request) -> None:
        """Give a request its own priority back, because only that counts in the waiting queue."""
        if not self._is_fcfs:
            request.priority = math.floor(request.priority)

    def _order(self, scheduler: Scheduler) -> None:
        """Sort the running list by rank, prompts last, because vLLM preempts from the end; put preempted answers first
        in the waiting queue.

        Under vLLM's priority policy the victim is the request with the highest priority number, and the waiting queue
        is a heap. So the agent adds a rank as a fraction to the request's own priority, and the rank decides between
        equal priorities only.
        """
        tracker, running = self._tracker, scheduler.running
        self.ordered = True
        # A prompt that is complete moves up from the end, and neither its first token nor the last request need show
        # that.
        if running and (tracker.reorder or self.prompts_last or not self._stays_sorted(running)):
            self._sort(running)
        if not (tracker.preempted and self._is_fcfs):
            return
        answers = self.preempted_answers()
        # A request that was preempted later stands before them, and may stand between them.
        first = list(islice(scheduler.waiting, len(answers)))
        if any(request not in answers for request in first):
            answers = [r for r in answers if r in scheduler.waiting]
            scheduler.waiting.remove_requests(answers)
            for request in reversed(answers):
                scheduler.waiting.prepend_request(request)

    def _stays_sorted(self, running: list[Request]) -> bool:
        """Return whether the requests behind the one that was last after the newest sort belong there. vLLM appends the
        requests that it admits, and no rank has changed since."""
        if running[-1].request_id == self._tail:
            return True
        by_id, rank_after, others = self._tracker.by_id, int(MAX_RANK), reversed(running[-MAX_APPENDED:])
        for request in others if self._is_fcfs else ():
            live = by_id.get(request.request_id)
            if live is None or request.is_prefill_chunk or live.effective_rank > rank_after:
                return False
            if request.request_id == self._tail:
                self._tail = running[-1].request_id
                return True
            rank_after = live.effective_rank
        return False

    def _sort(self, running: list[Request]) -> None:
        by_id, unknown = self._tracker.by_id, PHASE_RANK[Phase.PROMPT]
        # vLLM gives out the step's tokens in this order, so a long prompt would leave none for the requests behind it.
        ranks = [
            (live.effective_rank if (live := by_id.get(request.request_id)) is not None else unknown)
            + (MAX_RANK if request.is_prefill_chunk else 0)
            for request in running
        ]
        if ranks != sorted(ranks):
            running[:] = [running[row] for row in sorted(range(len(ranks)), key=ranks.__getitem__)]
        self._tracker.reorder, self._tail = False, running[-1].request_id
        self.prompts_last = bool(running[-1].is_prefill_chunk)
        if not self._is_fcfs:
            for request in running:
                own = math.floor(request.priority)
                if (live := by_id.get(request.request_id)) is not None and abs(own) < PRIORITY_BOUND:
                    request.priority = own + min(live.effective_rank, MAX_RANK) / RANK_SCALE

    def _streams(self, scheduler: Scheduler, phase: Phase) -> bool:
        """Return whether a running request whose prompt is complete is in this phase. Requests that wait for a place,
        also after a preemption, do not count, because no limit on the others helps them."""
        known = self._tracker.answering if phase is Phase.OUTPUT else self._tracker.thinking
        return bool(known) and any(self._decoding(scheduler, phase))

    def _decoding(self, scheduler: Scheduler, phase: Phase) -> Iterator[LiveRequest]:
        """Yield the running requests in this phase whose prompts are complete."""
        by_id = self._tracker.by_id
        running = (by_id.get(request.request_id) for request in scheduler.running if not request.is_prefill_chunk)
        return (live for live in running if live is not None and live.phase is phase)

    def preempted_answers(self) -> list[Any]:
        """Return the preempted answers that wait. A request that runs again leaves `tracker.preempted` only with its
        next token, which may take several steps."""
        answers = [live.ref for live in self._tracker.preempted if live.phase is Phase.OUTPUT]
        return [request for request in answers if request_api.waits_preempted(request)]

    def _leave_out(self, scheduler: Scheduler, phase: Phase, per_step: int, max_skip_steps: int) -> None:
        step, sequences = scheduler.current_step + 1, list(self._decoding(scheduler, phase))
        skipped = left_out(sequences, per_step, max_skip_steps)
        if skipped and not scheduler_api.adapters_fit(scheduler):
            skipped = [live for live in skipped if live.ref.lora_request is None]
        for live in skipped:
            skip_step(scheduler, live)
        out = set(skipped)
        for live in sequences:
            live.count_step(step, live in out)
        if phase is Phase.THINK:
            self.think_skips += len(skipped)

    # ---------------------------------------------------------------------------------- the scheduler's own limits

    def limits(
        self, scheduler: Scheduler, plan: DispatchPlan | None, hold: bool, reserved: int, probes: Sequence[int]
    ) -> list[Limit]:
        """Return the scheduler's limits that this step lowers.

        hold: admission is on hold. reserved: running places to leave free. probes: tokens of each probe that is now
        first in the waiting queue.
        """
        limits = []
        if (running := self._admission_limit(scheduler, hold, reserved, len(probes))) is not None:
            limits.append(Limit(scheduler, scheduler_api.admission_limit_name(scheduler), running))
        if (tokens := self._token_limit(scheduler, plan, sum(probes))) is not None:
            limits.append(Limit(scheduler, "max_num_scheduled_tokens", tokens))
        if probes:
            budget = scheduler.max_num_scheduled_tokens if tokens is None else tokens
            if (
                piece := prefill_limits.limit_for(scheduler, scheduler_api.wanted_tokens(scheduler), budget, probes)
            ) is not None:
                piece = max(piece, prefill_limits.least(scheduler, probes))
                limits += [Limit(*limit) for limit in scheduler_api.piece_limits(scheduler, piece)]
        return limits

    def _admission_limit(self, scheduler: Scheduler, hold: bool, reserved: int, placed: int) -> int | None:
        """Return the number of running requests to allow, None for vLLM's own limit. While admission is on hold, until
        the next token of a preempted answer, vLLM may admit only probes, preempted answers, and requests that hold
        their KV blocks already."""
        hold = hold and any(live.phase is Phase.OUTPUT for live in self._tracker.preempted)
        if not (hold or reserved):
            return None
        stock = limit = int(getattr(scheduler, scheduler_api.admission_limit_name(scheduler)))
        if reserved:
            limit = min(stock, stock - reserved + placed)
        if hold:
            ahead = scheduler_api.waiting_with_blocks(scheduler)
            limit = min(limit, len(scheduler.running) + ahead + len(self.preempted_answers()) + placed)
        return limit if limit < stock else None

    def _token_limit(self, scheduler: Scheduler, plan: DispatchPlan | None, probing: int) -> int | None:
        """Return the number of tokens to allow in the step, so that prompts take no more of it than the plan says while
        answers stream; None for vLLM's own limit. probing: tokens of probes."""
        if plan is None or plan.prefill_tokens_per_step is None or not self._can_cut:
            return None
        run = self._tracker.run
        if run.whole and run.members == len(scheduler.running) and not scheduler_api.anything_waits(scheduler):
            # No prompt is left to compute.
            return None
        if not self._streams(scheduler, Phase.OUTPUT):
            return None
        # A prompt that is cut in pieces would crash an engine that cannot sample a seeded token twice.
        others = (live for live in self._tracker.by_id.values() if live.run_row < 0)
        if not self._can_redraw and any(request_api.awaits_seeded_token(live.ref) for live in others):
            return None
        decodes = scheduler_api.decode_tokens(scheduler)
        # With too few tokens for a piece of a prompt no request would be admitted, and no preempted one come back.
        tokens = decodes + probing + max(self._least_piece, plan.prefill_tokens_per_step)
        return tokens if tokens < scheduler.max_num_scheduled_tokens else None


def left_out(sequences: list[LiveRequest], per_step: int | None, max_skip_steps: int) -> list[LiveRequest]:
    """Return the sequences of one phase to leave out of the coming step.

    At most `per_step` sequences join, the longest-waiting first. A sequence that was left out `max_skip_steps` times in
    a row joins in spite of the limit, so no sequence starves.
    """
    if per_step is None or len(sequences) <= per_step:
        return []
    by_wait = sorted(sequences, key=lambda live: live.joined_step)
    return [live for live in by_wait[per_step:] if live.skipped_steps < max_skip_steps]


def skip_step(scheduler: Scheduler, live: LiveRequest) -> None:
    """Leave a running request out of the coming step; a longer delay that vLLM itself has set stays."""
    live.ref.next_decode_eligible_step = max(live.ref.next_decode_eligible_step, scheduler.current_step + 2)
