"""Lets a request that stops while it thinks end its thinking and answer: the token at which the model stopped is taken
back, the request is queued anew, and a forced end follows in its place.

Nothing is done in a step in which no request stops. Under asynchronous scheduling a request waits for the output of the
steps that were scheduled with it before its stop was known. Runs on the engine-core thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_agent.vllm_adapter import preemption_api, premature_stops, request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from meridian_agent.core.directives import Directives
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.engine.token_masks import TokenMasks
    from meridian_agent.vllm_types import EngineCoreOutputs, Request, Scheduler


class PrematureStops:
    """The premature stops of one engine. refusal: why no request can go on past one; empty if requests can."""

    def __init__(self, tracker: Tracker, directives: Directives, masks: TokenMasks, refusal: str) -> None:
        self._tracker, self._directives, self._masks, self._refusal = tracker, directives, masks, refusal
        # Whether the stop is taken out of the outputs for the clients, by the id of each stopped request that is to go
        # on and is not queued anew yet.
        self.waiting: dict[str, bool] = {}

    def goes_on(self, scheduler: Scheduler, request: Request) -> bool:
        """Return whether a request that vLLM has just stopped is to go on. If its answer reserve is in shadow, report
        that it would have gone on."""
        live, markers = self._tracker.by_id.get(request.request_id), self._tracker.markers
        if live is None or not premature_stops.stopped_at(request, markers.turn_ends - markers.call_ends):
            return False
        state = self._tracker.thinking_before_newest(live)
        if state is None or self._refusal or live.stopped_after == state.ends or live.info.remote_decode:
            return False
        ending = state.ending(markers)
        if live.info.most_tokens - state.generated_tokens <= len(ending) or request_api.stops_at(request, ending):
            return False
        can_go_on = self._masks.may_force(live) and preemption_api.keeps_tokens(scheduler, request)
        if not can_go_on or scheduler_api.is_draining(scheduler):
            return False
        if not live.reserve_tokens:
            self._directives.shadow_stop(live, state.think_tokens)
            return False
        live.stopped_after = state.ends
        self.waiting[request.request_id] = False
        return True

    def take_out(self, scheduler: Scheduler, outputs: Iterable[EngineCoreOutputs]) -> None:
        """Take the stops of this step out of the outputs for the clients."""
        new = {r: scheduler.requests[r] for r, is_taken_out in self.waiting.items() if not is_taken_out}
        if new:
            premature_stops.take_out(outputs, new, v2=bool(scheduler.use_v2_model_runner))
            self.waiting.update(dict.fromkeys(new, True))

    def resume(self, scheduler: Scheduler, at_once: bool = False) -> None:
        """Queue the requests anew of which no step is in flight, or all of them `at_once`, and end their thinking."""
        for request_id in list(self.waiting):
            request, live = scheduler.requests.get(request_id), self._tracker.by_id.get(request_id)
            if request is not None and not at_once and premature_stops.in_flight(request):
                continue
            if request is not None:
                premature_stops.resume(scheduler, request)
            del self.waiting[request_id]
            if live is not None:
                self._directives.end_stopped(live)

    def unfinished(self, scheduler: Scheduler) -> int:
        """Return how many requests are to go on that are in none of vLLM's queues, from which vLLM counts those that
        have not finished."""
        return 0 if scheduler_api.makes_no_step(scheduler) else len(self.waiting)

    def finishing(self, scheduler: Scheduler, request_ids: Collection[str] | str | None) -> None:
        """Let vLLM finish the requests among these that wait to be queued anew; None stands for all requests."""
        asked = (request_ids,) if isinstance(request_ids, str) else request_ids
        for request_id in [r for r in self.waiting if asked is None or r in asked]:
            premature_stops.show_as_running(scheduler.requests[request_id])
            del self.waiting[request_id]
