"""Makes vLLM stop a request at the end of its thinking and keep its KV blocks for another engine, over NixlConnector.

vLLM keeps the blocks of a request with `do_remote_decode` that ends at a stop token, until another engine has read them
or the connector's lease is over. The module sets both for a live request, and tells the client where the request goes
on in the field `stop_reason`, which vLLM passes on unchanged, also in streams. Nothing here imports vLLM. Runs on the
engine-core thread.
"""

from __future__ import annotations

import functools
import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_agent.core.hand_overs import NO_CONNECTOR
from meridian_agent.core.request_info import handed_over_ref
from meridian_agent.vllm_adapter import request_api, required_api, stop_tokens
from meridian_agent.vllm_adapter.version import vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meridian_agent.core.guard import Guard
    from meridian_agent.vllm_types import Request, Scheduler

# Beginning of the `stop_reason` of a request that goes on on another engine; JSON follows.
SIGN = "meridian-handover:"
# The connectors whose blocks another engine can read, by a class in their ancestry, and why the others cannot do it.
PULL, PUSH = "NixlPullConnector", "NixlPushConnector"
# Lease of vLLM's connector in seconds, if its configuration names none.
LEASE_S = 30
# Seconds before the end of the lease from which on vLLM's reader declines to read (pull_worker.py).
MARGIN_S = 5
# Methods that vLLM calls when a request ends.
ENDS = ("request_finished", "request_finished_all_groups")


class Continuation(NamedTuple):
    """Where an armed request goes on. stops: the tokens after which it does. own: the request's own stop tokens."""

    url: str
    ref: str
    stops: tuple[int, ...]
    own: Any


def abilities(scheduler: Scheduler, guard: Guard) -> dict[str, Any]:
    """Return what the engine can do with handovers, as fields of EngineFacts. guard: trips if a request that was
    stopped cannot be described."""
    lacks = required_api.missing(required_api.Imported(), required_api.HAND_OVER) if scheduler.connector else []
    lacking = f"vLLM {vllm_version()} lacks: {', '.join(lacks)}" if lacks else ""
    reason = lacking or no_hand_over(scheduler)
    return {
        "hand_over": None if reason else HandOverPort(scheduler, guard),
        "no_hand_over": reason,
        "no_answer_handed_over": lacking or no_answer_handed_over(scheduler),
    }


def no_hand_over(scheduler: Scheduler) -> str:
    """Return the reason why this engine cannot hand requests over; empty if it can."""
    if reason := _no_reading(scheduler, "is_kv_producer", "kv_producer"):
        return reason
    # Only vLLM's own prefill instances copy all blocks of a request to that memory.
    if getattr(getattr(scheduler.connector, "connector_scheduler", None), "use_host_buffer", False):
        return "kv_buffer_device is 'cpu', so another engine would read blocks that are not copied there"
    if (lease_s := _extra(scheduler, "kv_lease_duration", LEASE_S)) <= MARGIN_S:
        return f"kv_lease_duration is {lease_s} s; a reader declines in the last {MARGIN_S} s"
    return ""


def no_answer_handed_over(scheduler: Scheduler) -> str:
    """Return the reason why this engine cannot answer requests that other engines hand over; empty if it can."""
    if reason := _no_reading(scheduler, "is_kv_consumer", "kv_consumer"):
        return reason
    if not _extra(scheduler, "bidirectional_kv_xfer", False):
        return "bidirectional_kv_xfer is not set, without which vLLM reads blocks that are no longer kept"
    if (kept_s := _extra(scheduler, "decoder_kv_blocks_ttl", 480)) != 0:
        return f"decoder_kv_blocks_ttl is {kept_s}, so the engine would keep the blocks of its answers; set it to 0"
    if (policy := scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy) != "recompute":
        return f"kv_load_failure_policy is {policy!r}, so blocks that cannot be read end the request; set 'recompute'"
    return ""


