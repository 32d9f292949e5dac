"""Does the agent's work at each hook of the scheduler, in a fixed order.

Connects vLLM's scheduler (passed in, never imported) with the parts that each own one thing, such as the tracker, the
queue order and the token masks. Every method runs on the engine-core thread and under the guard; no method waits or
does I/O.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from meridian.v1 import agent_pb2

from meridian_agent.core import request_info
from meridian_agent.core.catch_up import CatchUp, state_of_new
from meridian_agent.core.directives import CAPS, MEMORY, ORDER, RULES, STEP_DECISIONS, Directives
from meridian_agent.core.guard import hook
from meridian_agent.core.phases import Markers, Phase, PhaseState
from meridian_agent.core.step_record import Outcome
from meridian_agent.core.step_signals import REQUEST, SPENT, WorkerRequest, WorkerRequestEncoder
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.answer_only_stops import AnswerOnlyStops
from meridian_agent.engine.calm_steps import CalmSteps
from meridian_agent.engine.capabilities import Measuring
from meridian_agent.engine.hand_over import HandOverRunner
from meridian_agent.engine.kept_thinking import KeptThinking
from meridian_agent.engine.kv_blocks import KvBlocks, reuse_answers_last
from meridian_agent.engine.preemption import Preemption
from meridian_agent.engine.premature_stops import PrematureStops
from meridian_agent.engine.probe_runner import ProbeRunner
from meridian_agent.engine.queue_order import Limit, QueueOrder
from meridian_agent.engine.step_accounting import StepAccounting, gauges_of
from meridian_agent.engine.token_masks import TokenMasks
from meridian_agent.vllm_adapter import front_end_aborts, request_api, scheduler_api
from meridian_agent.vllm_adapter.phase_numbers import PhaseNumberSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meridian_agent.engine.capabilities import EngineFacts
    from meridian_agent.link.control_stream import ControlStream
    from meridian_agent.vllm_types import (
        EngineCoreOutputs,
        GrammarOutput,
        ModelRunnerOutput,
        PreemptingScheduler,
        Request,
        Scheduler,
        SchedulerOutput,
    )

logger = logging.getLogger("vllm.meridian")

T = TypeVar("T")

# Number of newest thinking tokens that are read to find where in a sentence a request is. Any word in them makes the
# tokens before it irrelevant.
SENTENCE_TOKENS = 512
# Seconds between two snapshots while live requests are read again, because each snapshot has all live requests.
RESYNC_S = 1.0
# Steps of a pipeline without a measurement after which the sender hears that nothing is measured: more than it has
# stages.
UNASKED_STEPS = 16


def event(cause: agent_pb2.FaultCause.ValueType) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return `hook`'s decorator for a method of Agent that reads or changes a request's state outside of the four hooks
    of each step. Before the method runs, the postponed steps are processed. The other hooks take no part in that: they
    change no such state, or act only while stopped requests wait to go on, when no step is postponed."""

    def marked(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def after_postponed(agent: Agent, *args: Any) -> T:
            agent.accounts.take_postponed()
            return method(agent, *args)

        return hook(cause)(after_postponed)

    return marked


class Agent:
    """The agent of one engine; only the engine-core thread uses it."""

    def __init__(self, scheduler: Scheduler, markers: Markers, link: ControlStream, facts: EngineFacts) -> None:
        self.link, self.lease, self.mailbox, self.facts = link, link.lease, link.mailbox, facts
        self._outbox = link.outbox
        self.is_async = scheduler_api.is_async(scheduler)
        self.block_size = scheduler.block_size
        self.tracker = tracker = Tracker(markers, 1 + scheduler.num_spec_tokens)
        tracker.sentences, tracker.steps_ahead = facts.sentences, self.is_async
        # Draft tokens may follow a step's first token; under asynchronous scheduling the previous step counts, too.
        tracker.lookahead = scheduler.num_spec_tokens + (1 + scheduler.num_spec_tokens if self.is_async else 0)
        self.directives = directives = Directives(tracker)
        self.queues = QueueOrder(tracker, scheduler)
        self.probing = ProbeRunner(tracker, directives, self.block_size, facts.shares_blocks, facts.no_probes)
        directives.hand_overs.refusal = facts.no_hand_over
        directives.preempts.refusal = facts.no_preempt
        self.preemption = Preemption(tracker, directives.preempts, self.queues, link.lease.clock, self.probing.reserved)
        able_to_answer = not facts.no_answer_handed_over
        self.hand_over = HandOverRunner(tracker, directives.hand_overs, facts.hand_over, able_to_answer)
        self.masks = TokenMasks(tracker, directives, *scheduler_api.mask_facts(scheduler))
        self.stops = PrematureStops(tracker, directives, self.masks, facts.no_premature_stops)
        self.answer_only = AnswerOnlyStops(tracker)
        self.blocks = KvBlocks(directives, facts.later_turns, KeptThinking(link.lease.clock))
        self.calm = CalmSteps(tracker, directives, self.probing, self.queues, link)
        self.accounts = StepAccounting(
            tracker,
            directives,
            self.probing,
            self.hand_over,
            phase_numbers=PhaseNumberSender(tracker),
            calm=self.calm,
            outbox=link.outbox,
            lease=link.lease,
            is_async=self.is_async,
        )
        link.outbox.step_tokens = 1 + scheduler.num_spec_tokens
        link.outbox.counters, link.outbox.gauges = self._counters, partial(gauges_of, scheduler, self.probing)
        self.observe_entropy = False
        self._asking = WorkerRequestEncoder()
        # The newest step's request to the workers, None for none; and whether it stays the same in calm steps.
        self._asked: WorkerRequest | None = None
        self._asks_same = False
        # Number of the newest steps in a row for which the workers were asked for nothing, without unchanged ones.
        self._unasked = UNASKED_STEPS
        # Cap of new requests; their answer reserves, as in Tracker.limit_new; and the parts of the directives whose
        # lease has run out.
        self.default_cap: int | None = None
        self.default_reserves, self._lapsed = (0, 0), 0
        # Globs of the SLO classes that clients may choose although a gateway names one.
        self._client_slo_classes: tuple[str, ...] = ()
        self.frozen = False
        # A freeze was confirmed while the engine made no step, and no step has looked at it yet.
        self._freeze_confirmed = False
        # The settings and markers that this agent obeys, as the lease held them.
        self._obeyed: tuple[agent_pb2.Settings, Markers] | None = None
        self.preempted_think = self.output_critical = 0
        # Seconds spent in hooks of this and earlier agents, in the worker, and in vLLM's own schedule and
        # update_from_output.
        self.hook_seconds = self.worker_seconds = self.scheduler_seconds = 0.0
        # Whether the coming step is to compute KV again that a connector has failed to load.
        self._computes_again = False
        self._adoption = CatchUp()  # Requests from before this agent, or with prompts that take several steps to read.
        # Whether requests have been read again since the newest snapshot; and the time of that snapshot.
        self._reread, self._resynced_s = False, -math.inf
        self.measuring = Measuring(facts.expected_backend, facts.on_fault, link.restart)

    def put_in_force(self, settings: agent_pb2.Settings, markers: Markers) -> None:
        """Obey these settings from now on."""
        was_known = self.tracker.markers.known
        self.tracker.use(markers, settings.supports_think_disable, settings.merge_openings, settings.merge_answers)
        self.default_cap = settings.max_think_tokens if settings.HasField("max_think_tokens") else None
        self._client_slo_classes = tuple(settings.client_slo_classes)
        self.answer_only.requests = settings.answer_only_stops
        self.blocks.kept.set_seconds(settings.keep_thinking_s)
        reserve = settings.answer_reserve_tokens
        self.default_reserves = reserve, settings.chat_answer_reserve_tokens or reserve
        self.tracker.limit_new(self.default_cap, self.default_reserves, bool(self._lapsed & CAPS))
        self.observe_entropy = settings.observe_entropy
        self._asking.flags = self.facts.sentences.may_end if settings.only_sentence_ends else b""
        share = settings.measured_share if settings.HasField("measured_share") else 1.0
        share = share if settings.observe_entropy else 0.0
        unmeasured = self.tracker.measure(share, settings.measured_cluster_requests)
        self._adoption.extend(live.ref for live in unmeasured)
        self.tracker.loops.obey(settings.find_loops, settings.merge_loops)
        self.facts.limits.obey(settings)
        if markers.known != was_known:
            self._read_anew()

    def _read_anew(self) -> None:
        """Read the live requests again, over the coming steps, because the markers have become known or unknown."""
        if not self.tracker.markers.known:
            self.directives.lose_markers()
            for live in self.tracker.by_id.values():
                self.tracker.reread(live, replace(live.state, phase=Phase.UNKNOWN))
        elif self.tracker.by_id:
            self._adoption.extend(live.ref for live in self.tracker.by_id.values())
        self.link.outbox.resync()

    def take_arrived(self, scheduler: Scheduler) -> None:
        """Put arrived settings and freezes in force and confirm them; drop decisions whose lease has run out."""
        if (held := self.lease.held) is not None and held is not self._obeyed:
            # Settings that were confirmed while the engine was idle come before settings that have arrived since.
            self.put_in_force(*held)
        # The lease is not read again, because the link's thread may put newer settings into it meanwhile.
        self._obeyed = held
        arrived = self.mailbox.take() if self.mailbox.arrived else ()
        for one in arrived:
            if one.settings is not None:
                self.put_in_force(one.settings, one.markers)
        lapsed, frozen = self.link.lapsed(), self.lease.frozen()
        was_frozen = self._freeze_confirmed or any(one.status.freeze_status.frozen for one in arrived)
        self._freeze_confirmed = False
        if was_frozen and not (frozen or self.frozen):
            # A freeze began and ended between two steps, and the control plane has discarded its decisions.
            self._suspend(scheduler, lapsed, True)
        if arrived or lapsed != self._lapsed or frozen != self.frozen:
            self._suspend(scheduler, lapsed, frozen)
        for one in arrived:
            self.mailbox.confirm(one)
            if one.settings is not None:
                self._obeyed = self.lease.held

    def _suspend(self, scheduler: Scheduler, lapsed: int, frozen: bool) -> None:
        """Drop the decisions that a freeze or the end of a lease puts out of force.

        A freeze puts a request's own cap out of force, too, so that the agent can have no part in a problem.
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
        self.facts.limits.freeze(frozen)
        self.tracker.limit_new(self.default_cap, self.default_reserves, bool(lapsed & CAPS))

    # ------------------------------------------------------------------------------------------------ request events

    @hook(agent_pb2.FAULT_CAUSE_OPENED)
    def admit(self, request: Request) -> None:
        """Look at a request before vLLM accepts it."""
        self.hand_over.admit(request, self.block_size)

    @event(agent_pb2.FAULT_CAUSE_OPENED)
    def opened(self, scheduler: Scheduler, added: Request) -> None:
        """Track a request that was added to the engine, if it generates text."""
        self.calm.end()
        # A streaming session adds all its inputs under one id, and vLLM keeps only the session's request, if any.
        request = scheduler.requests.get(added.request_id)
        if request is None or request.sampling_params is None:
            return
        if request.request_id in self.tracker.by_id or request.request_id in self.probing.placed:
            return
        if self.lease.idle:
            # No step is under way, so settings that have arrived apply to this request already.
            self.mailbox.begin()
            self.take_arrived(scheduler)
        info = self._info_of(request, scheduler)
        self.hand_over.opened(info)
        self.facts.later_turns.arrived(info, request.block_hashes)
        if not (self.frozen or self._lapsed & MEMORY):
            self.blocks.kept.arrived(scheduler, request)
        self.answer_only.opened(scheduler, request)
        state = state_of_new(request, self.tracker.markers, self.tracker.supports_think_disable)
        if state is not None and not self.tracker.is_full:
            self.tracker.enter(info, state, scheduler.current_step, request, queued_s=self.lease.clock())
            return
        self._adoption.extend([request])

    def _info_of(self, request: Request, scheduler: Scheduler) -> request_info.RequestInfo:
        facts, classes = self.facts, self._client_slo_classes
        info = request_info.info_of(
            request, facts.model, self.tracker.markers, scheduler, classes, by_gateway=facts.by_gateway
        )
        if self._lets_stops_sleep and self.answer_only.sleep(request, info):
            return replace(info, sleeping_stops=True)
        return info

    @property
    def _lets_stops_sleep(self) -> bool:
        """Whether the settings on stops that sleep are in force."""
        return not (self.frozen or self._lapsed & CAPS)

    def adopt(self, requests: Iterable[Request], steps_under_way: int) -> None:
        """Begin to track the requests of an engine that is already running, over the coming steps."""
        self._adoption = CatchUp(r for r in requests if not request_info.is_probe(r.request_id))
        self.accounts.prefills.extend([0] * steps_under_way)

    def _adopt_some(self, scheduler: Scheduler) -> None:
        """Do the reading of one step. While the engine has more live requests than a control plane takes in, the newest
        ones wait here; hardly one of them runs before it has a slot."""
        if self.tracker.is_full:
            return
        without_slot: list[Request] = []
        for request, state in self._adoption.some(self.tracker.markers, self.tracker.supports_think_disable):
            live = self.tracker.by_id.get(request.request_id)
            if live is not None and live.phase is Phase.UNKNOWN and self.tracker.markers.known:
                before = live.think_tokens
                # Nobody knew yet which of its stop tokens end the model's turns.
                self.answer_only.opened(scheduler, request)
                self.tracker.reread(live, state, self._sentence(request, state))
                self._outbox.unreported.reread(live, live.think_tokens - before)
                self._reread = True
            elif live is not None:
                if self.tracker.measures_all and not live.measured:
                    self.tracker.begin_to_measure(live, self._sentence(request, state))
            elif self.tracker.is_full:
                without_slot.append(request)
            elif request.sampling_params is not None and not request_api.waits_for_input(request):
                info = self._info_of(request, scheduler)
                self.answer_only.opened(scheduler, request)
                waits = request_api.waits_preempted(request)
                sentence = self._sentence(request, state)
                self.tracker.enter(info, state, scheduler.current_step, request, waits, sentence=sentence)
                self.tracker.reorder = True
        self._adoption.put_back(without_slot)
        now_s = self.accounts.began_s
        if self._reread and (now_s - self._resynced_s >= RESYNC_S or not self._adoption):
            self._reread, self._resynced_s = False, now_s
            self.link.outbox.resync()

    def _sentence(self, request: Request, state: PhaseState) -> int:
        """Return the sentence table's state after the thinking of a request that the agent has not seen from its first
        token on."""
        if state.phase is not Phase.THINK or not state.text_run:
            return 0
        return self.tracker.sentences.state_of(request.output_token_ids[-min(state.text_run, SENTENCE_TOKENS) :])

    @event(agent_pb2.FAULT_CAUSE_FINISHED)
    def stop_sleeps(self, request_id: str) -> bool:
        """Return whether the newest token of a request, one of its stop tokens, does not end the request."""
        return self._lets_stops_sleep and self.answer_only.token_sleeps(request_id)

    @event(agent_pb2.FAULT_CAUSE_FINISHED)
    def stopped(self, scheduler: Scheduler, request: Request) -> bool:
        """Return whether a request that vLLM has just stopped is to go on, because it has stopped while it thinks."""
        if self.frozen or not self.stops.goes_on(scheduler, request):
            return False
        self.calm.end()
        return True

    @hook(agent_pb2.FAULT_CAUSE_FINISHED)
    def unfinished(self, scheduler: Scheduler) -> int:
        """Return how many requests are to go on after a stop that are in none of vLLM's queues."""
        return self.stops.unfinished(scheduler)

    @hook(agent_pb2.FAULT_CAUSE_FINISHED)
    def finishing(self, scheduler: Scheduler, request_ids: Any) -> None:
        """Look at requests before vLLM ends them from outside. request_ids: what vLLM was asked to end."""
        if self.stops.waiting:
            self.stops.finishing(scheduler, request_ids)

    @event(agent_pb2.FAULT_CAUSE_FINISHED)
    def finished(self, requests: list[Any], request_ids: Any, status: Any) -> None:
        """Forget requests that vLLM has ended without a token of theirs, such as after a client's disconnect or an
        error. request_ids: what vLLM was asked to end. status: that of the ended requests."""
        causes, cause = front_end_aborts.causes(request_ids), request_api.cause_of(status)
        for request in requests:
            request_id = getattr(request, "request_id", request)
            self.answer_only.finished(request_id)
            if live := self.tracker.by_id.get(request_id):
                self.accounts.close(live, causes.get(request_id, cause))
            self.probing.ended(request_id)

    @event(agent_pb2.FAULT_CAUSE_FINISHED)
    def ended_between_steps(self, scheduler: Scheduler) -> None:
        """Publish the end of the last live request at once: in a program that calls vLLM's engine in its own process,
        no step follows until the next request comes."""
        if not (self.lease.idle or self.tracker.by_id or self._adoption):
            self.calm.end()
            self._fall_idle(scheduler)
            self._publish(scheduler)
            self._outbox.ring.wake()

    def _fall_idle(self, scheduler: Scheduler) -> None:
        """Let the link's thread answer messages, because no request is live any more. The newest record is to say the
        state of an idle engine, which waits for no answers, however late they were: no other follows."""
        self.mailbox.fall_idle(partial(self._take_all, scheduler))
        self.directives.active_plan()
        self.accounts.state = self.lease.say_state()

    @event(agent_pb2.FAULT_CAUSE_AFTER_UPDATE)
    def rest(self, scheduler: Scheduler) -> None:
        """Publish what no step has published, because the engine makes none although requests are live: vLLM is paused,
        or a program does not call its engine. Called on the link's thread, while no step can begin.

        Nothing of vLLM's scheduler is changed here. What settings and freezes change in it follows at the beginning of
        the next step, which looks at them before it does anything else.
        """
        if self.lease.idle:
            return
        if arrived := self.mailbox.take():
            self._freeze_confirmed |= any(one.status.freeze_status.frozen for one in arrived)
            for one in arrived:
                self.mailbox.confirm(one)
        self._take_inbox(math.inf)
        self.directives.active_plan()
        # The next step takes a full look.
        self.calm.end()
        self.lease.call_for_attention()
        begun = self.tracker.begun
        if self.lease.connected and not (self._outbox.follows and (begun is None or begun.is_empty)):
            self.accounts.state = self.lease.say_state()
            self._publish(scheduler)

    def _publish(self, scheduler: Scheduler) -> None:
        """Queue the record of what has happened since the newest step."""
        self.accounts.complete_between_steps(scheduler)
        self.accounts.send()

    @hook(agent_pb2.FAULT_CAUSE_PREEMPTING)
    def resetting(self, scheduler: Scheduler) -> None:
        """Let requests that have stopped and are to go on give their KV blocks back, and probes too, because vLLM is
        about to reset its prefix cache, which fails while a request that stock vLLM would not have has blocks."""
        if self.stops.waiting:
            self.stops.resume(scheduler, at_once=True)
        if self.probing.placed:
            self.probing.withdraw_all(scheduler, Outcome.REFUSED, "vLLM resets its prefix cache")

    @hook(agent_pb2.FAULT_CAUSE_PREEMPTING)
    def preempting(self, request: Request) -> None:
        """Give a request its own priority back, because it is about to be preempted."""
        self.queues.preempting(request)

    @event(agent_pb2.FAULT_CAUSE_PREEMPTED)
    def preempted(self, scheduler: Scheduler, request: Request, inside: bool) -> None:
        """Note a preemption. inside: whether a step preempts, for want of room; between steps vLLM preempts all
        requests to reset its prefix cache, which loses the blocks in any case."""
        self.calm.end()
        live = self.tracker.by_id.get(request.request_id)
        if live is None:
            return
        self.tracker.preempt(live)
        if request_api.loses_tokens(request):
            live.expected = {}
        if not inside:
            return
        if live.phase is Phase.OUTPUT:
            self.output_critical += 1
            logger.warning("meridian: an answering request was preempted (%d so far)", self.output_critical)
        else:
            # A request that goes on after a stop is not preempted because memory is short.
            self.preempted_think += request.request_id not in self.stops.waiting
            if not self.frozen:
                reuse_answers_last(scheduler, self.tracker.preempted)

    @event(agent_pb2.FAULT_CAUSE_AFTER_UPDATE)
    def computes_again(self) -> None:
        """Leave the coming step to vLLM, because a KV connector has failed to load blocks. Of the requests that share
        such a block the first one in vLLM's order computes it again, and the others may not run before that."""
        self.calm.end()
        self._computes_again = True

    @event(agent_pb2.FAULT_CAUSE_FREEING)
    def freeing(self, scheduler: Scheduler, request: Request) -> None:
        """Unhash or note the KV blocks of a request before they go back to the pool."""
        if request.request_id in self.probing.placed:
            self.blocks.evict(scheduler, request, self.probing.placed[request.request_id].shared_tokens + 1)
        elif (live := self.tracker.freeing(request.request_id)) is not None:
            self.blocks.freeing(scheduler, request, live, self.probing.under_way(live))
        elif request.is_finished():
            # Its KV connector has kept its blocks past its end, or the agent had not read it yet.
            self.blocks.kept.ended(scheduler, request)

    # ------------------------------------------------------------------------------------------------------ each step

    @hook(agent_pb2.FAULT_CAUSE_BEFORE_SCHEDULE)
    def before_schedule(self, scheduler: Scheduler) -> list[Limit]:
        """Take in decisions, order the queues and place probes; return the scheduler's limits to lower in this step."""
        calm = self.calm
        self.accounts.began_s = began_s = self.lease.clock()
        if self.lease.attention:
            self.accounts.take_postponed()
            if calm.only_decisions_wait(began_s):
                self._take_inbox()
                calm.find_due(scheduler)
        if calm.hold(began_s) and calm.go_on(scheduler):
            calm.calm_steps += 1
            return calm.limits
        self.accounts.take_postponed()
        self._asks_same = False
        if calm.begin_full_look(began_s) or self.frozen:
            self.take_arrived(scheduler)
            self._take_inbox()
            self.accounts.state = self.lease.say_state()
        self.hand_over.obey()
        if self._adoption:
            self._adopt_some(scheduler)
        if scheduler.num_spec_tokens and not self.frozen:
            self.masks.drop_unknown_drafts()
        if self.frozen or self._computes_again:
            self._computes_again = False
            if self.frozen and not self._adoption:
                calm.end_full_look(scheduler, None, [])
            return []
        plan = self.directives.active_plan()
        if plan is not None:
            self.queues.obey(scheduler, plan)
        taken = (0, 0)
        if self.directives.preempts.claims:
            taken = self.preemption.obey(cast("PreemptingScheduler", scheduler))
        probing = self.probing
        placed = probing.place(scheduler, self.observe_entropy, taken) if self.directives.probes else []
        if probing.held:
            probing.hold(scheduler, self.link.inbox.answered_step)
        reserved, hold = probing.reserved(scheduler), self.directives.hold_admission
        limits = self.queues.limits(scheduler, plan, hold, reserved, placed)
        limits += [Limit(*limit) for limit in self.facts.limits.uncut(scheduler)]
        if not self._adoption:
            calm.end_full_look(scheduler, plan, limits)
        return limits

    def _take_inbox(self, limit: float = STEP_DECISIONS) -> None:
        """Apply the decisions in the inbox, up to the message with which at least `limit` decisions are reached."""
        inbox, decisions = self.link.inbox, 0
        # After the end of a lease decisions stay in the inbox; only the mark of a new stream is taken out.
        while inbox.messages and decisions < limit and (not self._lapsed or inbox.new_stream_waits()):
            try:
                message, size = inbox.take()
            except IndexError:
                # The link's thread has just cleared the inbox for a new stream.
                return
            decisions += size
            if message is None:
                self.directives.new_stream()
                self.probing.new_stream()
            else:
                self.directives.accept(message)
                if inbox.is_over(message):
                    inbox.answered_step = max(inbox.answered_step, message.step)
                if self.frozen:
                    self.directives.freeze()
            self.calm.took(message)
        if inbox.messages:
            self.lease.call_for_attention()

    def _take_all(self, scheduler: Scheduler) -> None:
        self.take_arrived(scheduler)
        self._take_inbox(math.inf)

    @hook(agent_pb2.FAULT_CAUSE_AFTER_SCHEDULE)
    def after_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Tell the workers what to measure; under asynchronous scheduling, let vLLM wait for tokens that a forced end
        depends on."""
        scheduled, tracker, run = output.num_scheduled_tokens, self.tracker, self.tracker.run
        requests = len(scheduled)
        if self.probing.rows or self.probing.computed:
            self.probing.take_rows(scheduler, output)
        if self._asks_same and self.calm.number == run.number and requests == run.members:
            # Since the newest full look nothing has changed for a live request, and each gets more text.
            if self._asked is not None:
                setattr(output, REQUEST, self._asked)
            if output.scheduled_spec_decode_tokens or self.probing.computed:
                self.accounts.count_prompts(output)
            else:
                self.accounts.prefills.append(output.total_num_scheduled_tokens - requests)
            return
        self.accounts.take_postponed()
        self._asked = None
        if self.observe_entropy and tracker.by_id and tracker.markers.known and not self.frozen:
            end, probes = tracker.markers.ends[0][0], self.probing.placed
            self._asked = self._asking.request(end, scheduled.keys(), tracker.unmeasured_ids, probes)
            if self._asked is not None:
                setattr(output, REQUEST, self._asked)
        self._unasked = 0 if self._asked is not None else self._unasked + 1
        # A step without some of the running requests may be one of a pipeline, whose batches take turns.
        is_part = requests < len(scheduler.running) and self._unasked < UNASKED_STEPS
        self._tell_sender(measures=is_part or not self._unasked)
        self._asks_same = self._asked is None or self._asked[2] is None
        self.accounts.scheduled(output)
        # With this flag vLLM waits for the previous step, and fails if there is none.
        due = tracker.due
        if due and not (self.frozen or self.accounts.settled) and self.masks.waits_for_tokens(output):
            output.pending_structured_output_tokens = True
        if self.probing.placed:
            self.probing.scheduled(scheduler, scheduled)
        if self.hand_over.computed:
            self.hand_over.scheduled(scheduled, scheduler)
        if self.preemption.waiting:
            self.preemption.scheduled(output)
        self.calm.scheduled(len(scheduled))

    def _tell_sender(self, measures: bool) -> None:
        """Tell the sender whether the workers measure something in these steps. If they did not before, the records
        that wait may wait for more steps than later ones will, so the step is sent at once."""
        if measures and not self._outbox.measures and self.lease.merge_unmeasured:
            self.tracker.record.urgent = True
        self._outbox.measures = measures

    @hook(agent_pb2.FAULT_CAUSE_BITMASK)
    def bitmask(
        self, scheduler: Scheduler, output: SchedulerOutput, base: GrammarOutput | None
    ) -> GrammarOutput | None:
        """Return the step's token masks, with the forced ends of this step.

        output: the SchedulerOutput of the step. base: vLLM's own masks, or None.
        """
        self._outbox.ring.wake()
        drafted = output.scheduled_spec_decode_tokens
        if not self.lease.attention and self.calm.number == self.tracker.run.number and not drafted:
            return base
        self.accounts.take_postponed()
        if self.lease.attention:
            self._take_inbox()
            # The step's token may be the end of thinking, with which vLLM stops the requests that are armed.
            self.hand_over.obey()
        if self.frozen or not (self.tracker.due or drafted):
            return base
        settled = self.accounts.settled or output.pending_structured_output_tokens
        return self.masks.with_ends(output, base, settled=settled)

    @hook(agent_pb2.FAULT_CAUSE_AFTER_UPDATE)
    def after_update(
        self, scheduler: Scheduler, runner_output: ModelRunnerOutput, outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Process the step's tokens, report outcomes and queue the step's record."""
        self.worker_seconds = getattr(runner_output, SPENT, self.worker_seconds)
        accounts = self.accounts
        if accounts.postpone(scheduler, runner_output, outputs):
            return
        accounts.take_postponed()
        if self.probing.computed and self.probing.collect_rows(runner_output):
            self.calm.end()
        stops = self.stops
        if stops.waiting:
            stops.take_out(scheduler, outputs.values())
        if self.answer_only.with_strings and self._lets_stops_sleep:
            self.answer_only.note_strings(outputs.values())
        if not stops.waiting and accounts.take_text(scheduler, runner_output, outputs):
            if not self.answer_only.with_strings:
                accounts.make_room()
            return
        signals = self.measuring.hear(runner_output)
        if (rows_possible := self.measuring.probe_rows and not self.facts.no_probe_rows) != self.probing.rows_possible:
            self.probing.rows_possible = rows_possible
            self.calm.end()
        self._adoption.extend(accounts.take(runner_output, outputs, signals, scheduler.finished_req_ids))
        if stops.waiting:
            stops.resume(scheduler)
        # A pooling model samples nothing. A step whose requests have ended meanwhile was computed all the same.
        computes_text = bool(runner_output.sampled_token_ids)
        if not (is_live := bool(self.tracker.by_id or self._adoption)):
            self._fall_idle(scheduler)
        record = accounts.complete(scheduler, signals)
        if not computes_text and self.link.outbox.says_nothing_new(record, is_live):
            return
        accounts.send()
        if not is_live:
            self.link.outbox.ring.wake()

    def follow(self, before: Agent) -> None:
        """Go on where the agent was that a fault has ended. The worker is still measuring for it, the link knows by
        their numbers which reports are answered, and COUNTERS are those since the engine's start."""
        self.measuring, self.tracker.newest = before.measuring, before.tracker.newest
        for name in ("preempted_think", "output_critical", "hook_seconds", "worker_seconds", "scheduler_seconds"):
            setattr(self, name, getattr(before, name))
        self.blocks.reclaimed, self.blocks.kept.given_up = before.blocks.reclaimed, before.blocks.kept.given_up
        self.queues.think_skips, self.probing.tokens = before.queues.think_skips, before.probing.tokens
        self.calm.calm_steps, self.calm.full_steps = before.calm.calm_steps, before.calm.full_steps
        self.preemption.recomputed.total = before.preemption.recomputed.total

    def _counters(self) -> tuple[float, ...]:
        """Return the values of COUNTERS. Called on gRPC's thread."""
        # The engine's thread may change them meanwhile.
        worker_seconds, thread_seconds = self.worker_seconds, self.link.thread_seconds.total()
        return (
            self.preempted_think,
            self.output_critical,
            self.blocks.reclaimed,
            self.queues.think_skips,
            self.link.outbox.reports_dropped,
            self.probing.tokens,
            self.hook_seconds + worker_seconds + thread_seconds,
            self.scheduler_seconds,
            self.link.outbox.round_trip_ms,
            self.calm.calm_steps,
            self.calm.full_steps,
            self.preemption.recomputed.total,
            self.blocks.kept.given_up,
            worker_seconds,
            thread_seconds,
        )
