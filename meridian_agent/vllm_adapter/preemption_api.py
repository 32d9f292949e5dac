"""Preempts running requests by vLLM's own method, and finds out what requests hold and need."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter import request_api, scheduler_api

if TYPE_CHECKING:
    from meridian_agent.vllm_types import PreemptingScheduler, Request, Scheduler


def refusal(scheduler: Scheduler, lacks: str) -> str:
    """Return why the agent preempts nothing for waiting requests on this engine; empty if it can. lacks: what this vLLM
    lacks for it."""
    if lacks:
        return lacks
    return "" if scheduler_api.fcfs(scheduler) else "vLLM's priority policy orders its queue by the clients' priorities"


def preempt(scheduler: PreemptingScheduler, request: Request) -> None:
    """Preempt a running request between two steps: it is then first in the waiting queue.

    vLLM delivers the tokens of the steps that are under way, and resumes the request only after that.
    """
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)
    # A request that was not in the newest step is sent to Model Runner V1 with all of its tokens when it resumes. So it
    # may resume in the coming step, which vLLM itself never lets happen after a preemption.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def preemptions(request: Request) -> int:
    """Return how often a request was preempted."""
    return int(getattr(request, "num_preemptions", 0))


def may_preempt(scheduler: PreemptingScheduler, request: Request) -> bool:
    """Whether a request runs and goes on with the same tokens after a preemption. A streaming session counts its tokens
    by its inputs."""
    if not request_api.runs(request) or getattr(request, "resumable", False):
        return False
    return keeps_tokens(scheduler, request)


def keeps_tokens(scheduler: Scheduler, request: Request) -> bool:
    """Whether a request may be computed again. Torch's generators on CPUs cannot be rewound if that happens in pieces,
    and the engine would die of it."""
    return request.sampling_params.seed is None or scheduler_api.can_redraw(scheduler)


def free_places(scheduler: PreemptingScheduler) -> int:
    """Return how many more requests may run."""
    limit = int(getattr(scheduler, scheduler_api.admission_limit_name(scheduler)))
    return limit - len(scheduler.running) - scheduler.num_waiting_for_streaming_input


def free_blocks(scheduler: PreemptingScheduler) -> int:
    """Return how many KV blocks are free for waiting requests."""
    manager = scheduler.kv_cache_manager
    return manager.block_pool.get_num_free_blocks() - manager.watermark_blocks


def needs(scheduler: PreemptingScheduler, request: Request) -> tuple[int, int]:
    """Return how many free KV blocks a waiting request needs for its prompt at most, and how many of its tokens are in
    no cached block."""
    manager: Any = scheduler.kv_cache_manager
    # vLLM tells those who follow its KV events of the blocks that it finds, if the request asks for that.
    tells, manager.enable_kv_cache_events = getattr(manager, "enable_kv_cache_events", False), False
    try:
        computed, cached_tokens = manager.get_computed_blocks(request)[:2]
    finally:
        manager.enable_kv_cache_events = tells
    in_use = sum([block.ref_cnt > 0 for group in computed.blocks for block in group])
    tokens, groups = request.num_tokens + scheduler.num_spec_tokens, manager.coordinator.single_type_managers
    return sum([-(-tokens // group.block_size) for group in groups]) - in_use, request.num_tokens - cached_tokens


def held_blocks(scheduler: PreemptingScheduler, request: Request) -> int:
    """Return how many KV blocks a request has, also those that others share."""
    return sum(map(len, scheduler.kv_cache_manager.get_blocks(request.request_id).blocks))


def own_blocks(scheduler: PreemptingScheduler, request: Request) -> int:
    """Return how many KV blocks become free if a request is preempted. Others share the blocks of its beginning, so the
    look ends at the newest shared block, however long the shared text is."""
    groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    return sum([1 for group in groups for _ in takewhile(lambda block: block.ref_cnt == 1, reversed(group))])


def computed_tokens(request: Request) -> int:
    """Return how many of a request's tokens have been computed, without tokens of steps under way and drafts."""
    return min(request.num_computed_tokens, request.num_tokens - 1)


def uncached_tokens(scheduler: PreemptingScheduler, request: Request, lost_blocks: int) -> int:
    """Return how many computed tokens of a request are in no cached block, if it also loses `lost_blocks` of its
    blocks."""
    computed, size = computed_tokens(request), scheduler.block_size
    if not scheduler.kv_cache_manager.enable_caching:
        return computed
    return min(computed, computed % size + lost_blocks * size)