def _no_reading(scheduler: Scheduler, able: str, role: str) -> str:
    if scheduler.connector is None:
        return NO_CONNECTOR
    names = [owner.__name__ for owner in type(scheduler.connector).__mro__]
    transfer, parallel = scheduler.vllm_config.kv_transfer_config, scheduler.vllm_config.parallel_config
    ranks = max(parallel.decode_context_parallel_size, parallel.pipeline_parallel_size)
    obstacles = {
        "NixlPushConnector fails if the engines list different numbers of blocks, as at a block's edge": PUSH in names,
        f"{transfer.kv_connector} keeps no blocks at the end of thinking that others can read": PULL not in names,
        f"kv_role is {transfer.kv_role}, not {role} or kv_both": not getattr(transfer, able),
        "the model has several KV cache groups": len(scheduler.kv_cache_config.kv_cache_groups) != 1,
        "the engine splits the context or the layers among ranks": ranks > 1,
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def _extra(scheduler: Scheduler, name: str, default: Any) -> Any:
    return scheduler.vllm_config.kv_transfer_config.get_from_extra_config(name, default)


def drop_unfit_blocks(request: Request, able: bool, block_size: int) -> str:
    """Let this engine compute the KV of a request that continues another engine's, if it cannot read the blocks that
    the request names; return why, or an empty text. able: the engine can answer handed-over requests.

    vLLM's engine core ends if a request names fewer blocks than its prompt fills, and reads other requests' KV if the
    request names more.
    """
    params = request.kv_transfer_params
    if not params or not handed_over_ref(request):
        return ""
    blocks, wanted = _only_group(params.get("remote_block_ids")), -(-request.num_prompt_tokens // block_size)
    reason = ""
    if not able:
        reason = "this engine cannot read the KV of a request that another engine hands over"
    elif len(blocks) != wanted or params.get("remote_blocks_expiry_time") is None:
        reason = f"the request names {len(blocks)} blocks and its prompt fills {wanted}"
    if reason:
        request.kv_transfer_params = None
    return reason


def _only_group(groups: Any) -> Sequence[int]:
    one = isinstance(groups, (list, tuple)) and len(groups) == 1 and isinstance(groups[0], (list, tuple))
    return groups[0] if one else ()


class HandOverPort:
    """The requests of one engine that vLLM is to stop at the end of their thinking.

    Lives as long as the engine, so that a request that was stopped is continued even if the agent has failed meanwhile.
    guard: trips if a stopped request cannot be described.
    """

    def __init__(self, scheduler: Scheduler, guard: Guard) -> None:
        self._scheduler, self._guard = scheduler, guard
        self._lease_s = float(_extra(scheduler, "kv_lease_duration", LEASE_S))
        self._targets: dict[str, Continuation] = {}
        # Ids of live requests that the connector's workers know as requests whose blocks are to be read.
        self._registered: set[str] = set()
        # Number of kept blocks of the requests that were handed over and not taken yet.
        self._handed_over: dict[str, int] = {}
        for name in ENDS:
            if (call := getattr(scheduler.connector, name, None)) is not None:
                setattr(scheduler.connector, name, self._ending(call))

    def arm(self, request: Request, url: str, ref: str, stops: Sequence[int]) -> None:
        """Stop a live request after one of these tokens."""
        if (before := self._targets.get(request.request_id)) is not None:
            stop_tokens.replace(request, before.own)
        own = stop_tokens.stop_also_after(request, stops)
        self._targets[request.request_id] = Continuation(url, ref, tuple(stops), own)
        if request.request_id not in self._registered:
            self._registered.add(request.request_id)
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), "do_remote_decode": True}
            held = self._scheduler.kv_cache_manager.get_blocks(request.request_id)
            self._scheduler.connector.update_state_after_alloc(request, held, 0)

    def disarm(self, request: Request) -> None:
        """Let a live request give its answer on this engine; does nothing if the request is not armed."""
        if (target := self._targets.pop(request.request_id, None)) is not None:
            stop_tokens.replace(request, target.own)

    def disarm_all(self) -> None:
        """Let all live requests give their answers on this engine, and forget those that were handed over, of which no
        agent tells any more."""
        self._handed_over.clear()
        for request_id in list(self._targets):
            if (request := self._scheduler.requests.get(request_id)) is not None:
                self.disarm(request)

    def take(self, request_id: str) -> int | None:
        """Return, once, the number of blocks that are kept of a request that was handed over; None for every other
        request."""
        return self._handed_over.pop(request_id, None) if self._handed_over else None

    def _ending(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that vLLM calls when a request ends, and that returns (whether the blocks are kept, what the
        reader needs)."""

        @functools.wraps(call)
        def ended(request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in self._registered:
                return call(request, *args, **kwargs)
            self._registered.discard(request.request_id)
            target = self._targets.pop(request.request_id, None)
            if target is None or not request_api.stopped_after(request, target.stops):
                # The connector's workers forget an aborted request at once. They keep the blocks of every other
                # request, although no engine reads these.
                with request_api.shown_as_aborted(request):
                    return call(request, *args, **kwargs)
            kept, params = call(request, *args, **kwargs)
            try:
                request.stop_reason, blocks = self._described(request, target, params if kept else None)
                self._handed_over[request.request_id] = blocks
            except Exception as error:
                self._guard.trip(ended, error)
            return kept, params

        return ended

    def _described(self, request: Request, target: Continuation, params: dict[str, Any] | None) -> tuple[str, int]:
        """Return what the relay needs to continue the request, and the number of blocks that are kept."""
        blocks: list[int] = []
        if params is not None:
            wanted = -(-request.num_tokens // self._scheduler.block_size)
            blocks = list(_only_group(params["remote_block_ids"]))[:wanted]
            # The newest token has no KV yet. If it would be the first token of a block, the other engine expects one
            # block more; what it reads there is overwritten before it is used.
            padded = [*blocks, *blocks[-1:] * (wanted - len(blocks))]
            expires_s = time.perf_counter() + self._lease_s
            params = {**params, "remote_block_ids": [padded], "remote_blocks_expiry_time": expires_s}
        continuation = {
            "ref": target.ref,
            "url": target.url,
            "kv_transfer_params": params if blocks else None,
            "expires_ms": int((self._lease_s - MARGIN_S) * 1e3),
            # The limit that vLLM chose, if the client named none.
            "max_tokens": request.max_tokens,
        }
        return SIGN + json.dumps(continuation), len(blocks)
