"""Hands requests over to another engine at the end of their thinking, and measures the requests that continue another
engine's.

`core/hand_overs` has the decisions, `vllm_adapter/hand_over` changes vLLM's requests. Runs on the engine-core thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from meridian_agent.core.hand_overs import stops
from meridian_agent.vllm_adapter import hand_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meridian_agent.core.hand_overs import HandOvers
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.request_info import RequestInfo
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.vllm_adapter.hand_over import HandOverPort
    from meridian_agent.vllm_types import Request, Scheduler

logger = logging.getLogger("vllm.meridian")


class HandOverRunner:
    """Carries out the decisions of one engine. port: None if the engine cannot hand requests over."""

    def __init__(self, tracker: Tracker, decided: HandOvers, port: HandOverPort | None, able_to_answer: bool) -> None:
        self._tracker, self._decided, self._port, self._able_to_answer = tracker, decided, port, able_to_answer
        # Tokens that this engine has computed so far of each request that continues another engine's, until the request
        # generates its first token.
        self.computed: dict[str, int] = {}

    def obey(self) -> None:
        """Arm and disarm the requests whose decision has changed."""
        for live in self._decided.take_changed():
            if self._port is None:
                continue
            if (decided := self._decided.of(live)) is not None:
                self._port.arm(live.ref, decided.url, decided.ref, stops(self._tracker.markers))
            else:
                self._port.disarm(live.ref)

    def closing(self, live: LiveRequest, finish_reason: str) -> None:
        """Report the outcome of the decision about a request that has ended."""
        self.computed.pop(live.info.request_id, None)
        blocks = self._port.take(live.info.request_id) if self._port is not None else None
        if blocks is not None:
            self._tracker.record.handed_over.append(live.slot)
        self._decided.close(live, finish_reason, blocks)

    def admit(self, request: Request, block_size: int) -> None:
        """Look at a request before vLLM does: let this engine compute the KV that it cannot read."""
        if reason := hand_over.drop_unfit_blocks(request, self._able_to_answer, block_size):
            logger.warning("meridian: request %s is computed anew: %s", request.request_id, reason)

    def opened(self, info: RequestInfo) -> None:
        if info.handed_over_ref:
            self.computed[info.request_id] = 0

    def scheduled(self, tokens: Mapping[str, int], scheduler: Scheduler) -> None:
        """Count the tokens of a step, and forget requests that have left before their first token. tokens: number of
        scheduled tokens by request id. scheduler: vLLM's, which has the engine's requests."""
        self.computed = {r: n + tokens.get(r, 0) for r, n in self.computed.items() if r in scheduler.requests}

    def generated(self, live: LiveRequest, output: Any) -> None:
        """Report how much KV came from the other engine, once a request has generated its first token. output: vLLM's
        EngineCoreOutput."""
        computed = self.computed.pop(live.info.request_id, None)
        if computed is None:
            return
        cached = output.prefill_stats.num_local_cached_tokens if output.prefill_stats is not None else 0
        transferred = max(0, live.info.prompt_tokens - cached - computed)
        # vLLM notes the arrival by the time of day, which may have been set back since.
        waited_ms = max(0.0, time.time() - live.ref.arrival_time) * 1e3
        self._tracker.record.continued.append((live.slot, transferred, waited_ms))
        self._tracker.record.urgent = True
