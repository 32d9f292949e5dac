"""The engine-core role: what happens at each hook of the scheduler, and in which order.

Glue between vLLM's scheduler (passed in, never imported) and the parts that each hold one thing: tracker, directives,
queues, probing, masks, blocks, accounts. Every method here runs on the engine-core thread and under the guard; none
waits, none does I/O.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core import probe_admission, request_info
from meridian_agent.core.catch_up import CatchUp, state_of_new
from meridian_agent.core.directives import CAPS, ORDER, RULES, STEP_DECISIONS, Directives
from meridian_agent.core.guard import cause_name, hook
from meridian_agent.core.phases import Markers, Phase
from meridian_agent.core.step_signals import BACKEND, REQUEST, RESULT, WorkerRequestEncoder
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.kv_blocks import KvBlocks, reuse_answers_last
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.engine.queue_order import QueueOrder
from meridian_agent.engine.step_accounting import FINISH_REASON, StepAccounting
from meridian_agent.engine.token_masks import TokenMasks
from meridian_agent.vllm_adapter import request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_agent.core.step_record import StepRecord
    from meridian_agent.engine.capabilities import EngineFacts
    from meridian_agent.engine.queue_order import Limit
    from meridian_agent.link.control_stream import Link

logger = logging.getLogger("vllm.meridian")

# Between updates further apart than this the engine was idle.
MAX_STEP_S = 1.0
# Between two reports of steps in which nothing was computed, while nothing else changes.
EMPTY_REPORT_S = 0.1


class Agent:
    """One engine's agent; it belongs to the engine-core thread."""

    def __init__(self, scheduler: Any, markers: Markers, link: Link, facts: EngineFacts) -> None:
        self.link, self.lease, self.mailbox, self.facts = link, link.lease, link.mailbox, facts
        self.is_async = scheduler_api.is_async(scheduler)
        self.block_size = scheduler.block_size
        self.tracker = tracker = Tracker(markers)
        tracker.boundaries = facts.boundaries
        # Tokens of a step on top of its first; under asynchronous scheduling, those of the step before it, too.
        drafts = scheduler.num_spec_tokens
        tracker.lookahead = drafts + (1 + drafts if self.is_async else 0)
        self.directives = directives = Directives(tracker)
        self.queues = QueueOrder(tracker, scheduler)
        self.probing = ProbeRunner(tracker, directives, self.block_size, facts.shares_blocks, facts.no_probes)
        self.accounts = StepAccounting(tracker, directives, self.probing)
        self.masks = TokenMasks(tracker, directives, (scheduler.vllm_config.model_config.get_vocab_size() + 31) // 32)
        self.blocks = KvBlocks(directives, facts.tool_call)
        self.observe_entropy = False
        self._asking = WorkerRequestEncoder()
        # Cap of new requests; what is out of force, as parts of directives; whether all of it is.
        self.default_cap: int | None = None
        self._lapsed = 0
        self.frozen = False
        # The settings that are obeyed, as the link holds them.
        self._obeyed: tuple[agent_pb2.Settings, Markers] | None = None
        self.preempted_think = self.output_critical = 0
        # Seconds spent in these methods, and in stock schedule plus update_from_output.
        self.agent_seconds = self.scheduler_seconds = 0.0
        self._began = 0.0
        # Requests that were there before this agent, and new ones whose prompts take long to read.
        self._adoption: CatchUp | None = None
        # Why the worker measures nothing, once it said so.
        self.no_entropy = ""
        # The backend on the worker, and why it is not the CUDA kernel: the expected one, until the worker says so.
        self.backend = facts.expected_backend
        # Prompt tokens of the steps under way, oldest first; when the newest step was accounted.
        self._prefills: deque[int] = deque(maxlen=8)
        self._updated = 0.0
        # When the newest record was sent, and what it said of the engine as a whole.
        self._sent = -math.inf
        self._said: tuple[Any, ...] = ()

    def put_in_force(self, settings: agent_pb2.Settings, markers: Markers) -> None:
        """Obey settings from now on."""
        was_known, self.tracker.markers = self.tracker.markers.known, markers
        self.tracker.supports_think_disable = settings.supports_think_disable
        has_cap = settings.HasField("max_think_tokens")
        self.default_cap = settings.max_think_tokens if has_cap else None
        self.tracker.default_cap = None if self._lapsed & CAPS else self.default_cap
        self.observe_entropy = settings.observe_entropy
        if markers.known != was_known:
            self._read_anew()

    def _read_anew(self) -> None:
        """Read the live requests again, over the coming steps: markers are known now, or are known no longer."""
        if not self.tracker.markers.known:
            self.directives.lose_markers()
            for live in self.tracker.by_id.values():
                self.tracker.reread(live, replace(live.state, phase=Phase.UNKNOWN))
        elif self.tracker.by_id:
            self._adoption = self._adoption or CatchUp()
            for live in self.tracker.by_id.values():
                self._adoption.add(live.ref)
        self.link.outbox.resync()

    def take_arrived(self, scheduler: Any) -> None:
        """Put in force what the link brought, drop what holds no longer, then say so."""
        if (held := self.lease.held) is not None and held is not self._obeyed:
            # Said for an idle engine, before whatever has arrived since then.
            self.put_in_force(*held)
        # Not what is held by the end of this: the link's thread may hold newer ones meanwhile.
        self._obeyed = held
        taken = self.mailbox.take() if self.mailbox.arrived else ()
        for one in taken:
            if one.settings is not None:
                self.put_in_force(one.settings, one.markers)
        lapsed, frozen = self.link.lapsed(), self.lease.frozen()
        if not (frozen or self.frozen) and any(one.status.freeze_status.frozen for one in taken):
            # Over before a step saw it: for the control plane all that was decided is void until it is told anew.
            self._suspend(scheduler, lapsed, True)
        if taken or lapsed != self._lapsed or frozen != self.frozen:
            self._suspend(scheduler, lapsed, frozen)
        for one in taken:
            self.mailbox.confirm(one)
            if one.settings is not None:
                self._obeyed = self.lease.held

    def _suspend(self, scheduler: Any, lapsed: int, frozen: bool) -> None:
        """Drop what a freeze or a lease that is over puts out of force.

        A freeze puts out everything, a request's own cap included: it is there to rule out that anything of ours has a
        part in what is seen.
        """
        if ended := lapsed & ~self._lapsed:
            self.directives.drop(ended)
        if frozen and not self.frozen:
            self.directives.freeze()
            ended |= ORDER | RULES
        if ended & ORDER:
            self.queues.undo(scheduler)
        if ended & RULES:
            self.probing.end(scheduler)
        if self.frozen and not frozen:
            logger.info("meridian: no longer frozen")
            self.link.outbox.resync()
        self._lapsed, self.frozen = lapsed, frozen
        self.tracker.default_cap = None if lapsed & CAPS else self.default_cap

    # ------------------------------------------------------------------------------------------------ request events

    @hook(agent_pb2.FAULT_CAUSE_OPENED)
    def opened(self, scheduler: Any, request: Any) -> None:
        """A request was added to the engine. Nothing is tracked that does not generate text."""
        params = request.sampling_params
        if params is None or request.request_id in self.tracker.by_id or request.request_id in self.probing.placed:
            return
        info = request_info.info_of(request, self.facts.model)
        if self.lease.idle:
            # No step is under way: what has arrived holds for its first request already.
            self.mailbox.begin()
            self.take_arrived(scheduler)
        state = state_of_new(request, self.tracker.markers, self.tracker.supports_think_disable)
        if state is not None:
            self.tracker.enter(info, state, scheduler.current_step, request)
            return
        self._adoption = self._adoption or CatchUp()
        self._adoption.add(request)

    def adopt(self, requests: Iterable[Any], steps_under_way: int) -> None:
        """Take up the requests of an engine that runs already, over the coming steps."""
        self._adoption = CatchUp(r for r in requests if not r.request_id.startswith(probe_admission.PREFIX))
        self._prefills.extend([0] * steps_under_way)

    def _adopt_some(self, scheduler: Any, adoption: CatchUp) -> None:
        for request, state in adoption.some(self.tracker.markers, self.tracker.supports_think_disable):
            live = self.tracker.by_id.get(request.request_id)
            if live is not None and live.state.phase is Phase.UNKNOWN and self.tracker.markers.known:
                self.tracker.reread(live, state)
                self.link.outbox.resync()
            elif request.sampling_params is not None and live is None:
                info, waits = request_info.info_of(request, self.facts.model), request_api.waits_preempted(request)
                self.tracker.enter(info, state, scheduler.current_step, request, waits)
        if not adoption:
            self._adoption = None

    @hook(agent_pb2.FAULT_CAUSE_FINISHED)
    def finished(self, requests: list[Any]) -> None:
        """Requests were ended from outside (client gone)."""
        for request in requests:
            if live := self.tracker.by_id.get(getattr(request, "request_id", request)):
                self.accounts.close(live, FINISH_REASON["abort"])

    @hook(agent_pb2.FAULT_CAUSE_PREEMPTING)
    def preempting(self, request: Any) -> None:
        """A request is about to go back to the queue."""
        self.queues.preempting(request)

    @hook(agent_pb2.FAULT_CAUSE_PREEMPTED)
    def preempted(self, scheduler: Any, request: Any) -> None:
        live = self.tracker.by_id.get(request.request_id)
        if live is None:
            return
        self.tracker.preempt(live)
        if live.state.phase is Phase.OUTPUT:
            self.output_critical += 1
            logger.warning("meridian: an answering request was preempted (%d so far)", self.output_critical)
        else:
            self.preempted_think += 1
            if not self.frozen:
                reuse_answers_last(scheduler, self.tracker.preempted)

    @hook(agent_pb2.FAULT_CAUSE_FREEING)
    def freeing(self, scheduler: Any, request: Any) -> None:
        """A request's blocks are about to go back to the pool."""
        if request.request_id in self.probing.placed:
            self.blocks.evict(scheduler, request, self.probing.placed[request.request_id].shared_tokens + 1)
        elif (live := self.tracker.by_id.get(request.request_id)) is not None:
            self.blocks.freeing(scheduler, request, live)

    # ------------------------------------------------------------------------------------------------------ each step

    def before_schedule(self, scheduler: Any) -> list[Limit]:
        """Take in decisions, order the queues, leave sequences out, place probes.

        Returns the scheduler's own limits that are to be lower in this step.
        """
        self._began = time.perf_counter()
        self.take_arrived(scheduler)
        self._take_inbox()
        self.tracker.record.state = self.lease.say_state()
        if self._adoption is not None:
            self._adopt_some(scheduler, self._adoption)
        if self.frozen:
            return []
        if scheduler.num_spec_tokens:
            self.masks.drop_unknown_drafts()
        plan = self.directives.active_plan()
        if plan is not None:
            self.queues.obey(scheduler, plan)
        probing = self.probing
        placed = probing.place(scheduler, self.observe_entropy) if self.directives.probes else []
        if probing.held:
            probing.hold(scheduler, self.link.inbox.answered_step)
        reserved, hold = probing.reserved(scheduler), self.directives.hold_admission
        return self.queues.limits(scheduler, plan, hold, reserved, placed)

    def _take_inbox(self, limit: float = STEP_DECISIONS) -> None:
        """Take in what was decided, up to the message in which so many decisions are reached."""
        inbox, taken = self.link.inbox, 0
        # A decision from before the lease was over is not taken in any more; the mark of a new stream is.
        while inbox.messages and taken < limit and (not self._lapsed or inbox.new_stream_waits()):
            try:
                message, size = inbox.take()
            except IndexError:
                # A new stream has cleared it this moment.
                return
            taken += size
            if message is None:
                self.directives.new_stream()
                self.probing.new_stream()
            else:
                self.directives.accept(message)
                inbox.answered_step = max(inbox.answered_step, message.step)
                if self.frozen:
                    self.directives.freeze()

    def _take_all(self, scheduler: Any) -> None:
        self.take_arrived(scheduler)
        self._take_inbox(math.inf)

    def after_schedule(self, scheduler: Any, output: Any) -> None:
        """Tell the workers what to measure, and under asynchronous scheduling settle tokens before a force."""
        if self.observe_entropy and output.num_scheduled_tokens and self.tracker.markers.known:
            setattr(output, REQUEST, self._asking.request(self.tracker.markers.end[0], self.tracker.answering_ids))
        scheduled, drafted = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # Tokens beyond one per sequence and its drafts are prompt. A diffusion model's step is drafts alone.
        prefill = output.total_num_scheduled_tokens - len(scheduled)
        self._prefills.append(prefill - sum(min(len(d), scheduled[r] - 1) for r, d in drafted.items()))
        # vLLM waits for the step before this one, and breaks where there is none.
        due = self.tracker.due
        if due and not (self.frozen or self._settled()) and self.masks.waits_for_tokens(scheduled):
            output.pending_structured_output_tokens = True
        if self.probing.placed:
            self.probing.scheduled(scheduler, scheduled)

    def _settled(self) -> bool:
        """Whether all tokens before the step that was scheduled last are accounted."""
        return not self.is_async or len(self._prefills) <= 1

    @hook(agent_pb2.FAULT_CAUSE_BITMASK)
    def bitmask(self, scheduler: Any, output: Any, base: Any) -> Any:
        """The step's token masks, with the ends of thinking that are forced in it.

        output: the SchedulerOutput of the step. base: what vLLM itself masks, or None.
        """
        self.link.outbox.wake()
        self._take_inbox()
        if self.frozen or not (self.tracker.due or output.scheduled_spec_decode_tokens):
            return base
        if not (self._settled() or output.pending_structured_output_tokens):
            return base
        return self.masks.with_ends(output, base)

    @hook(agent_pb2.FAULT_CAUSE_AFTER_UPDATE)
    def after_update(self, scheduler: Any, runner_output: Any, outputs: dict[int, Any]) -> None:
        """Account the step's tokens, settle decisions, send the record."""
        told = getattr(runner_output, RESULT, None)
        if isinstance(told, str):
            self._hear_worker(told)
            told = None
        if (backend := getattr(runner_output, BACKEND, None)) is not None:
            self._hear_backend(backend)
        self.accounts.take(runner_output, outputs, told, bool(scheduler.finished_req_ids))
        if not (is_live := bool(self.tracker.by_id) or self._adoption is not None):
            self.mailbox.fall_idle(partial(self._take_all, scheduler))
            self.directives.active_plan()
        record = self.tracker.record
        record.told = told
        record.step, record.kv_used = scheduler.current_step, scheduler.kv_cache_manager.usage
        record.running, record.waiting = len(scheduler.running), len(scheduler.waiting)
        record.prefill_tokens = self._prefills.popleft() if self._prefills else 0
        record.step_time_ms = self._step_time_ms()
        if not runner_output.req_ids and self._says_nothing(record, is_live):
            return
        record.counters = self._counters()
        sent = self.tracker.take_record()
        if self.probing.held:
            self.probing.sent(sent)
        self.link.outbox.send(sent, self.tracker.snapshot)
        if not is_live:
            self.link.outbox.wake()

    def _says_nothing(self, record: StepRecord, is_live: bool) -> bool:
        """Whether the record of a step in which nothing was computed need not be sent. vLLM makes some hundred of them
        a second while finished requests' KV waits to be read by another engine, or KV to arrive from one."""
        said = (record.state, record.kv_used, record.running, record.waiting)
        now = time.monotonic()
        known = said == self._said and record.is_empty and self.link.outbox.follows
        if known and not (is_live and now - self._sent >= EMPTY_REPORT_S):
            return True
        self._sent, self._said = now, said
        return False

    def _hear_worker(self, reason: str) -> None:
        """The worker says why it measures nothing, or that it can again: the next Hello promises what it can."""
        if bool(reason) == bool(self.no_entropy):
            return
        self.no_entropy = reason
        if reason:
            logger.warning("meridian: no entropy from this engine: %s", reason)
            self.facts.on_fault(cause_name(agent_pb2.FAULT_CAUSE_OBSERVER), reason)
        else:
            logger.info("meridian: entropy from this engine again")
        self.link.restart()

    def _hear_backend(self, backend: tuple[str, str]) -> None:
        """The worker says what measures there: the next Hello tells it, at once where the last one had it wrong."""
        known, self.backend = self.backend, backend
        if backend[0] != known[0]:
            logger.warning("meridian: entropy is measured with %s, not with %s: %s", backend[0], known[0], backend[1])
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

    def _counters(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("preempted_think", self.preempted_think),
            ("output_critical", self.output_critical),
            ("blocks_reclaimed", self.blocks.reclaimed),
            ("think_skips", self.queues.think_skips),
            ("reports_dropped", self.link.outbox.reports_dropped),
            ("probe_tokens", self.probing.tokens),
            ("agent_seconds", self.agent_seconds),
            ("scheduler_seconds", self.scheduler_seconds),
            ("round_trip_ms", self.link.outbox.round_trip_ms),
        )
