"""Hides EAT probes from vLLM's KV connectors: no call to a connector names a probe, no list of a step that a connector
receives contains a probe, and no statistic of a connector counts a probe.

The module wraps a connector's methods, on the instance, in the engine core and in each worker. The module also keeps
probes out of the KV cache events, from which other programs learn what an engine has cached. A probe is recognised by
its request id. Only `hide_from_connector` imports vLLM. The wrappers run on the thread on which vLLM calls its
connector.

A connector receives everything about a step but the probes' rows. The KV blocks that a probe gets are shown to the
connector as blocks copied onto themselves, so that a connector that still stores their former contents finishes first.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import clean, is_probe
from meridian_agent.vllm_adapter import required_api
from meridian_agent.vllm_adapter.version import minor, vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from meridian_agent.core.guard import Guard
    from meridian_agent.vllm_types import Scheduler

# First minor release whose OffloadingConnector also reads a step's block copies to learn that a block is reused.
COPIES_READ_FROM = (0, 29)

# Return values of a connector's methods, by name, for a request whose KV it neither loads nor stores.
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
# Parameters through which a connector's method receives requests or their ids.
_OF_REQUESTS = frozenset(
    {"request", "requests", "request_id", "request_ids", "req_id", "req_ids", "finished_req_ids", "scheduler_output"}
)
# Methods of a connector whose calls this module wraps.
_COVERED = frozenset({*ANSWERS, "build_connector_meta", *OF_FINISHED})
# Connectors that take part in computing every request of a step, by class name, and what each does.
TAKES_PART = {"HiSparseConnector": "moves the KV of every request of a step"}


def connector_and_role(config: Any) -> tuple[str, str]:
    """Return the name and the role of an engine's KV connector; two empty texts if it has none."""
    transfer = getattr(config, "kv_transfer_config", None)
    return clean(getattr(transfer, "kv_connector", None) or ""), clean(getattr(transfer, "kv_role", None) or "")


def obstacle(connector: Any, interface: Iterable[type]) -> str:
    """Return the reason why probes cannot be hidden from a connector; empty if they can be hidden. interface: vLLM's
    classes that declare a connector's methods."""
    for owner in interface:
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name not in _COVERED and not _OF_REQUESTS.isdisjoint(inspect.signature(method).parameters):
                return f"the agent does not know {owner.__name__}.{name}, which passes requests to a connector"
    return next((f"{name} {does}" for name, does in TAKES_PART.items() if has(connector, name)), "")


def has(connector: Any, name: str) -> bool:
    """Whether a connector, or a connector inside it, is an instance of the class with this name."""
    return any(owner.__name__ == name for one in _parts(connector) for owner in type(one).__mro__)


def _parts(connector: Any) -> list[Any]:
    """Return a connector and, if it combines several connectors, all of these."""
    within = getattr(connector, "_connectors", None)
    return [connector, *(one for each in within for one in _parts(each))] if isinstance(within, list) else [connector]


def hide(scheduler: Scheduler, copied: Callable[[int, int], Any], guard: Guard) -> None:
    """Wrap the methods of a scheduler's connector, on the instance.

    copied: makes vLLM's KVCacheBlockCopy. guard: trips if probes cannot be removed from a step.
    """
    hidden = _Hidden(scheduler, copied, guard)
    connector = scheduler.connector
    for name, answer in ANSWERS.items():
        if (call := getattr(connector, name, None)) is not None:
            setattr(connector, name, hidden.answering(call, answer))
    connector.update_state_after_alloc = hidden.uncounted(connector.update_state_after_alloc)
    connector.build_connector_meta = hidden.building(connector.build_connector_meta)


def hide_finished(connector: Any) -> None:
    """Remove probes from the ids of finished requests that a worker's connector receives."""
    for name in OF_FINISHED:
        if (call := getattr(connector, name, None)) is not None:
            setattr(connector, name, _without_probes(call))


