"""Preempts thinking requests for waiting ones that find no place among the running requests or no free KV blocks.

The control plane says which waiting request may preempt which thinking ones, and within which limits. This module finds
out before a step whether such a request would go on waiting, and preempts the requests that lose least, by vLLM's own
method. It owns the count of what preempted requests compute again. Runs on the engine-core thread, before vLLM
schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from meridian_agent.core.phases import Phase
from meridian_agent.core.preempts import JOINED
from meridian_agent.core.request_info import shown_id
from meridian_agent.core.step_record import Outcome
from meridian_agent.vllm_adapter import preemption_api, request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from meridian_agent.core.live_request import LiveRequest
    from meridian_agent.core.preempts import Claim, Preempts
    from meridian_agent.core.tracker import Tracker
    from meridian_agent.engine.queue_order import QueueOrder
    from meridian_agent.vllm_types import PreemptingScheduler, Request, SchedulerOutput

# Seconds whose tokens may be computed again at once, after a time without preemptions.
BURST_S = 1.0
# Number of waiting requests for which the agent looks for requests to preempt in one step; each look takes time.
MOST_LACKING = 4


class Preempted(NamedTuple):
    """A request that was preempted for another one and has not resumed. computed: its tokens that had been computed.
    expected: how many of these were expected to be computed again. per_s, max_wait_s: as in the claim. since_s: time on
    the clock."""

    computed: int
    expected: int
    per_s: int
    max_wait_s: float
    since_s: float


class Victim(NamedTuple):
    """A request to preempt. tokens: those that it is expected to compute again. blocks: KV blocks that become free."""

    live: LiveRequest
    tokens: int
    blocks: int


@dataclass(slots=True)
class Room:
    """The running places and KV blocks that are free before a step, and what waiting requests are to take of them.
    lacking: number of requests that lack something. in_vain: those of them for which no others were preempted."""

    places: int
    blocks: int
    taken: tuple[int, int] = 0, 0
    lacking: int = 0
    in_vain: list[LiveRequest] = field(default_factory=list)

    def lacks(self, blocks: int) -> bool:
        """Whether a request that needs so many blocks finds no place or too few blocks."""
        return self.places < 1 or self.blocks < blocks

    def add(self, victims: Sequence[Victim]) -> None:
        """Add what the requests to preempt have."""
        self.places += len(victims)
        self.blocks += sum([victim.blocks for victim in victims])

    def take(self, blocks: int) -> None:
        """Take a place and so many blocks for a request."""
        self.places, self.blocks = self.places - 1, self.blocks - blocks
        self.taken = self.taken[0] + 1, self.taken[1] + blocks


class RecomputedTokens:
    """Counts the tokens that preempted requests compute again. clock: returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total = 0
        # Seconds, until `_at_s`, whose tokens may still be computed again; below 0 if more have been.
        self._left_s, self._at_s = BURST_S, clock()

    def may_grow(self) -> bool:
        """Return whether more tokens may be computed again now."""
        now_s = self._clock()
        self._left_s, self._at_s = min(BURST_S, self._left_s + now_s - self._at_s), now_s
        return self._left_s > 0

    def expect(self, tokens: int, per_s: int) -> None:
        """Note that so many more tokens are expected to be computed again, fewer if below 0. per_s: tokens per second
        that may be."""
        self._left_s -= tokens / max(1, per_s)


