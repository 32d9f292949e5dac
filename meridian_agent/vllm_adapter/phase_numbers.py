"""Adds the numbers of an engine's phases to the statistics that vLLM's engine core sends to its front end in each step.

The statistics, vLLM's SchedulerStats, get one more field, which a front end without the agent skips; `server_metrics`
reads the field in the front end. In the engine core all code runs on the engine-core thread.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_agent.core.phases import Phase

if TYPE_CHECKING:
    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.tracker import Tracker

FIELD = "meridian_phases"
PHASES = (Phase.PROMPT, Phase.THINK, Phase.OUTPUT, Phase.UNKNOWN)
# Seconds between two messages with numbers, which look at each live request. Steps in between carry an empty list,
# which says that the agent is on. The first live request after none has its message at once, as the end of the last
# one has: requests of less than an interval, one after the other, would otherwise never be seen.
INTERVAL_S = 1.0


class PhaseNumbers(NamedTuple):
    """The content of the field.

    requests and kv_tokens: live requests, and tokens in the KV cache, by phase in the order of PHASES. think_tokens,
    saved_tokens and ttfvt_s: tokens, and times to first visible token in seconds, since the previous message.
    """

    requests: list[float]
    kv_tokens: list[float]
    think_tokens: float
    saved_tokens: float
    ttfvt_s: list[float]

    def encode(self) -> list[float]:
        return [*self.requests, *self.kv_tokens, self.think_tokens, self.saved_tokens, *self.ttfvt_s]

    @classmethod
    def decode(cls, field: list[float]) -> PhaseNumbers:
        requests, rest = field[: len(PHASES)], field[len(PHASES) :]
        kv_tokens, (think_tokens, saved_tokens, *ttfvt_s) = rest[: len(PHASES)], rest[len(PHASES) :]
        return cls(requests, kv_tokens, think_tokens, saved_tokens, ttfvt_s)


def add_field(stats: Any) -> None:
    """Give the dataclass `stats` the field, before msgspec has read its fields; doing so again changes nothing."""
    if FIELD in stats.__dataclass_fields__:
        return
    (field,) = dataclasses.fields(dataclasses.make_dataclass("Added", [(FIELD, list[float] | None, None)]))
    stats.__annotations__[FIELD] = list[float] | None
    setattr(stats, FIELD, None)
    stats.__dataclass_fields__[FIELD] = field


class PhaseNumberSender:
    """Adds the numbers of one engine's requests to its statistics."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        # Time of the newest message with numbers; minus infinity if it had no live request.
        self._sent_at = -math.inf
        self._ttfvt_s: list[float] = []
        self._saved_tokens = 0
        # Thinking tokens that are not sent yet; below 0 while a marker has taken back more tokens than were generated.
        self._think_tokens = 0

    def due_s(self) -> float:
        """Return the time from which `add_to` has numbers to add, in monotonic seconds; until then it adds an empty
        list."""
        return self._sent_at + INTERVAL_S

    def add_to(self, stats: Any, now_s: float) -> None:
        """Add the field to the statistics of a step; None if vLLM collects none. now_s: monotonic seconds."""
        tracker = self._tracker
        answered = tracker.take_answered() if tracker.answered or tracker.before_answer else ()
        if stats is None:
            return
        if answered:
            wall = time.time()
            self._ttfvt_s += [max(0.0, wall - live.ref.arrival_time) for live in answered if _begun_here(live)]
        numbers: list[float] = []
        # Without live requests no step may follow.
        if now_s >= self.due_s() or not tracker.by_id:
            numbers, self._sent_at = self._take().encode(), now_s if tracker.by_id else -math.inf
        setattr(stats, FIELD, numbers)

    def _take(self) -> PhaseNumbers:
        requests, kv_tokens = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        tracker = self._tracker
        self._think_tokens += tracker.take_closed_think_tokens()
        # One pass, because the requests' memory is no longer in the caches.
        for live in tracker.by_id.values():
            phase = live.phase
            requests[phase] += 1
            kv_tokens[phase] += live.ref.num_computed_tokens
            self._think_tokens += live.take_think_tokens()
        think_tokens = max(0, self._think_tokens)
        self._think_tokens -= think_tokens
        saved_tokens, self._saved_tokens = tracker.saved_tokens - self._saved_tokens, tracker.saved_tokens
        ttfvt_s, self._ttfvt_s = self._ttfvt_s, []
        return PhaseNumbers([*requests.values()], [*kv_tokens.values()], think_tokens, saved_tokens, ttfvt_s)


def _begun_here(live: LiveRequest) -> bool:
    """Whether the request was submitted to this engine, and not handed over by the one that did its thinking."""
    return not live.info.handed_over_ref
