"""Processes a step's outputs: hands tokens to the tracker, reports outcomes, closes requests that end, takes probes
out, and completes the step's record. Before that, when vLLM has scheduled the step, notes whose first step it is.

Most steps bring nearly all requests text and nothing else, one token each or with drafts several, and are counted as a
whole for these requests. If a step brings all of them nothing else, the link's thread makes its record, and the step
may wait to be processed together with the steps that follow. Runs on the engine-core thread.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from meridian.v1 import agent_pb2

from meridian_agent.core.guard import hook
from meridian_agent.core.step_record import Gauges, Outcome, StepRecord
from meridian_agent.core.step_signals import BACKEND, RESULT, StepSignals
from meridian_agent.vllm_adapter import front_end_aborts, request_api
from meridian_agent.vllm_adapter.phase_numbers import FIELD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from meridian_agent.core.directives import Directives
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_record import TextStep
    from meridian_agent.core.step_signals import SignalBytes
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.engine.calm_steps import CalmSteps
    from meridian_agent.engine.hand_over import HandOverRunner
    from meridian_agent.engine.probe_runner import ProbeRunner
    from meridian_agent.link.lease import Lease
    from meridian_agent.link.outbox import Outbox
    from meridian_agent.vllm_adapter.phase_numbers import PhaseNumberSender
    from meridian_agent.vllm_types import (
        EngineCoreOutput,
        EngineCoreOutputs,
        ModelRunnerOutput,
        Request,
        Scheduler,
        SchedulerOutput,
    )

logger = logging.getLogger("vllm.meridian")

# The engine counts as idle between two updates that are further apart than this many seconds.
MAX_STEP_S = 1.0
# More steps than vLLM ever has under way: one more than the pipeline has stages.
MAX_STEPS = 64
# Largest number of steps of text that are processed together, and of seconds that the first of them waits.
POSTPONED_STEPS, POSTPONED_S = 16, 0.05
# A step of text that the run has not counted: the engine's number of the step, the time of its end on the lease's
# clock, its milliseconds, its prompt tokens, the agent's state, the token of each row, and the signals of the rows.
PostponedStep: TypeAlias = tuple[int, float, float, int, int, list[int], "SignalBytes | None"]

# The meridian.v1.FinishReason for each finish reason of vLLM, and for a client that has gone.
FINISH_REASON = {
    "stop": agent_pb2.FINISH_REASON_STOP,
    "length": agent_pb2.FINISH_REASON_LENGTH,
    "abort": agent_pb2.FINISH_REASON_ABORT,
    front_end_aborts.GONE: agent_pb2.FINISH_REASON_ABORT,
    "error": agent_pb2.FINISH_REASON_ERROR,
    "repetition": agent_pb2.FINISH_REASON_REPETITION,
}


class StepAccounting:
    """The accounting of one engine's steps. lease: has the clock of the steps. is_async: the next step is scheduled
    before a step is processed."""

    def __init__(
        self,
        tracker: Tracker,
        directives: Directives,
        probing: ProbeRunner,
        hand_over: HandOverRunner,
        *,
        phase_numbers: PhaseNumberSender,
        calm: CalmSteps,
        outbox: Outbox,
        lease: Lease,
        is_async: bool,
    ) -> None:
        self._tracker, self._directives, self._probing, self._hand_over = tracker, directives, probing, hand_over
        self._phase_numbers, self._calm, self._outbox, self._is_async = phase_numbers, calm, outbox, is_async
        self._lease, self._run = lease, tracker.run
        outbox.unreported.live = tracker.by_id
        # The agent's state, a meridian.v1.AgentState; and the times, on the link's clock, at which the newest step's
        # schedule began and at which outputs were processed last.
        self.state = 0
        self.began_s = self._updated_s = 0.0
        # Streaming sessions that have answered an input in the step whose outputs vLLM is processing.
        self._answered_input: list[Request] = []
        # Prompt tokens of scheduled steps without output so far, oldest first.
        self.prefills: deque[int] = deque(maxlen=MAX_STEPS)
        # Steps of text that are not processed yet, oldest first; how many more may be postponed; and the times on the
        # lease's clock from which none may be, without and with statistics that get the phases' numbers.
        self.postponed = list[PostponedStep]()
        self._room, self._until_s, self._numbers_s = 0, 0.0, 0.0
        # The tokens that no such step brings.
        self._markers = tracker.markers.by_last.keys()
        # Whether the log has already told of an answer with an end marker.
        self._told_of_stray_end = self._told_of_refused_end = False

    def scheduled(self, output: SchedulerOutput) -> None:
        """Count the prompt tokens of a step that was just scheduled, and note the requests that it is the first step
        of. output: the SchedulerOutput of the step."""
        self.count_prompts(output)
        # With Model Runner V2, vLLM lists resumed requests here, too.
        for new in output.scheduled_new_reqs:
            live = self._tracker.by_id.get(new.req_id)
            if live is not None:
                self._tracker.join_step(live, self.began_s)

    def count_prompts(self, output: SchedulerOutput) -> None:
        """Count the prompt tokens of a step that was just scheduled. output: the SchedulerOutput of the step."""
        tokens, drafted = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # Tokens beyond one per sequence and its drafts are prompt tokens. A diffusion model's step has draft tokens
        # only.
        prefill = output.total_num_scheduled_tokens - len(tokens)
        if drafted:
            prefill -= sum([min(len(d), tokens[r] - 1) for r, d in drafted.items()])
        self.prefills.append(prefill - (self._probing.row_tokens() if self._probing.computed else 0))

    @property
    def settled(self) -> bool:
        """Whether the output of all steps before the one that was scheduled last has been processed."""
        return not self._is_async or len(self.prefills) <= 1

    def take_text(
        self, scheduler: Scheduler, runner_output: ModelRunnerOutput, outputs: dict[int, EngineCoreOutputs]
    ) -> bool:
        """Process a step that brought each request of the step before text and nothing else, and queue its record.
        Return False, and nothing has happened, for any other step. outputs: the outputs that vLLM is about to send to
        the clients."""
        request_ids, answered, stats = runner_output.req_ids, 0, None
        for group in outputs.values():
            answered += len(group.outputs)
            stats = group.scheduler_stats or stats
        signals = getattr(runner_output, RESULT, None)
        if scheduler.finished_req_ids or self._answered_input or self._probing.placed or answered != len(request_ids):
            return False
        if isinstance(signals, str) or getattr(runner_output, BACKEND, None) is not None:
            return False
        tracker = self._tracker
        tokens = self._run.count_all(request_ids, runner_output.sampled_token_ids, tracker.markers.by_last.keys())
        if tokens is None:
            return False
        if tracker.loops.enabled:
            tracker.look_for_loops()
        now_s = self._lease.clock()
        self._phase_numbers.add_to(stats, now_s)
        self._calm.find_due(scheduler)
        facts = self._step_time_ms(now_s), self._prefill_tokens(), self.state
        self._queue_text((scheduler.current_step, now_s, *facts, tokens, signals))
        return True

    def make_room(self) -> None:
        """Let the coming steps be postponed for as long as nobody would learn anything from them earlier: no report is
        due, no probe is under way, no cap is near, and no request has its turn to be searched for loops. Called after
        `take_text`."""
        tracker, run = self._tracker, self._run
        probes, begins = self._calm.due or self._probing.computed, tracker.begun is not None or tracker.before_answer
        if run.tokens_per_step > 1 or probes or begins:
            return
        room = min(POSTPONED_STEPS, self._outbox.ring.lacks() - 1, run.steps_to_cap())
        if tracker.loops.enabled and room > 0:
            room = tracker.loops.turns_of_none(room)
        self._room, self._until_s = room, self._updated_s + POSTPONED_S
        self._numbers_s = min(self._until_s, self._phase_numbers.due_s())
        self._markers = tracker.markers.by_last.keys()

    def postpone(
        self, scheduler: Scheduler, runner_output: ModelRunnerOutput, outputs: dict[int, EngineCoreOutputs]
    ) -> bool:
        """Note a step as in `take_text`, and process it later, together with other steps. Return False, and nothing has
        happened, for any other step, and if the step cannot wait.

        The processor's caches have lost what a step touches by the time of the next one, which costs more than the work
        itself. So nearly all is done here, without calls and with few objects.
        """
        if self._room <= 0 or scheduler.finished_req_ids:
            return False
        request_ids, sampled, answered, stats = runner_output.req_ids, runner_output.sampled_token_ids, 0, None
        for group in outputs.values():
            answered += len(group.outputs)
            stats = group.scheduler_stats or stats
        known = self._run.request_ids
        is_run = answered == len(known) == len(request_ids) == len(sampled) and (
            request_ids == known if request_ids[0] is known[0] else self._run.has_rows(request_ids)
        )
        if not is_run:
            return False
        signals, now_s = getattr(runner_output, RESULT, None), self._lease.clock()
        until_s = self._until_s if stats is None else self._numbers_s
        if now_s >= until_s or signals.__class__ is str or getattr(runner_output, BACKEND, None) is not None:
            return False
        try:
            tokens = [token for (token,) in sampled]
        except ValueError:
            return False
        awaited, newest = self._calm.awaited, self.postponed[-1][5] if self.postponed else None
        if not self._markers.isdisjoint(tokens) or (awaited and self._run.may_end(awaited, tokens, newest)):
            return False
        if stats is not None:
            setattr(stats, FIELD, [])
        self._room -= 1
        facts = self._step_time_ms(now_s), self._prefill_tokens(), self.state
        self.postponed.append((scheduler.current_step, now_s, *facts, tokens, signals))
        return True

    def take_postponed(self) -> None:
        """Process the postponed steps; the next step is not postponed."""
        self._room = 0
        if not self.postponed:
            return
        postponed, self.postponed = self.postponed, []
        # If the engine has stood still since, nothing has been unheard for that long.
        earliest_s = self._lease.clock() - POSTPONED_S
        for step in postponed:
            self._run.count_text(step[-2])
            if self._tracker.loops.enabled:
                self._tracker.look_for_loops()
            self._queue_text((step[0], max(step[1], earliest_s), *step[2:]))

    def _queue_text(self, facts: PostponedStep) -> None:
        """Queue the record of a step of text, which the run has counted."""
        tracker, run = self._tracker, self._run
        number, ended_s, step_time_ms, prefill_tokens, state, tokens, signals = facts
        lengths = run.lengths_for(signals) if run.tokens_per_step > 1 else ()
        counted = ended_s, step_time_ms, prefill_tokens, state
        columns = run.slots, run.phases, run.rows, tokens, run.sentences, run.text_states, signals, lengths
        if tracker.begun is None:
            step: TextStep = (tracker.number(number), *counted, *columns)
            if not self._outbox.send_text(step):
                self._outbox.send(StepRecord(*step), tracker.snapshot)
            return
        tracker.begun.tell((number, *counted, *columns))
        self.send()

    def _prefill_tokens(self) -> int:
        """Return the prompt tokens of the step whose outputs are being processed."""
        return self.prefills.popleft() if self.prefills else 0

    @hook(agent_pb2.FAULT_CAUSE_AFTER_UPDATE)
    def lose(self, steps: int) -> None:
        """Forget the oldest scheduled steps, whose output never comes."""
        for _ in range(steps):
            self._prefill_tokens()

    @hook(agent_pb2.FAULT_CAUSE_FINISHED)
    def answered_input(self, request: Request) -> None:
        """Note that a streaming session has answered an input. Each input counts as a request of its own, because it
        has its own thinking and answer, and because nobody waits while the session waits for its next input."""
        self.take_postponed()
        self._answered_input.append(request)

    def complete(self, scheduler: Scheduler, signals: SignalBytes | None) -> StepRecord:
        """Complete the record of a step, whose outputs are processed, and return it. signals: of the step's rows."""
        record = self._tracker.record
        if record.text:
            self._calm.find_due(scheduler)
        record.told, record.step = signals, scheduler.current_step
        record.gauges = gauges_of(scheduler, self._probing)
        record.prefill_tokens, record.state = self._prefill_tokens(), self.state
        record.step_time_ms = self._step_time_ms(self._lease.clock())
        return record

    def complete_between_steps(self, scheduler: Scheduler) -> None:
        """Complete the record of what has happened since the newest step. A step may be under way, whose own record
        follows."""
        record = self._tracker.record
        record.step, record.state, record.urgent = scheduler.current_step, self.state, True
        record.gauges = gauges_of(scheduler, self._probing)

    def send(self) -> None:
        """Queue the record, which is complete."""
        sent = self._tracker.take_record()
        if self._probing.held:
            self._probing.sent(sent)
        self._outbox.send(sent, self._tracker.snapshot)

    def _step_time_ms(self, now_s: float) -> float:
        """Return the milliseconds since the step's schedule began; under asynchronous scheduling since the last update,
        because the next step is scheduled before this update."""
        began_s = self._updated_s if self._is_async and now_s - self._updated_s < MAX_STEP_S else self.began_s
        self._updated_s = now_s
        return (now_s - began_s) * 1e3

    def take(
        self,
        runner_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        encoded: SignalBytes | None,
        finished: AbstractSet[str],
    ) -> list[Any]:
        """Process any other step, and return the streaming sessions whose next input has begun.

        runner_output: the ModelRunnerOutput. outputs: the outputs that vLLM is about to send to the clients. encoded:
        signals of the step's rows. finished: ids of requests and probes that may have ended in the step.
        """
        sessions, self._answered_input = self._answered_input, []
        if sessions:
            finished = finished | {session.request_id for session in sessions}
        own = self._without_probes(runner_output.req_ids)
        others, theirs = self._others(runner_output, outputs, own, finished)
        self._tracker.count(others, encoded)
        if others or len(own) < len(runner_output.req_ids):
            index, signals = runner_output.req_id_to_index, None
            # Only the signals of probes are read here, and only with draft tokens a request's row is not its place.
            if encoded is not None and (self._probing.placed or isinstance(encoded, tuple)):
                signals = StepSignals.decode(encoded)
            if self._probing.placed or self._probing.ended_early:
                for group in outputs.values():
                    self._probing.collect(group, signals, index)
            for out in theirs:
                if live := self._tracker.by_id.get(out.request_id):
                    self._one(live, out, index, signals)
        for live in self._tracker.due:
            # Where vLLM has dropped the step's tokens, as after a failure to load KV, the end is still to be forced.
            # Other steps, which have the request, may be under way, also beside a piece of its prompt.
            row = runner_output.req_id_to_index.get(live.info.request_id)
            if row is not None and len(runner_output.sampled_token_ids[row]):
                live.expected = {}
        self._tracker.looked_at(others)
        if self._tracker.loops.enabled and runner_output.req_ids:
            self._tracker.look_for_loops()
        stats = next(filter(None, (group.scheduler_stats for group in outputs.values())), None)
        if stats is not None:
            # Under asynchronous scheduling the next step is scheduled already, and its probes run.
            stats.num_running_reqs -= len(self._probing.placed)
        self._phase_numbers.add_to(stats, self._lease.clock())
        return [session for session in sessions if not request_api.waits_for_input(session)]

    def _without_probes(self, request_ids: list[str]) -> list[str]:
        """Return the ids without the probes at their end; vLLM puts a probe, as a new request, behind the requests that
        generate text."""
        placed, number = self._probing.placed, len(request_ids)
        while number and request_ids[number - 1] in placed:
            number -= 1
        return request_ids if number == len(request_ids) else request_ids[:number]

    def _others(
        self,
        runner_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        own: list[str],
        finished: AbstractSet[str],
    ) -> tuple[list[int], list[Any]]:
        """Return the rows of the requests that the step did not bring text and nothing else, which cannot be counted as
        a whole, and their outputs, those of probes included. own: the step's ids without its probes."""
        every = [out for group in outputs.values() for out in group.outputs]
        sampled, probes = runner_output.sampled_token_ids, len(runner_output.req_ids) - len(own)
        others, theirs = self._tracker.note(own, sampled[: len(own)] if probes else sampled, finished), list[Any]()
        if probes or others:
            # vLLM has no output for prompts in pieces and for requests that were aborted during the step.
            ids = {own[row] for row in others}.union(runner_output.req_ids[len(own) :])
            theirs = [out for out in every if out.request_id in ids]
        if len(every) - len(theirs) != len(own) - len(others):
            return self._tracker.note_nothing(own), every
        return others, theirs

    def _one(
        self, live: LiveRequest, out: EngineCoreOutput, index: dict[str, int], signals: StepSignals | None
    ) -> None:
        if out.new_token_ids:
            # Under asynchronous scheduling, the token of the step before the preemption may arrive after the
            # preemption, and end the request, which has computed nothing since then.
            if live.preempted and live.ref.num_computed_tokens and not request_api.waits_preempted(live.ref):
                self._tracker.resume(live)
            at = index.get(out.request_id, 0)
            first = at if signals is None else signals.row(at)
            wanted = {**live.expected} if live.expected else {}
            ended = self._tracker.feed(live, out.new_token_ids, first)
            if wanted and not ended and _is_other(wanted, out.new_token_ids) and not request_api.has_budget(live.ref):
                self._give_up_end(live)
            if live.state.stray_end and not self._told_of_stray_end:
                self._tell_of_stray_end(live)
            if ended or live.ending is not None or (live.cap is not None and live.cap.shadow):
                self._directives.after_tokens(live, ended)
            if live.info.handed_over_ref:
                self._hand_over.generated(live, out)
            if ended and out.finish_reason is None:
                self._directives.hand_overs.ended_thinking(live)
        if out.finish_reason is not None:
            self.close(live, str(out.finish_reason))

    def _give_up_end(self, live: LiveRequest) -> None:
        """Refuse a forced end because the engine has generated another token than the only one that the mask allowed.
        A logits processor of the engine's own forbids the token, so each further mask would cost one wrong token."""
        self._directives.refuse_end(live, "a logits processor forbids the end")
        if not self._told_of_refused_end:
            self._told_of_refused_end = True
            why = "a logits processor of this engine forbids the forced end of its thinking"
            hint = "it is not forced any more, and has one wrong token; further such requests are not logged"
            logger.warning("meridian: request %s: %s; %s", live.info.request_id, why, hint)

    def _tell_of_stray_end(self, live: LiveRequest) -> None:
        # Other end markers, such as the begin of a tool call, belong in an answer.
        if live.state.stray_end == self._tracker.markers.end:
            self._told_of_stray_end = True
            why = "neither its prompt nor the model had written a start marker, so all of it counted as an answer"
            hint = "if it thought, let the chat template write the start marker; further such requests are not logged"
            logger.warning("meridian: request %s has ended thinking, but %s; %s", live.info.request_id, why, hint)

    def close(self, live: LiveRequest, finish_reason: str) -> None:
        """Report the outcomes of a request's open decisions and forget the request, because it has ended."""
        self._probing.held.pop(live, None)
        if live.tier is not None and not live.ref.is_finished():
            # Only an input of a streaming session has ended, so vLLM does not free the KV blocks.
            self._directives.report(live.tier[0], Outcome.REFUSED, detail="the streaming session keeps its blocks")
            live.take_tier()
        self._directives.close(live)
        self._hand_over.closing(live, finish_reason)
        self._outbox.unreported.close(live)
        if finish_reason == front_end_aborts.GONE:
            self._tracker.record.clients_gone.append(live.slot)
        self._tracker.close(live, FINISH_REASON.get(finish_reason, 0))


def gauges_of(scheduler: Scheduler, probing: ProbeRunner) -> Gauges:
    """Return the engine's gauges without its probes. The link's thread asks, too, while vLLM may be within a step."""
    running, waiting = scheduler.get_request_counts()
    return Gauges(scheduler.kv_cache_manager.usage, max(0, running - len(probing.placed)), waiting)


def _is_other(wanted: dict[int, int], tokens: Sequence[int]) -> bool:
    """Return whether a token is another one than its mask allowed. wanted: the allowed tokens by place; a place behind
    the tokens had a draft token before it that was rejected."""
    return any(at < len(tokens) and tokens[at] != token for at, token in wanted.items())
