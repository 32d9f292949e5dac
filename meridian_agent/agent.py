"""The engine-core role: what happens at each hook of the scheduler.

Glue between vLLM's scheduler (passed in, never imported) and the pure parts: tracker, directives, dispatch, probes,
reclaim. Every method here runs on the engine-core thread and under the guard; none waits, none does I/O.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_agent import hooks, overrides, probes, restore
from meridian_agent.adoption import Adoption
from meridian_agent.directives import (
    CAPS,
    MAX_HOLD_MS,
    ORDER,
    RULES,
    STEP_DECISIONS,
    Directives,
    Outcome,
    Plan,
    Tier,
)
from meridian_agent.dispatch import left_out
from meridian_agent.observe import REQUEST, RESULT, Wanted
from meridian_agent.phases import NO_MARKERS, Markers, Phase
from meridian_agent.reclaim import unreachable_blocks
from meridian_agent.tracker import PHASE_RANK, RequestInfo, Tracked, Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meridian.v1 import agent_pb2

    from meridian_agent.link import Link

logger = logging.getLogger("vllm.meridian")

# vLLM's finish reasons, by name, as meridian.v1.FinishReason.
FINISH_REASON = {"stop": 1, "length": 2, "abort": 3, "error": 4}
# Under vLLM's priority policy a rank is this fraction of a priority.
MAX_RANK, RANK_SCALE = 1023, 1024
# Between updates further apart than this the engine was idle.
MAX_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """What is found out about an engine once, at its start.

    boundaries: sentence and paragraph flags by token id. shares_blocks: probes may begin on a block that is filled in
    part. tool_call: begins a tool call in this model's output, where thinking stays in the chat until the tool has
    answered. on_fault: told of a fault elsewhere than in a hook, by its cause and its text.
    """

    model: str
    boundaries: bytes
    shares_blocks: bool
    tool_call: int | None
    on_fault: Callable[[str, str], None]


class Agent:
    """One engine's agent; it belongs to the engine-core thread."""

    def __init__(self, scheduler: Any, markers: Markers, link: Link, known: Known) -> None:
        self.link, self.known = link, known
        self.tracker = Tracker(markers)
        self.directives = Directives(self.tracker)
        self.observe_entropy = False
        # Cap of new requests; what is out of force, as parts of directives; whether all of it is.
        self.default_cap: int | None = None
        self._lapsed = 0
        self.frozen = False
        self.is_async = hooks.is_async(scheduler)
        self.is_fcfs = hooks.fcfs(scheduler)
        self.can_chunk = bool(scheduler.scheduler_config.enable_chunked_prefill)
        self.can_redraw = hooks.can_redraw(scheduler)
        self.block_size = scheduler.block_size
        self.tracker.boundaries = known.boundaries
        self.tracker.lookahead = scheduler.num_spec_tokens + (1 if self.is_async else 0)
        self.mask_words = (scheduler.vllm_config.model_config.get_vocab_size() + 31) // 32
        self.placed: dict[str, probes.Placed] = {}
        self.preempted_think = self.output_critical = self.blocks_reclaimed = self.think_skips = 0
        self.probe_tokens = 0
        # Seconds spent in these methods, and in stock schedule plus update_from_output.
        self.agent_seconds = self.scheduler_seconds = 0.0
        self._began = 0.0
        # Thinking requests that wait for what is decided from their probes.
        self.held: set[Tracked] = set()
        self._probe_number = 0
        self._keep_places_until = 0
        # Requests that were there before this agent.
        self._adoption: Adoption | None = None
        # Why the worker measures nothing, once it said so.
        self.no_entropy = ""
        self._tail: Any = None
        # When the running list was last sorted, prompts in pieces were at its end.
        self._prompts_last = False
        # The running list, priorities or the queue are not as vLLM alone would have them.
        self.ordered = False
        # Prompt tokens of the steps under way, oldest first; when the newest step was accounted.
        self._prefills: deque[int] = deque(maxlen=8)
        self._updated = 0.0

    def put_in_force(self, settings: agent_pb2.Settings, markers: Markers) -> None:
        """Obey settings from now on."""
        self.tracker.markers = markers
        self.tracker.supports_think_disable = settings.supports_think_disable
        has_cap = settings.HasField("max_think_tokens")
        self.default_cap = settings.max_think_tokens if has_cap else None
        self.tracker.default_cap = None if self._lapsed & CAPS else self.default_cap
        self.observe_entropy = settings.observe_entropy

    def take_arrived(self, scheduler: Any) -> None:
        """Put in force what the link brought, drop what holds no longer, then say so."""
        taken, arrived = [], self.link.arrived
        while arrived:
            taken.append(arrived.popleft())
        for one in taken:
            if one.settings is not None:
                self.put_in_force(one.settings, one.markers)
        lapsed, frozen = self.link.lapsed(), self.link.frozen()
        if taken or lapsed != self._lapsed or frozen != self.frozen:
            self._suspend(scheduler, lapsed, frozen)
        for one in taken:
            self.link.taken_in(one)

    def _suspend(self, scheduler: Any, lapsed: int, frozen: bool) -> None:
        """Drop what a freeze or a lease that is over puts out of force.

        A freeze puts out everything, a request's own cap included: it is there to rule out that anything of ours has a
        part in what is seen.
        """
        ended = lapsed & ~self._lapsed
        if frozen and not self.frozen:
            self.directives.freeze()
            ended |= ORDER | RULES
        elif ended:
            self.directives.drop(ended)
        if ended & ORDER:
            self._stock_order(scheduler)
        if ended & RULES:
            self._end_probing(scheduler)
        if self.frozen and not frozen:
            logger.info("meridian: no longer frozen")
            self.link.resync()
        self._lapsed, self.frozen = lapsed, frozen
        self.tracker.default_cap = None if lapsed & CAPS else self.default_cap

    def _stock_order(self, scheduler: Any) -> None:
        """Undo what an order has left behind."""
        self._tail = None
        if self.ordered:
            restore.order(scheduler)
            self.ordered = False

    def _end_probing(self, scheduler: Any) -> None:
        self.held.clear()
        self._keep_places_until = 0
        for request_id in list(self.placed):
            self._withdraw(scheduler, request_id, Outcome.AGENT_OFF, "")

    # ------------------------------------------------------------------------------------------------ request events

    def opened(self, scheduler: Any, request: Any) -> None:
        """A request was added to the engine. Nothing is tracked that does not generate text."""
        params = request.sampling_params
        if params is None or request.request_id in self.tracker.by_id or request.request_id in self.placed:
            return
        info = self._info(request)
        if self.link.idle:
            # No step is under way: what has arrived holds for its first request already.
            self.link.idle = False
            self.take_arrived(scheduler)
        self.tracker.open(info, request.prompt_token_ids or [], scheduler.current_step, request)

    def _info(self, request: Any) -> RequestInfo:
        lora, own = request.lora_request, overrides.read(request.sampling_params.extra_args)
        if own.complaint:
            logger.warning("meridian: request %s: %s", request.request_id, own.complaint)
        return RequestInfo(
            request_id=request.request_id,
            model=overrides.clean(lora.lora_name) if lora is not None else self.known.model,
            tenant=own.tenant,
            slo_class=own.slo_class,
            effort=own.effort,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=min(request.max_tokens, overrides.MAX_TOKENS),
            min_think_tokens=own.min_think_tokens,
            max_think_tokens=own.max_think_tokens,
            traceparent=overrides.clean((request.trace_headers or {}).get("traceparent", "")),
        )

    def adopt(self, requests: Iterable[Any], steps_under_way: int) -> None:
        """Take up the requests of an engine that runs already, over the coming steps."""
        self._adoption = Adoption(r for r in requests if not r.request_id.startswith(probes.PREFIX))
        self._prefills.extend([0] * steps_under_way)

    def _adopt_some(self, scheduler: Any, adoption: Adoption) -> None:
        for request, state in adoption.some(self.tracker.markers, self.tracker.supports_think_disable):
            if request.sampling_params is not None and request.request_id not in self.tracker.by_id:
                waits = hooks.waits_preempted(request)
                self.tracker.enter(self._info(request), state, scheduler.current_step, request, waits)
        if not adoption:
            self._adoption = None

    def finished(self, requests: list[Any]) -> None:
        """Requests were ended from outside (client gone)."""
        for request in requests:
            if tr := self.tracker.by_id.get(getattr(request, "request_id", request)):
                self._close(tr, FINISH_REASON["abort"])

    def preempting(self, request: Any) -> None:
        """A request is about to go back to the queue: only its own priority counts there."""
        if not self.is_fcfs:
            request.priority = math.floor(request.priority)

    def preempted(self, scheduler: Any, request: Any) -> None:
        tr = self.tracker.by_id.get(request.request_id)
        if tr is None:
            return
        tr.preempted = True
        self.tracker.preempted.add(tr)
        self.tracker.record.preempted.append(tr.slot)
        if tr.state.phase is Phase.OUTPUT:
            self.output_critical += 1
            logger.warning("meridian: an answering request was preempted (%d so far)", self.output_critical)
        else:
            self.preempted_think += 1
            if not self.frozen:
                self._reuse_answers_last(scheduler)

    def _reuse_answers_last(self, scheduler: Any) -> None:
        """Thinking's blocks went behind those of preempted answers in the order of reuse: put these last again."""
        pool = scheduler.kv_cache_manager.block_pool
        for tr in self.tracker.preempted:
            kept = [block for block, known in tr.kept if block.block_hash == known and block.ref_cnt == 0]
            # One statement, so that nothing comes between: there they would be nobody's.
            pool.touch(kept) or pool.free_blocks(kept[::-1])

    def freeing(self, scheduler: Any, request: Any) -> None:
        """A request's blocks are about to go back to the pool: unhash those that no later prompt can hit."""
        if request.request_id in self.placed:
            self._evict(scheduler, request, request.num_prompt_tokens - len(self.tracker.markers.probe))
            return
        tr = self.tracker.by_id.get(request.request_id)
        if tr is None or not request.is_finished():
            if tr is not None and tr.state.phase is Phase.OUTPUT:
                groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
                blocks = groups[0] if len(groups) == 1 else ()
                tr.kept = [(block, block.block_hash) for block in blocks if block.block_hash is not None]
            return
        if tr.tier is None:
            return
        (decision_id, tier, shadow), tr.tier = tr.tier, None
        if tier != Tier.UNREACHABLE:
            self.directives.report(decision_id, Outcome.APPLIED)
        elif shadow:
            self.directives.report(decision_id, Outcome.SHADOWED)
        elif len(scheduler.kv_cache_manager.get_block_ids(request.request_id)) != 1:
            self.directives.report(decision_id, Outcome.REFUSED, detail="several KV cache groups")
        elif self.known.tool_call is not None and self.known.tool_call in request.output_token_ids:
            self.directives.report(
                decision_id, Outcome.REFUSED, detail="a tool call: the next turn repeats its thinking"
            )
        else:
            count = self._evict(scheduler, request, tr.info.prompt_tokens)
            self.blocks_reclaimed += count
            self.directives.report(decision_id, Outcome.APPLIED, detail=f"{count} blocks")

    def _evict(self, scheduler: Any, request: Any, reachable_tokens: int) -> int:
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool.blocks
        (ids,) = manager.get_block_ids(request.request_id)
        blocks = unreachable_blocks(ids, reachable_tokens, self.block_size, lambda b: int(pool[b].ref_cnt))
        blocks = {b for b in blocks if pool[b].block_hash is not None}
        manager.evict_blocks(blocks)
        return len(blocks)

    # ------------------------------------------------------------------------------------------------------ each step

    def before_schedule(self, scheduler: Any) -> dict[str, int]:
        """Take in decisions, order the queues, leave sequences out, place probes.

        Returns the scheduler's own limits that are to be lower in this step, by attribute.
        """
        self._began = time.perf_counter()
        self.take_arrived(scheduler)
        self._take_inbox()
        self.tracker.record.state = self.link.say_state()
        if self._adoption is not None:
            self._adopt_some(scheduler, self._adoption)
        if self.frozen:
            return {}
        plan = self.directives.active_plan()
        if plan is not None:
            self._order(scheduler)
            if plan.think_per_step is not None and self.tracker.answering:
                self._leave_out(scheduler, Phase.THINK, plan.think_per_step, plan.max_skip_steps)
            elif plan.output_per_step is not None and self.tracker.thinking:
                self._leave_out(scheduler, Phase.OUTPUT, plan.output_per_step, plan.max_skip_steps)
        placed = self._place_probes(scheduler) if self.directives.probes else 0
        if self.held:
            self._hold(scheduler)
        limits = {}
        if (running := self._admission_limit(scheduler, placed)) is not None:
            limits[hooks.admission_limit_name(scheduler)] = running
        if (tokens := self._token_limit(scheduler, plan, placed)) is not None:
            limits["max_num_scheduled_tokens"] = tokens
        return limits

    def _token_limit(self, scheduler: Any, plan: Plan | None, placed: int) -> int | None:
        """Tokens to allow in the step, so that prompts take no more of it than the plan says while answers stream."""
        if plan is None or plan.prefill_tokens_per_step is None or not (self.tracker.answering and self.can_chunk):
            return None
        # A prompt cut in pieces would end an engine that cannot draw a seeded token twice.
        if not self.can_redraw and any(hooks.awaits_seeded_token(tr.ref) for tr in self.tracker.by_id.values()):
            return None
        decodes = len(scheduler.running) * (1 + scheduler.num_spec_tokens)
        probing = placed * (1 + len(self.tracker.markers.probe))
        # Without a single token a preempted request would never come back.
        tokens = decodes + probing + max(1, plan.prefill_tokens_per_step)
        return tokens if tokens < scheduler.max_num_scheduled_tokens else None

    def _take_inbox(self, limit: float = STEP_DECISIONS) -> None:
        """Take in what was decided, up to the message in which so many decisions are reached."""
        # Past a lease what came before is not taken in any more.
        inbox, taken = self.link.inbox if not self._lapsed else (), 0
        while inbox and taken < limit:
            try:
                message, size = self.link.take()
            except IndexError:
                # A new stream has cleared it this moment.
                return
            taken += size
            if message is None:
                self.directives.new_stream()
                self.held.clear()
                for placed in self.placed.values():
                    placed.decision_id = 0
            else:
                self.directives.accept(message)
                self.link.answered_step = max(self.link.answered_step, message.step)
                if self.frozen:
                    self.directives.freeze()

    def _hold(self, scheduler: Any) -> None:
        """Leave those out of the coming step whose probe is under way, or not answered yet and not for too long."""
        now = time.monotonic()
        for tr in list(self.held):
            answered = tr.asked_in and tr.asked_in <= self.link.answered_step
            # A clock that was set back would have it wait for as long.
            waits = 0 <= tr.held_until - now <= MAX_HOLD_MS / 1e3
            if answered or not waits or tr.state.phase is not Phase.THINK or tr.preempted:
                self.held.discard(tr)
            else:
                _skip_step(scheduler, tr)

    def _order(self, scheduler: Any) -> None:
        """Running: most urgent first, for vLLM preempts from the end, and prompts last. Waiting: preempted answers
        before all else.

        Under vLLM's priority policy the victim is the request of the highest priority number, and the queue is a heap:
        there a rank is a fraction on top of the request's own priority, so that it decides between equals only.
        """
        tracker, running = self.tracker, scheduler.running
        self.ordered = True
        # vLLM appends what it admits: a tail that is not the one we left means there is something to sort in.
        # A prompt that is done moves up from there, which neither its first token nor the tail need tell.
        if running and (tracker.reorder or self._prompts_last or running[-1] is not self._tail):
            by_id = tracker.by_id

            def rank(request: Any) -> int:
                tr = by_id.get(request.request_id)
                own = tr.effective_rank if tr is not None else PHASE_RANK[Phase.PROMPT]
                # The step's tokens are given out in this order: a long prompt would leave none to those after it.
                return own + MAX_RANK if request.is_prefill_chunk else own

            running.sort(key=rank)
            tracker.reorder, self._tail = False, running[-1]
            self._prompts_last = bool(running[-1].is_prefill_chunk)
            if not self.is_fcfs:
                for request in running:
                    if tr := by_id.get(request.request_id):
                        request.priority = math.floor(request.priority) + min(tr.effective_rank, MAX_RANK) / RANK_SCALE
        if not (tracker.preempted and self.is_fcfs):
            return
        answers = self._preempted_answers()
        if answers and scheduler.waiting and scheduler.waiting[0] not in answers:
            answers = [r for r in answers if r in scheduler.waiting]
            scheduler.waiting.remove_requests(answers)
            for request in reversed(answers):
                scheduler.waiting.prepend_request(request)

    def _preempted_answers(self) -> list[Any]:
        return [tr.ref for tr in self.tracker.preempted if tr.state.phase is Phase.OUTPUT]

    def _leave_out(self, scheduler: Any, phase: Phase, per_step: int, max_skip_steps: int) -> None:
        step = scheduler.current_step + 1
        by_id = self.tracker.by_id
        running = (by_id.get(r.request_id) for r in scheduler.running if not r.is_prefill_chunk)
        sequences = [tr for tr in running if tr is not None and tr.state.phase is phase]
        skipped = set(left_out(sequences, per_step, max_skip_steps))
        for tr in sequences:
            if tr in skipped:
                tr.skipped_steps += 1
                _skip_step(scheduler, tr)
            else:
                tr.joined_step, tr.skipped_steps = step, 0
        if phase is Phase.THINK:
            self.think_skips += len(skipped)

    def _admission_limit(self, scheduler: Any, placed: int) -> int | None:
        """Running requests to allow, None for vLLM's own limit.

        Places stay free for probes, of which `placed` are first in the queue now; while admission is on hold, nothing
        but them and preempted answers comes in.
        """
        hold = self.directives.hold_admission and self.tracker.answering > 0
        if not hold and scheduler.current_step >= self._keep_places_until:
            return None
        stock = limit = int(getattr(scheduler, hooks.admission_limit_name(scheduler)))
        if scheduler.current_step < self._keep_places_until:
            limit = min(stock, stock - probes.reserve(stock) + placed)
        if hold:
            limit = min(limit, len(scheduler.running) + len(self._preempted_answers()) + placed)
        return limit if limit < stock else None

    def _place_probes(self, scheduler: Any) -> int:
        """Put the probes whose place has come at the head of the queue; returns how many."""
        asked, self.directives.probes = self.directives.probes, []
        self._keep_places_until = scheduler.current_step + probes.PLACE_STEPS
        before = len(self.placed)
        for decision_id, tr, flags, hold_ms in asked:
            misplaced = tr.boundary & flags != flags or tr.state.may_be_in_marker(self.tracker.markers)
            if tr.state.phase is Phase.THINK and tr.ending is None and misplaced:
                self.directives.probes.append((decision_id, tr, flags, hold_ms))
                continue
            appended = self.tracker.markers.probe
            known = len(tr.ref.all_token_ids)
            # Where blocks cannot be shared in part, the tokens since the last full one are computed again.
            cost = len(appended) + (1 if self.known.shares_blocks else known % self.block_size)
            reason = probes.refusal(tr, self._room(scheduler), self.block_size, cost)
            if reason or not self.observe_entropy:
                self.directives.report(decision_id, Outcome.REFUSED, tr, reason or "not observing")
                continue
            self._probe_number += 1
            tokens = [*tr.ref.all_token_ids, *appended]
            probe = hooks.probe_request(tr.ref, f"{probes.PREFIX}{self._probe_number}", tokens)
            self.placed[probe.request_id] = probes.Placed(decision_id, tr, tr.state.think_tokens, known - 1)
            if hold_ms:
                tr.held_until, tr.asked_in = time.monotonic() + hold_ms / 1e3, 0
                self.held.add(tr)
            scheduler.add_request(probe)
            scheduler.waiting.remove_requests([probe])
            scheduler.waiting.prepend_request(probe)
        return len(self.placed) - before

    def shared_with(self, request_id: str) -> tuple[str, int] | None:
        """The request whose blocks a probe shares, and how many tokens of it."""
        placed = self.placed.get(request_id)
        if placed is None or placed.parent.ref.num_computed_tokens < placed.shared_tokens:
            return None
        return placed.parent.info.request_id, placed.shared_tokens

    def _room(self, scheduler: Any) -> probes.Room:
        limit = min(getattr(scheduler, hooks.admission_limit_name(scheduler)), scheduler.max_num_running_reqs)
        waiting = sum(not placed.cost_tokens for placed in self.placed.values())
        return probes.Room(
            limit - len(scheduler.running) - waiting,
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            scheduler.max_num_scheduled_tokens,
            scheduler.kv_cache_manager.enable_caching,
        )

    def after_schedule(self, scheduler: Any, output: Any) -> None:
        """Tell the workers what to measure, and under asynchronous scheduling settle tokens before a force."""
        if self.observe_entropy and output.num_scheduled_tokens and self.tracker.markers is not NO_MARKERS:
            setattr(output, REQUEST, Wanted(self.tracker.markers.end[0], self.tracker.answering_ids))
        scheduled, drafted = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # What is more than a token per sequence, and its drafts, is prompt.
        prefill = output.total_num_scheduled_tokens - len(scheduled)
        self._prefills.append(prefill - sum(map(len, drafted.values())) if drafted else prefill)
        # vLLM waits for the step before this one, and breaks where there is none.
        due = self.tracker.due
        if (
            due
            and not (self.frozen or self._settled())
            and any(tr.info.request_id in scheduled and self._may_end(tr) and not self._is_under_way(tr) for tr in due)
        ):
            output.pending_structured_output_tokens = True
        for request_id, placed in list(self.placed.items()):
            if request_id in scheduled:
                placed.cost_tokens += scheduled[request_id]
            elif not placed.cost_tokens:
                self._withdraw(scheduler, request_id, Outcome.REFUSED, "no room in the step")

    def _settled(self) -> bool:
        """Whether all tokens before the step that was scheduled last are accounted."""
        return not self.is_async or len(self._prefills) <= 1

    def _withdraw(self, scheduler: Any, request_id: str, outcome: Outcome, detail: str) -> None:
        """Take a probe back out of the engine."""
        placed = self.placed[request_id]
        scheduler.finish_requests(request_id, hooks.aborted_status())
        del self.placed[request_id]
        self.held.discard(placed.parent)
        self.directives.report(placed.decision_id, outcome, detail=detail)

    def bitmask(self, scheduler: Any, output: Any, base: Any) -> Any:
        """The step's token masks with a forced token for every request whose thinking ends now.

        output: the SchedulerOutput of the step. base: what vLLM itself masks, or None.
        """
        self.link.wake()
        self._take_inbox()
        if not (self.tracker.due or output.scheduled_spec_decode_tokens):
            return base
        due = [*self.tracker.due, *self._drafted_to_think(output)]
        if self.frozen or not due or not (self._settled() or output.pending_structured_output_tokens):
            return base
        forced: dict[str, dict[int, int]] = {}
        for tr in due:
            request_id = tr.info.request_id
            if request_id not in output.num_scheduled_tokens or tr.ref.is_prefill_chunk or not self._may_end(tr):
                continue
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            tokens = self.directives.forced_tokens(tr, 1 + len(drafts), drafts)
            if tokens and _grammar_allows(output, base, request_id, tokens):
                forced[request_id] = tokens
            else:
                tr.expected.clear()
        return self._merge(output, base, forced) if forced else base

    def _may_end(self, tr: Tracked) -> bool:
        """Whether the request's own parameters allow what a forced end writes: the only token of a mask must be one."""
        ending = self.tracker.markers.ending
        if tr.checked != ending:
            tr.checked, tr.allowed = ending, not hooks.never_allows(tr.ref, ending)
        return tr.allowed and not hooks.not_yet_allows(tr.ref, ending)

    def _is_under_way(self, tr: Tracked) -> bool:
        """Whether the step before this one surely writes the last token of a forced end."""
        if tr.ending is None or self.tracker.lookahead > 1:
            return False
        return tr.ending.position + len(tr.expected) == len(tr.ending.tokens)

    def _drafted_to_think(self, output: Any) -> list[Tracked]:
        """Requests that do not think now and may do so within their drafts: a cap may fall there."""
        found = []
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            tr = self.tracker.by_id.get(request_id)
            if tr is None or tr.limit is None or tr.state.phase is Phase.THINK:
                continue
            if not self.tracker.markers.by_last.keys().isdisjoint(drafts):
                found.append(tr)
        return found

    def _merge(self, output: Any, base: Any, forced: dict[str, dict[int, int]]) -> Any:
        """`base` with rows for the forced requests: each has one row and one more for each of its draft tokens."""
        own = list(base.structured_output_request_ids) if base is not None else []
        words = base.grammar_bitmask.shape[1] if base is not None else self.mask_words
        parts: list[Any] = [base.grammar_bitmask] if base is not None else []
        added = [r for r in forced if r not in own]
        drafts = output.scheduled_spec_decode_tokens
        rows = {r: 1 + len(drafts.get(r, ())) for r in [*own, *added]}
        parts.append(np.full((sum(rows[r] for r in added), words), -1, dtype=np.int32))
        mask = np.concatenate(parts)
        at = 0
        for request_id, count in rows.items():
            for row, token in forced.get(request_id, {}).items():
                mask[at + row] = 0
                mask[at + row, token // 32] = np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)
            at += count
        return hooks.grammar_output([*own, *added], mask, base)

    def after_update(self, scheduler: Any, runner_output: Any, outputs: dict[int, Any]) -> None:
        """Account the step's tokens, settle decisions, send the record."""
        signals = getattr(runner_output, RESULT, None)
        if isinstance(signals, str):
            self._hear_worker(signals)
            signals = None
        if not self._all_text(runner_output, outputs, signals):
            self._account_singly(runner_output, outputs, signals)
        if not (is_live := bool(self.tracker.by_id)):
            with self.link.handover:
                self.link.idle = True
                self.take_arrived(scheduler)
                self._take_inbox(math.inf)
            self.directives.active_plan()
        record = self.tracker.record
        record.signals = signals
        record.step, record.kv_used = scheduler.current_step, scheduler.kv_cache_manager.usage
        record.running, record.waiting = len(scheduler.running), len(scheduler.waiting)
        record.prefill_tokens = self._prefills.popleft() if self._prefills else 0
        record.step_time_ms = self._step_time_ms()
        record.counters = self._counters()
        sent = self.tracker.take_record()
        for tr in self.held:
            if not tr.asked_in and any(probe[1] == tr.slot for probe in sent.probes):
                tr.asked_in = sent.step
        self.link.send(sent, self.tracker.snapshot)
        if not is_live:
            self.link.wake()

    def _all_text(self, runner_output: Any, outputs: dict[int, Any], signals: Any) -> bool:
        """Account a step that brought each of its requests one token of text and nothing else, as nearly all do."""
        if self.placed or (signals is not None and signals.first_row is not None):
            return False
        told = 0
        for group in outputs.values():
            told += len(group.outputs)
            for out in group.outputs:
                if out.finish_reason is not None:
                    return False
        ids = runner_output.req_ids
        # vLLM tells nothing of requests that were ended meanwhile.
        return told == len(ids) and self.tracker.note(ids, runner_output.sampled_token_ids)

    def _account_singly(self, runner_output: Any, outputs: dict[int, Any], signals: Any) -> None:
        by_id, index = self.tracker.by_id, runner_output.req_id_to_index
        for group in outputs.values():
            if self.placed:
                self._collect_probes(group, signals, index)
            for out in group.outputs:
                if tr := by_id.get(out.request_id):
                    self._account(tr, out, index, signals)
        self.tracker.noted_singly(runner_output.req_ids)

    def _hear_worker(self, reason: str) -> None:
        """The worker says why it measures nothing, or that it can again: the next Hello promises what it can."""
        if bool(reason) == bool(self.no_entropy):
            return
        self.no_entropy = reason
        if reason:
            logger.warning("meridian: no entropy from this engine: %s", reason)
            self.known.on_fault("observer", reason)
        else:
            logger.info("meridian: entropy from this engine again")
        self.link.restart()

    def _step_time_ms(self) -> float:
        """Time since the step's schedule began; under asynchronous scheduling, where the next step's began before this
        one's update, time since the last update."""
        now = time.perf_counter()
        began = self._began
        if self.is_async and now - self._updated < MAX_STEP_S:
            began = self._updated
        self._updated = now
        return (now - began) * 1e3

    def _account(self, tr: Tracked, out: Any, index: dict[str, int], signals: Any) -> None:
        if out.new_token_ids:
            # Under asynchronous scheduling the token of the step before the preemption is still to come.
            if tr.preempted and not hooks.waits_preempted(tr.ref):
                tr.preempted = False
                self.tracker.preempted.discard(tr)
                self.tracker.record.resumed.append(tr.slot)
            at = index.get(out.request_id, 0)
            first = at if signals is None else signals.row(at)
            ended = self.tracker.feed(tr, out.new_token_ids, first)
            if ended or tr.ending is not None or (tr.cap is not None and tr.cap.shadow):
                self.directives.after_tokens(tr, ended)
        if out.finish_reason is not None:
            self._close(tr, FINISH_REASON.get(str(out.finish_reason), 0))

    def _collect_probes(self, group: Any, signals: Any, index: dict[str, int]) -> None:
        """Take probe results out of what goes to the clients."""
        for out in group.outputs:
            placed = self.placed.pop(out.request_id, None)
            if placed is None:
                continue
            row = index.get(out.request_id)
            if signals is None or row is None:
                self.directives.report(placed.decision_id, Outcome.REFUSED, detail="not measured")
                continue
            eat_nats = float(signals.entropy_nats[signals.row(row)])
            self.probe_tokens += placed.cost_tokens
            tr, answer = placed.parent, out.new_token_ids[0]
            if self.tracker.by_slot.get(tr.slot) is not tr:
                # It ended in the step before, as asynchronous scheduling may find out late: the slot can be another's.
                self.directives.report(placed.decision_id, Outcome.REQUEST_GONE, tr)
                continue
            tr.same_answer = tr.same_answer + 1 if answer == tr.trial_answer else 1
            tr.trial_answer = answer
            empty = answer in tr.ref.sampling_params.all_stop_token_ids and not self.tracker.markers.answer_prefix
            measured = (placed.decision_id, tr.slot, placed.think_tokens, eat_nats, placed.cost_tokens)
            self.tracker.record.probes.append((*measured, tr.same_answer, empty))
            self.directives.report(placed.decision_id, Outcome.APPLIED)
        restore.hide_probes([group])

    def _close(self, tr: Tracked, reason: int) -> None:
        self.held.discard(tr)
        self.directives.close(tr)
        self.tracker.close(tr, reason)

    def _counters(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("preempted_think", self.preempted_think),
            ("output_critical", self.output_critical),
            ("blocks_reclaimed", self.blocks_reclaimed),
            ("think_skips", self.think_skips),
            ("reports_dropped", self.link.reports_dropped),
            ("probe_tokens", self.probe_tokens),
            ("agent_seconds", self.agent_seconds),
            ("scheduler_seconds", self.scheduler_seconds),
            ("round_trip_ms", self.link.round_trip_ms),
        )


def _grammar_allows(output: Any, base: Any, request_id: str, tokens: dict[int, int]) -> bool:
    """Whether vLLM's own masks of a request allow the tokens that are to be forced in its rows: vLLM ends a request
    with an error on a token that its grammar does not know."""
    own = base.structured_output_request_ids if base is not None else ()
    if request_id not in own:
        return True
    drafts = output.scheduled_spec_decode_tokens
    first = sum(1 + len(drafts.get(before, ())) for before in own[: own.index(request_id)])
    words = base.grammar_bitmask
    return all(words[first + row, token // 32] >> token % 32 & 1 for row, token in tokens.items())


def _skip_step(scheduler: Any, tr: Tracked) -> None:
    """Leave a running request out of the coming step; what vLLM itself put off longer stays so."""
    tr.ref.next_decode_eligible_step = max(tr.ref.next_decode_eligible_step, scheduler.current_step + 2)
