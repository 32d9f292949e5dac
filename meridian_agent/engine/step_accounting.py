"""A step's outputs on the books: tokens to the tracker, settled decisions, requests that end, probes taken out.

Most steps bring each request one token of text and nothing else: these are noted as a whole. Engine-core thread, after
vLLM has accounted the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.core.step_signals import StepSignals
from meridian_agent.vllm_adapter import request_api

if TYPE_CHECKING:
    from meridian_agent.core.directives import Directives
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.step_signals import SignalBytes
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.engine.probe_runner import ProbeRunner

# vLLM's finish reasons, by name, as meridian.v1.FinishReason.
# vLLM's word for why a request ended, and meridian.v1's.
FINISH_REASON = {
    "stop": agent_pb2.FINISH_REASON_STOP,
    "length": agent_pb2.FINISH_REASON_LENGTH,
    "abort": agent_pb2.FINISH_REASON_ABORT,
    "error": agent_pb2.FINISH_REASON_ERROR,
}


class StepAccounting:
    """The books of one engine's steps."""

    def __init__(self, tracker: Tracker, directives: Directives, probing: ProbeRunner) -> None:
        self._tracker, self._directives, self._probing = tracker, directives, probing

    def take(self, runner_output: Any, outputs: dict[int, Any], told: SignalBytes | None, ended: bool) -> None:
        """Account a step. runner_output: vLLM's ModelRunnerOutput. outputs: what is about to go to the clients. told:
        signals of its rows. ended: a request may have ended in it."""
        if ended or not self._all_text(runner_output, outputs, told):
            self._singly(runner_output, outputs, None if told is None else StepSignals.decode(told))

    def _all_text(self, runner_output: Any, outputs: dict[int, Any], told: SignalBytes | None) -> bool:
        """Account a step that brought each of its requests one token of text and nothing else."""
        if self._probing.placed or isinstance(told, tuple):
            return False
        ids = runner_output.req_ids
        # vLLM tells nothing of requests that were ended meanwhile.
        counted = sum(len(group.outputs) for group in outputs.values())
        return counted == len(ids) and self._tracker.note(ids, runner_output.sampled_token_ids)

    def _singly(self, runner_output: Any, outputs: dict[int, Any], signals: StepSignals | None) -> None:
        by_id, index = self._tracker.by_id, runner_output.req_id_to_index
        for group in outputs.values():
            if self._probing.placed:
                self._probing.collect(group, signals, index)
            for out in group.outputs:
                if live := by_id.get(out.request_id):
                    self._one(live, out, index, signals)
        self._tracker.noted_singly(runner_output.req_ids)

    def _one(self, live: LiveRequest, out: Any, index: dict[str, int], signals: StepSignals | None) -> None:
        if out.new_token_ids:
            # Under asynchronous scheduling the token of the step before the preemption is still to come.
            if live.preempted and not request_api.waits_preempted(live.ref):
                self._tracker.resume(live)
            at = index.get(out.request_id, 0)
            first = at if signals is None else signals.row(at)
            ended = self._tracker.feed(live, out.new_token_ids, first)
            if ended or live.ending is not None or (live.cap is not None and live.cap.shadow):
                self._directives.after_tokens(live, ended)
        if out.finish_reason is not None:
            self.close(live, FINISH_REASON.get(str(out.finish_reason), 0))

    def close(self, live: LiveRequest, reason: int) -> None:
        """A request has ended: settle what still waits for it, and forget it."""
        self._probing.held.pop(live, None)
        self._directives.close(live)
        self._tracker.close(live, reason)