def cache_nothing(manager: Any) -> None:
    """Keep the blocks of probes out of vLLM's prefix cache.

    vLLM publishes a KV cache event for each block that enters or leaves the cache. For a probe's block the event would
    say that the block is gone while the probed request still has a block with the same tokens.

    manager: vLLM's KVCacheManager.
    """
    cache = manager.coordinator.cache_blocks

    @functools.wraps(cache)
    def cache_others(request: Any, *args: Any, **kwargs: Any) -> None:
        if not is_probe(request.request_id):
            cache(request, *args, **kwargs)

    manager.coordinator.cache_blocks = cache_others


def _without_probes(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def finished(finished_req_ids: Set[str], *args: Any, **kwargs: Any) -> Any:
        return call({r for r in finished_req_ids if not is_probe(r)}, *args, **kwargs)

    return finished


class _Hidden:
    """Hides the probes of one scheduler from the scheduler's connector."""

    def __init__(self, scheduler: Scheduler, copied: Callable[[int, int], Any], guard: Guard) -> None:
        self._scheduler, self._copied, self._guard = scheduler, copied, guard
        # Ids of probes for which vLLM has called the connector; removed when a step lists the probe as finished.
        self._ids: set[str] = set()
        # vLLM's real connector statistics while vLLM counts a probe in a substitute; otherwise None.
        self._stats: Any = None

    def answering(self, call: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        """Wrap a method so that it returns `answer` for a probe."""

        @functools.wraps(call)
        def asked(request: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_probe(request.request_id):
                return call(request, *args, **kwargs)
            self._ids.add(request.request_id)
            return answer

        return asked

    def uncounted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method right after which vLLM counts a request in the connector's statistics, so that a probe
        is counted in a substitute."""

        @functools.wraps(call)
        def allocated(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._count()
            if is_probe(request.request_id):
                self._stats = getattr(self._scheduler, "connector_prefix_cache_stats", None)
                if self._stats is not None:
                    self._scheduler.connector_prefix_cache_stats = type(self._stats)()
            return call(request, *args, **kwargs)

        return allocated

    def _count(self) -> None:
        """Restore vLLM's real connector statistics."""
        if self._stats is not None:
            self._scheduler.connector_prefix_cache_stats, self._stats = self._stats, None

    def building(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that receives the whole step, so that it receives the step without probes."""

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
            # A connector may set attributes of the step to control how the step runs, so such attributes are copied to
            # the original step. Attributes that `_without` has replaced are not copied.
            for name, value in vars(shown).items():
                if value is not given.get(name) and given.get(name) is getattr(scheduler_output, name, None):
                    setattr(scheduler_output, name, value)
            self._ids -= scheduler_output.finished_req_ids
            return meta

        return build

    def _without(self, output: Any) -> Any:
        """Return a copy of a step without its probes. output: vLLM's SchedulerOutput, which is not changed."""
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
        """Return those of the given blocks that no other request uses, sorted."""
        pool = self._scheduler.kv_cache_manager.block_pool.blocks
        return sorted({block for block in blocks if pool[block].ref_cnt == 1 and not pool[block].is_null})


def _others(of: Any, ids: Set[str]) -> Any:
    """Return a copy of an object whose dictionaries and sets lack the request ids in `ids`."""
    others = copy.copy(of)
    for name, value in vars(of).items():
        if isinstance(value, dict):
            setattr(others, name, {key: one for key, one in value.items() if key not in ids})
        elif isinstance(value, (set, frozenset)):
            setattr(others, name, value - ids)
    return others


def hide_from_connector(scheduler: Scheduler, guard: Guard) -> str:
    """Hide probes from vLLM's KV connector. Return the reason why they cannot be hidden; empty if they are hidden or
    there is no connector.

    guard: trips if probes cannot be removed from a later step.
    """
    if scheduler.connector is None:
        return ""
    if lacks := required_api.missing(required_api.Imported(), required_api.CONNECTOR):
        return f"vLLM {vllm_version()} lacks: {', '.join(lacks)}"
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    if reason := obstacle(scheduler.connector, (KVConnectorBase_V1, SupportsHMA)):
        return reason
    if minor() < COPIES_READ_FROM and has(scheduler.connector, "OffloadingConnector"):
        return f"the OffloadingConnector of vLLM {vllm_version()} must see every request that gets KV blocks"
    try:
        hide(scheduler, KVCacheBlockCopy, guard)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
