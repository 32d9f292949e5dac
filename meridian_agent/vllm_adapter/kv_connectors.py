"""Keeps EAT probes from vLLM's KV connectors: no call names a probe, no list of a step holds one, no statistic counts
one.

Owns the wrappers that stand before a connector's methods, on the instance, in the engine core and in each worker, and
what keeps probes out of the KV cache events by which others know what an engine has cached. Knows a probe by what its
request id begins with; must not know what a probe measures. Only `hide_from_connector` imports vLLM. The
wrappers run on the thread on which vLLM calls its connector.

A connector is told everything of a step but the probes' rows. KV blocks that a probe is given are told as copies of
these blocks onto themselves: a connector that still stores their former contents has to finish that first.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter import required_api
from meridian_agent.vllm_adapter.version import minor, vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from meridian_agent.core.guard import Guard

# The first minor release whose OffloadingConnector learns from a step's block copies, too, that a block is used anew.
COPIES_TOLD = (0, 29)

# A connector's answers, by method, for a request that it neither loads nor stores.
ANSWERS: dict[str, Any] = {
    "get_external_cache_hit_sources": {},
    "get_loaded_kv_cache_group_ids": (),
    "get_num_new_matched_tokens": (0, False),
    "on_new_request": None,
    "register_finished_partial_tail": False,
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "update_state_after_alloc": None,
}
# Methods of a worker's connector that take the ids of finished requests.
OF_FINISHED = ("get_finished", "get_transfer_results")
# Parameters by which a connector's method is told of requests, and the methods whose calls are known to be covered.
_OF_REQUESTS = frozenset(
    {"request", "requests", "request_id", "request_ids", "req_id", "req_ids", "finished_req_ids", "scheduler_output"}
)
_COVERED = frozenset({*ANSWERS, "build_connector_meta", *OF_FINISHED})
# Connectors that take part in computing every request of a step, and what they do.
TAKES_PART = {"HiSparseConnector": "moves the KV of every request of a step"}


def obstacle(connector: Any, interface: Iterable[type]) -> str:
    """Why probes cannot be kept from a connector; empty when they can. interface: vLLM's classes of its methods."""
    for owner in interface:
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name not in _COVERED and not _OF_REQUESTS.isdisjoint(inspect.signature(method).parameters):
                return f"the agent does not know {owner.__name__}.{name}, by which a connector is told of requests"
    return next((f"{name} {does}" for name, does in TAKES_PART.items() if has(connector, name)), "")


def has(connector: Any, name: str) -> bool:
    """Whether a connector is of the class of this name, or has one within it."""
    return any(owner.__name__ == name for one in _parts(connector) for owner in type(one).__mro__)


def _parts(connector: Any) -> list[Any]:
    """A connector, and those within it where it is made of several."""
    within = getattr(connector, "_connectors", None)
    return [connector, *(one for each in within for one in _parts(each))] if isinstance(within, list) else [connector]


def hide(scheduler: Any, prefix: str, copied: Callable[[int, int], Any], guard: Guard) -> None:
    """Put wrappers before the methods of a scheduler's connector, on the instance.

    prefix: what the ids of hidden requests begin with. copied: makes vLLM's KVCacheBlockCopy. guard: trips where a
    step's hidden requests could not be left out.
    """
    hidden = _Hidden(scheduler, prefix, copied, guard)
    connector = scheduler.connector
    for name, answer in ANSWERS.items():
        if (call := getattr(connector, name, None)) is not None:
            setattr(connector, name, hidden.answering(call, answer))
    connector.update_state_after_alloc = hidden.uncounted(connector.update_state_after_alloc)
    connector.build_connector_meta = hidden.building(connector.build_connector_meta)


def hide_finished(connector: Any, prefix: str) -> None:
    """Keep hidden requests out of the finished ones that a worker's connector is told of."""
    for name in OF_FINISHED:
        if (call := getattr(connector, name, None)) is not None:
            setattr(connector, name, _told_of_others(call, prefix))


def cache_nothing(manager: Any, prefix: str) -> None:
    """Keep the blocks of hidden requests out of vLLM's prefix cache.

    Each block that goes in or out of it is told to whoever listens to KV cache events: a probe's block would be told
    gone while its request still has one of the same tokens.

    manager: vLLM's KVCacheManager.
    """
    cache = manager.coordinator.cache_blocks

    @functools.wraps(cache)
    def cache_others(request: Any, *args: Any, **kwargs: Any) -> None:
        if not request.request_id.startswith(prefix):
            cache(request, *args, **kwargs)

    manager.coordinator.cache_blocks = cache_others


