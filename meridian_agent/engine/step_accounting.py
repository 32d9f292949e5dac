"""Processes a step's outputs: hands tokens to the tracker, reports outcomes, closes requests that end, and takes probes
out.

Most steps bring each request one token of text and nothing else, probes aside, and are counted as a whole. Runs on the
engine-core thread, after vLLM has processed the step.
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
        own = self._without_probes(runner_output.req_ids)
        if not (self._probing.placed.keys() >= finished and self._all_text(runner_output, outputs, told, own)):
            self._singly(runner_output, outputs, None if told is None else StepSignals.decode(told), own)
        if self._tracker.loops.enabled and runner_output.req_ids:
            self._tracker.look_for_loops()

    def _without_probes(self, request_ids: list[str]) -> list[str]:
        """Return the ids without the probes at their end; vLLM puts a probe, as a new request, behind the requests that
        generate text."""
        placed, number = self._probing.placed, len(request_ids)
        while number and request_ids[number - 1] in placed:
            number -= 1
        return request_ids if number == len(request_ids) else request_ids[:number]

    def _all_text(self, runner_output: Any, outputs: dict[int, Any], told: SignalBytes | None, own: list[str]) -> bool:
        """Process a step as a whole if it brought each of its requests one token of text and nothing else, probes
        aside; return False otherwise. own: the step's ids without its probes."""
        if isinstance(told, tuple):
            return False
        sampled, probes = runner_output.sampled_token_ids, len(runner_output.req_ids) - len(own)
        # vLLM has no output for requests that were aborted during the step.
        if sum(len(group.outputs) for group in outputs.values()) != len(own) + probes:
            return False
        if not self._tracker.note(own, sampled[: len(own)] if probes else sampled):
            return False
        if probes:
            self._collect(runner_output, outputs, None if told is None else StepSignals.decode(told))
        return True

    def _collect(self, runner_output: Any, outputs: dict[int, Any], signals: StepSignals | None) -> None:
        for group in outputs.values():
            self._probing.collect(group, signals, runner_output.req_id_to_index)

    def _singly(self, runner_output: Any, outputs: dict[int, Any], signals: StepSignals | None, own: list[str]) -> None:
        by_id, index = self._tracker.by_id, runner_output.req_id_to_index
        if self._probing.placed:
            self._collect(runner_output, outputs, signals)
        for group in outputs.values():
            for out in group.outputs:
                if live := by_id.get(out.request_id):
                    self._one(live, out, index, signals)
        self._tracker.noted_singly(own)

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
