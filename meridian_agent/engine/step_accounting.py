"""Processes a step's outputs: hands tokens to the tracker, reports outcomes, closes requests that end, and takes probes
out.

Most steps bring nearly all requests one token of text and nothing else, and are counted as a whole for these requests.
Runs on the engine-core thread, after vLLM has processed the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.step_signals import StepSignals
from meridian_agent.vllm_adapter import request_api

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from meridian_agent.core.directives import Directives
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_signals import SignalBytes
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.engine.hand_over import HandOverRunner
    from meridian_agent.engine.probe_runner import ProbeRunner

# The meridian.v1.FinishReason for each finish reason of vLLM.
FINISH_REASON = {
    "stop": agent_pb2.FINISH_REASON_STOP,
    "length": agent_pb2.FINISH_REASON_LENGTH,
    "abort": agent_pb2.FINISH_REASON_ABORT,
    "error": agent_pb2.FINISH_REASON_ERROR,
}


class StepAccounting:
    """The accounting of one engine's steps."""

    def __init__(
        self, tracker: Tracker, directives: Directives, probing: ProbeRunner, hand_over: HandOverRunner
    ) -> None:
        self._tracker, self._directives, self._probing, self._hand_over = tracker, directives, probing, hand_over

    def take(
        self, runner_output: Any, outputs: dict[int, Any], told: SignalBytes | None, finished: AbstractSet[str]
    ) -> None:
        """Process a step. runner_output: vLLM's ModelRunnerOutput. outputs: the outputs that vLLM is about to send to
        the clients. told: signals of the step's rows. finished: ids of requests and probes that may have ended in the
        step."""
        if not self._is_text(runner_output, outputs, told, finished):
            own = self._without_probes(runner_output.req_ids)
            others = self._others(runner_output, outputs, told, own, finished)
            self._tracker.count(others)
            if others or len(own) < len(runner_output.req_ids):
                signals = None if told is None else StepSignals.decode(told)
                self._singly(outputs, runner_output.req_id_to_index, signals, {own[row] for row in others})
            self._tracker.looked_at(others)
        if self._tracker.loops.enabled and runner_output.req_ids:
            self._tracker.look_for_loops()

    def _is_text(
        self, runner_output: Any, outputs: dict[int, Any], told: SignalBytes | None, finished: AbstractSet[str]
    ) -> bool:
        """Count a step that brought each request of the step before one token of text and nothing else; return whether
        it is one."""
        request_ids, answered = runner_output.req_ids, 0
        for group in outputs.values():
            answered += len(group.outputs)
        if finished or self._probing.placed or isinstance(told, tuple) or answered != len(request_ids):
            return False
        return self._tracker.count_all(request_ids, runner_output.sampled_token_ids)

    def _without_probes(self, request_ids: list[str]) -> list[str]:
        """Return the ids without the probes at their end; vLLM puts a probe, as a new request, behind the requests that
        generate text."""
        placed, number = self._probing.placed, len(request_ids)
        while number and request_ids[number - 1] in placed:
            number -= 1
        return request_ids if number == len(request_ids) else request_ids[:number]

    def _others(
        self,
        runner_output: Any,
        outputs: dict[int, Any],
        told: SignalBytes | None,
        own: list[str],
        finished: AbstractSet[str],
    ) -> list[int]:
        """Return the rows of the requests that the step did not bring one token of text and nothing else, which cannot
        be counted as a whole. own: the step's ids without its probes."""
        if isinstance(told, tuple):
            return self._tracker.note_nothing(own)
        sampled, probes = runner_output.sampled_token_ids, len(runner_output.req_ids) - len(own)
        others = self._tracker.note(own, sampled[: len(own)] if probes else sampled, finished)
        expected = len(own)
        if probes or others:
            # vLLM has no output for prompts in pieces and for requests that were aborted during the step.
            ids = {own[row] for row in others}.union(runner_output.req_ids[len(own) :])
            expected += sum(out.request_id in ids for group in outputs.values() for out in group.outputs) - len(others)
        if sum(len(group.outputs) for group in outputs.values()) != expected:
            return self._tracker.note_nothing(own)
        return others

    def _singly(
        self, outputs: dict[int, Any], index: dict[str, int], signals: StepSignals | None, others: AbstractSet[str]
    ) -> None:
        """Take the probes out of the outputs, and process the outputs of the requests in `others` one by one. index:
        row of each id."""
        by_id = self._tracker.by_id
        for group in outputs.values():
            if self._probing.placed:
                self._probing.collect(group, signals, index)
            for out in group.outputs:
                if out.request_id in others and (live := by_id.get(out.request_id)):
                    self._one(live, out, index, signals)

    def _one(self, live: LiveRequest, out: Any, index: dict[str, int], signals: StepSignals | None) -> None:
        if out.new_token_ids:
            # Under asynchronous scheduling, the token of the step before the preemption may arrive after the
            # preemption.
            if live.preempted and not request_api.waits_preempted(live.ref):
                self._tracker.resume(live)
            at = index.get(out.request_id, 0)
            first = at if signals is None else signals.row(at)
            ended = self._tracker.feed(live, out.new_token_ids, first)
            if ended or live.ending is not None or (live.cap is not None and live.cap.shadow):
                self._directives.after_tokens(live, ended)
            if live.info.handed_over_ref:
                self._hand_over.generated(live, out)
            if ended and out.finish_reason is None:
                self._directives.hand_overs.ended_thinking(live)
        if out.finish_reason is not None:
            self.close(live, str(out.finish_reason))

    def close(self, live: LiveRequest, finish_reason: str) -> None:
        """Report the outcomes of a request's open decisions and forget the request, because it has ended."""
        self._probing.held.pop(live, None)
        self._directives.close(live)
        self._hand_over.closing(live, finish_reason)
        self._tracker.close(live, FINISH_REASON.get(finish_reason, 0))
