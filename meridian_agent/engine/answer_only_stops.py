"""Lets the stop strings and stop tokens of requests sleep while the model thinks, so that they end answers only.

vLLM's scheduler looks for stop tokens, and its front end for stop strings. Nothing is done for a request that has
neither, and without a policy in force both end thinking, as in stock vLLM. Runs on the engine-core thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian_agent.core.phases import Phase
from meridian_agent.vllm_adapter import stop_strings, stop_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian_agent.core.phases import Markers, PhaseState
    from meridian_agent.core.request_info import RequestInfo
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.vllm_types import EngineCoreOutputs, Request


# One token of thinking.
ONE_THINKING = (True,)


class AnswerOnlyStops:
    """The stops of one engine's requests."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        # Settings.answer_only_stops.
        self.requests = ""
        # Requests with stop strings, by id; some may have ended while no stop slept. Whether the strings of each sleep
        # while it thinks, and the settings and markers by which that was found out.
        self.with_strings: dict[str, tuple[bool, str, Markers | None]] = {}

    def opened(self, scheduler: Any, request: Request) -> None:
        """Look at a request that vLLM has just accepted, or that a new agent begins to track. scheduler: the engine's
        GovernedScheduler, which asks the agent that is on when a stop token comes."""
        request_id = request.request_id
        if self._own_tokens(request):
            stop_tokens.let_sleep(request, lambda: scheduler.stop_sleeps(request_id))
        if request.sampling_params.stop:
            by_id, known = self._tracker.by_id, self.with_strings
            if len(known) > len(by_id):
                self.with_strings = known = {live: known[live] for live in known.keys() & by_id.keys()}
            known[request_id] = False, "", None

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.with_strings.pop(request_id, None)

    def token_sleeps(self, request_id: str) -> bool:
        """Return whether a stop token, which is the newest token of a request, does not end the request."""
        live = self._tracker.by_id.get(request_id)
        if live is None or live.ref.output_token_ids[-1] in self._tracker.markers.turn_ends:
            return False
        return self._concerns(live.ref, live.info) and self._tracker.thinking_before_newest(live) is not None

    def note_strings(self, groups: Iterable[EngineCoreOutputs]) -> None:
        """Note in the outputs of a step, which vLLM is about to send to its front end, where stop strings sleep."""
        by_id, markers, known = self._tracker.by_id, self._tracker.markers, self.with_strings
        for group in groups:
            for output in group.outputs:
                found, live = known.get(output.request_id), by_id.get(output.request_id)
                if found is None or live is None:
                    continue
                sleep, requests, read_by = found
                if requests != self.requests or read_by is not markers:
                    sleep = self._concerns(live.ref, live.info)
                    known[output.request_id] = sleep, self.requests, markers
                if sleep:
                    stop_strings.note(output, _thinking(live.state, output.new_token_ids, markers))
                if output.finish_reason is not None:
                    self.finished(output.request_id)

    def sleep(self, request: Request, info: RequestInfo) -> bool:
        """Return whether a request has stops that sleep while it thinks."""
        stops = request.sampling_params.stop or self._own_tokens(request)
        return bool(stops) and self._concerns(request, info)

    def _own_tokens(self, request: Request) -> list[int]:
        """Return a request's stop tokens other than those that end the model's turns, which vLLM adds to every
        request; none while the markers are not known."""
        markers, tokens = self._tracker.markers, request.sampling_params.stop_token_ids
        return [token for token in tokens if token not in markers.turn_ends] if tokens and markers.known else []

    def _concerns(self, request: Request, info: RequestInfo) -> bool:
        """Return whether a request's stops end its answer only. A request that names a marker among its stops wants to
        stop where its thinking begins or ends."""
        asked, every = info.answer_only_stops, self.requests == "all" or (self.requests == "chat" and info.chat)
        wanted = self.requests != "" and (every if asked is None else asked)
        return wanted and not _names_marker(request, self._tracker.markers)


def _names_marker(request: Request, markers: Markers) -> bool:
    params = request.sampling_params
    # Unlike `stop_token_ids`, this has no stop token that a handover has added.
    named = any(not params.all_stop_token_ids.isdisjoint(marker) for marker in (*markers.starts, *markers.ends))
    return named or any(text in string for string in params.stop or () for text in markers.texts)


def _thinking(state: PhaseState, tokens: Sequence[int], markers: Markers) -> Sequence[bool]:
    """Return for each token after `state` whether it is a token of thinking or of a marker next to it."""
    if len(tokens) == markers.longest == 1 and tokens[0] not in markers.by_last:
        return ONE_THINKING if state.phase is Phase.THINK else ()
    if markers.longest == 1 and markers.by_last.keys().isdisjoint(tokens):
        return [state.phase is Phase.THINK] * len(tokens)
    state, asleep = state.copy(), list[bool]()
    for token in tokens:
        before = state.phase
        state.feed(token, markers)
        asleep.append(Phase.THINK in (before, state.phase))
    return asleep