def _told_of_others(call: Callable[..., Any], prefix: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def told(finished_req_ids: Set[str], *args: Any, **kwargs: Any) -> Any:
        return call({r for r in finished_req_ids if not r.startswith(prefix)}, *args, **kwargs)

    return told


class _Hidden:
    """The hidden requests of one scheduler."""

    def __init__(self, scheduler: Any, prefix: str, copied: Callable[[int, int], Any], guard: Guard) -> None:
        self._scheduler, self._prefix, self._copied, self._guard = scheduler, prefix, copied, guard
        # Probes that vLLM has named to the connector, until a step has said that they are finished.
        self._ids: set[str] = set()
        # vLLM's statistics of the connector, while it counts a hidden request in others.
        self._stats: Any = None

    def answering(self, call: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        """A method that gives this answer of a hidden request."""

        @functools.wraps(call)
        def asked(request: Any, *args: Any, **kwargs: Any) -> Any:
            if not request.request_id.startswith(self._prefix):
                return call(request, *args, **kwargs)
            self._ids.add(request.request_id)
            return answer

        return asked

    def uncounted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The method right after which vLLM counts what a request asked of the connector."""

        @functools.wraps(call)
        def allocated(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._count()
            if request.request_id.startswith(self._prefix):
                self._stats = getattr(self._scheduler, "connector_prefix_cache_stats", None)
                if self._stats is not None:
                    self._scheduler.connector_prefix_cache_stats = type(self._stats)()
            return call(request, *args, **kwargs)

        return allocated

    def _count(self) -> None:
        """Have vLLM count in its own statistics again."""
        if self._stats is not None:
            self._scheduler.connector_prefix_cache_stats, self._stats = self._stats, None

    def building(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The method that is told of a step as a whole."""

        @functools.wraps(call)
        def build(scheduler_output: Any) -> Any:
            self._count()
            if not self._ids:
                return call(scheduler_output)
            try:
                shown = self._without(scheduler_output)
            except Exception as error:
                self._guard.trip(build, error)
                return call(scheduler_output)
            given = dict(vars(shown))
            meta = call(shown)
            # A connector may say so how the step is to be run. What is of requests is the step's own.
            for name, value in vars(shown).items():
                if value is not given.get(name) and given.get(name) is getattr(scheduler_output, name, None):
                    setattr(scheduler_output, name, value)
            self._ids -= scheduler_output.finished_req_ids
            return meta

        return build

    def _without(self, output: Any) -> Any:
        """A step without its hidden requests. output: vLLM's SchedulerOutput, which stays as it is."""
        ids, shown = self._ids, _others(output, self._ids)
        shown.total_num_scheduled_tokens = sum(shown.num_scheduled_tokens.values())
        shown.scheduled_new_reqs = [r for r in output.scheduled_new_reqs if r.req_id not in ids]
        cached = output.scheduled_cached_reqs
        kept = [i for i, request_id in enumerate(cached.req_ids) if request_id not in ids]
        shown.scheduled_cached_reqs = _others(cached, ids)
        for name, value in vars(cached).items():
            if isinstance(value, list) and len(value) == len(cached.req_ids):
                setattr(shown.scheduled_cached_reqs, name, [value[i] for i in kept])
        if (state := getattr(output, "kv_connector_block_state", None)) is not None:
            shown.kv_connector_block_state = _others(state, ids)
        given = [r.block_ids for r in output.scheduled_new_reqs if r.req_id in ids]
        given += [b for r, b in zip(cached.req_ids, cached.new_block_ids, strict=True) if r in ids and b is not None]
        if own := self._own(block for groups in given for group in groups for block in group):
            copies = output.kv_cache_block_copies or ()
            shown.kv_cache_block_copies = [*copies, *(self._copied(block, block) for block in own)]
        return shown

    def _own(self, blocks: Iterable[int]) -> list[int]:
        """The blocks that no other request has."""
        pool = self._scheduler.kv_cache_manager.block_pool.blocks
        return sorted({block for block in blocks if pool[block].ref_cnt == 1 and not pool[block].is_null})


def _others(of: Any, ids: Set[str]) -> Any:
    """A copy of an object whose dictionaries and sets by request id lack these ids."""
    others = copy.copy(of)
    for name, value in vars(of).items():
        if isinstance(value, dict):
            setattr(others, name, {key: one for key, one in value.items() if key not in ids})
        elif isinstance(value, (set, frozenset)):
            setattr(others, name, value - ids)
    return others


def hide_from_connector(scheduler: Any, prefix: str, guard: Guard) -> str:
    """Keep requests from vLLM's KV connector, by what their ids begin with; why they cannot be, or empty.

    guard: trips where a step's cannot be left out after all.
    """
    if scheduler.connector is None:
        return ""
    if lacks := required_api.missing(required_api.Imported(), required_api.CONNECTOR):
        return f"vLLM {vllm_version()} lacks: {', '.join(lacks)}"
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    if reason := obstacle(scheduler.connector, (KVConnectorBase_V1, SupportsHMA)):
        return reason
    if minor() < COPIES_TOLD and has(scheduler.connector, "OffloadingConnector"):
        return f"the OffloadingConnector of vLLM {vllm_version()} must know of every request that is given blocks"
    try:
        hide(scheduler, prefix, KVCacheBlockCopy, guard)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
