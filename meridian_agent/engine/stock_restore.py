"""Restores a scheduler to the state that stock vLLM would have, wherever a hook of the agent was interrupted.

Reads the scheduler only, never the agent, whose state may be half written. Runs on the engine-core thread, between
calls of vLLM's own methods.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import is_probe
from meridian_agent.vllm_adapter import probe_rows, request_api, scheduler_api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meridian_agent.vllm_types import Scheduler

logger = logging.getLogger("vllm.meridian")


def as_stock(
    scheduler: Scheduler, ordered: bool, changes: Iterable[Callable[[], object]], outputs: Iterable[Any] = ()
) -> bool:
    """Undo all changes that a hook may have left behind; a part that fails does not stop the others. Return whether all
    parts succeeded.

    ordered: whether a plan had ordered the queues. changes: functions that undo changes of the caller. outputs: the
    outputs that vLLM is about to send to the clients.
    """
    done = True
    probes = partial(take_out_probes, scheduler), partial(probe_rows.forget, scheduler), partial(hide_probes, outputs)
    undo: list[Callable[[], object]] = [*changes, *probes]
    if ordered:
        undo += [partial(bring_back, scheduler), partial(order, scheduler)]
    for part in undo:
        try:
            part()
        except Exception:
            logger.exception("meridian: could not undo a change of the agent in the scheduler")
            done = False
    return done


def take_out_probes(scheduler: Scheduler) -> None:
    """Take all probes out of the engine."""
    for request_id in [r for r in scheduler.requests if is_probe(r)]:
        take_out(scheduler, request_id)


def take_out(scheduler: Scheduler, request_id: str) -> None:
    """Take a probe out of the engine, without telling a client that a request ended."""
    scheduler.finish_requests(request_id, request_api.aborted_status())
    for ids in (getattr(scheduler, "finished_req_ids_dict", None) or {}).values():
        ids.discard(request_id)


def bring_back(scheduler: Scheduler) -> None:
    """Put requests back into the running list and the waiting queue that a hook had taken out and not put back."""
    queues = [getattr(scheduler, name, ()) for name in scheduler_api.QUEUES]
    known = {request.request_id for queue in (scheduler.running, *queues) for request in queue}
    lost = [r for r in scheduler.requests.values() if r.request_id not in known]
    scheduler.running += filter(request_api.runs, lost)
    for request in filter(request_api.waits, reversed(lost)):
        scheduler.waiting.prepend_request(request)


def order(scheduler: Scheduler) -> None:
    """Give requests their own priorities back, and sort the running list by arrival."""
    for request in scheduler.running:
        request.priority = math.floor(request.priority)
    for queue in [getattr(scheduler, name) for name in scheduler_api.QUEUES if hasattr(scheduler, name)]:
        for request in [r for r in queue if r.priority != math.floor(r.priority)]:
            queue.remove_request(request)
            request.priority = math.floor(request.priority)
            queue.add_request(request)
    # The order comes from `scheduler.requests`, because the arrival times are from a wall clock that may have jumped.
    place = {request_id: at for at, request_id in enumerate(scheduler.requests)}
    scheduler.running.sort(key=lambda request: place.get(request.request_id, -1))


def hide_probes(groups: Iterable[Any]) -> None:
    """Remove probes from the output for the clients. groups: vLLM's EngineCoreOutputs."""
    for group in groups:
        group.outputs = [o for o in group.outputs if not is_probe(o.request_id)]
        if group.finished_requests:
            group.finished_requests = {r for r in group.finished_requests if not is_probe(r)}