class Preemption:
    """The preemptions for waiting requests on one engine. reserved: returns how many running places are to be left free
    for probes."""

    def __init__(
        self,
        tracker: Tracker,
        preempts: Preempts,
        queues: QueueOrder,
        clock: Callable[[], float],
        reserved: Callable[[PreemptingScheduler], int],
    ) -> None:
        self._tracker, self._preempts, self._queues = tracker, preempts, queues
        self._clock, self._reserved = clock, reserved
        self.recomputed = RecomputedTokens(clock)
        # Requests that were preempted here and have not resumed.
        self.waiting: dict[LiveRequest, Preempted] = {}

    def obey(self, scheduler: PreemptingScheduler) -> tuple[int, int]:
        """Put the requests that may preempt others first in the waiting queue, and preempt as many requests as they
        need. Return how many of the free running places and KV blocks they are to take in the coming step."""
        for live in [live for live in self._preempts.claims if not request_api.is_queued(live.ref)]:
            self._preempts.settle(live, Outcome.ENDED_NATURALLY, JOINED)
        places = preemption_api.free_places(scheduler) - self._reserved(scheduler)
        if self._queues.preempted_answers() or (places < 1 and not self.recomputed.may_grow()):
            # An answer that vLLM has preempted comes first, or no request can join the coming step.
            return 0, 0
        waiting, blocks = set(scheduler.waiting), preemption_api.free_blocks(scheduler)
        # Requests in shadow take from a room of their own, so that they change nothing for the others.
        rooms = {shadow: Room(places, blocks) for shadow in (False, True)}
        ready = self._ready(scheduler, waiting, rooms)
        overdue = [live.ref for live in self._overdue() if live.ref in waiting]
        if overdue and any(ready):
            self._put_first(scheduler, overdue)
            return 0, 0
        served: list[Request] = []
        others: list[Request] = []
        for live, claim, needed in ready:
            room, group = rooms[claim.shadow], others
            if room.lacks(needed):
                room.lacking += 1
                if room.lacking > MOST_LACKING:
                    self._preempts.put_last(room.in_vain)
                    continue
                victims = self._victims(scheduler, claim, 1 - room.places, needed - room.blocks)
                if victims:
                    self._carry_out(scheduler, live, claim, victims)
                    room.add(victims)
                    group = served
                else:
                    room.in_vain.append(live)
            if not room.lacks(needed):
                room.take(needed)
            if not claim.shadow:
                group.append(live.ref)
        # vLLM has put each preempted request first, where it would take back its place. A request that lacks too much
        # stands behind those for which others were preempted.
        self._put_first(scheduler, served + others)
        return rooms[False].taken

    def _ready(
        self, scheduler: PreemptingScheduler, waiting: Container[Request], rooms: Mapping[bool, Room]
    ) -> Iterator[tuple[LiveRequest, Claim, int]]:
        """Yield the requests that vLLM takes in as soon as places and KV blocks are free, each with its claim and the
        KV blocks that it needs; refuse those whose prompts are too long. No request follows in a room, by shadow, in
        which too many lack something."""
        if scheduler_api.is_paused(scheduler):
            return
        fits: bool | None = None
        for live, claim in list(self._preempts.claims.items()):
            if rooms[claim.shadow].lacking > MOST_LACKING:
                continue
            if live.ref not in waiting or not request_api.is_ready(live.ref):
                continue
            if live.ref.lora_request is not None:
                fits = scheduler_api.adapters_fit(scheduler) if fits is None else fits
                if not fits:
                    continue
            needed, uncached = preemption_api.needs(scheduler, live.ref)
            if 0 < claim.max_prompt_tokens < uncached:
                why = f"{uncached} prompt tokens are not cached, and max_prompt_tokens is {claim.max_prompt_tokens}"
                self._preempts.settle(live, Outcome.REFUSED, why)
            else:
                yield live, claim, needed

    def _overdue(self) -> list[LiveRequest]:
        """Return the preempted requests that have waited for too long."""
        now_s = self._clock()
        return [live for live, one in self.waiting.items() if now_s - one.since_s >= one.max_wait_s]

    def _put_first(self, scheduler: PreemptingScheduler, wanted: Sequence[Request]) -> None:
        """Put these waiting requests first in the waiting queue, in this order."""
        if any(request is not want for request, want in zip(scheduler.waiting, wanted, strict=False)):
            self._queues.ordered = True
            scheduler.waiting.remove_requests(wanted)
            for request in reversed(wanted):
                scheduler.waiting.prepend_request(request)

    def _victims(
        self, scheduler: PreemptingScheduler, claim: Claim, lacking_places: int, lacking_blocks: int
    ) -> list[Victim]:
        """Return the requests to preempt, so that as many places and KV blocks become free as are lacking; empty if the
        requests that may be preempted now do not have so many."""
        if not self.recomputed.may_grow():
            return []
        chosen = [live for live in claim.victims if self._may_preempt(scheduler, live, claim)]
        if sum([preemption_api.held_blocks(scheduler, live.ref) for live in chosen]) < lacking_blocks:
            # To find out which blocks are a request's own takes a look at each of them.
            return []
        lost, costs = max(0, lacking_blocks), []
        for place, live in enumerate(chosen):
            tokens = preemption_api.uncached_tokens(scheduler, live.ref, lost)
            costs.append((tokens, preemption_api.preemptions(live.ref), place, live))
        victims, own_blocks = [], 0
        for tokens, *_, live in sorted(costs):
            victims.append(Victim(live, tokens, preemption_api.own_blocks(scheduler, live.ref)))
            own_blocks += victims[-1].blocks
            if len(victims) >= lacking_places and own_blocks >= lacking_blocks:
                return victims
        return []

    def _may_preempt(self, scheduler: PreemptingScheduler, live: LiveRequest, claim: Claim) -> bool:
        if self._tracker.by_id.get(live.info.request_id) is not live or live.phase is not Phase.THINK:
            return False
        if live.ending is not None or preemption_api.preemptions(live.ref) >= claim.max_preemptions:
            return False
        return preemption_api.may_preempt(scheduler, live.ref)

    def _carry_out(
        self, scheduler: PreemptingScheduler, live: LiveRequest, claim: Claim, victims: Sequence[Victim]
    ) -> None:
        """Preempt requests for a waiting one, unless the claim is in shadow, and report the outcome, which ends the
        claim."""
        names = [(shown_id(each.live.info.request_id), each.tokens) for each in victims]
        said = "; ".join([f"{name}: {tokens} token{'s'[: tokens != 1]} to compute again" for name, tokens in names])
        if claim.shadow:
            self._preempts.settle(live, Outcome.SHADOWED, f"would preempt {said}")
            return
        self._queues.ordered = True
        for victim in victims:
            self.recomputed.expect(victim.tokens, claim.recomputed_tokens_per_s)
            computed, now_s = preemption_api.computed_tokens(victim.live.ref), self._clock()
            limits = claim.recomputed_tokens_per_s, claim.max_wait_s
            preemption_api.preempt(scheduler, victim.live.ref)
            self.waiting[victim.live] = Preempted(computed, victim.tokens, *limits, now_s)
            self._tracker.record.preemptions.append((claim.decision_id, victim.live.slot, victim.tokens))
        self._preempts.settle(live, Outcome.APPLIED, f"preempted {said}")

    def scheduled(self, output: SchedulerOutput) -> None:
        """Count the tokens that preempted requests compute again, if they resume in this step."""
        scheduled = output.num_scheduled_tokens
        for live, preempted in list(self.waiting.items()):
            request_id = live.info.request_id
            if self._tracker.by_id.get(request_id) is not live:
                del self.waiting[live]
            elif tokens := scheduled.get(request_id):
                del self.waiting[live]
                again = max(0, preempted.computed - (live.ref.num_computed_tokens - tokens))
                self.recomputed.total += again
                self.recomputed.expect(again - preempted.expected, preempted.per_s)
