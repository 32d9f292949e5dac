"""Lets a step compute an EAT probe as one more row of logits of the probed request itself.

vLLM schedules the end marker behind the request's newest token as it schedules a draft token. After scheduling, the
agent takes the marker out of vLLM's own books again, so vLLM sees a request that gets one token. Only the worker
(`worker.probe_rows`) knows that the step has another row. Runs on the engine-core thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_agent.core.step_signals import PROBE_ROWS
from meridian_agent.vllm_adapter import scheduler_api
from meridian_agent.vllm_adapter.version import unfit_probe_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.vllm_types import Request, Scheduler, SchedulerOutput


def refusal(scheduler: Scheduler) -> str:
    """Return why no probe can be a row of its request on this engine; empty if probes can."""
    if lacking := unfit_probe_rows(bool(scheduler.use_v2_model_runner)):
        return lacking
    from vllm.v1.kv_cache_interface import AttentionSpec

    config = scheduler.vllm_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    obstacles = (
        # The step would already compute the token after the one where the probe belongs.
        (scheduler_api.is_async(scheduler), "asynchronous scheduling"),
        (scheduler.num_spec_tokens, "draft tokens"),
        (config.parallel_config.world_size > 1, "several ranks"),
        (config.lora_config is not None, "LoRA"),
        (config.cache_config.kv_sharing_fast_prefill, "fast prefill by shared KV"),
        (config.model_config.enable_prompt_embeds, "prompt embeddings"),
        (not all(isinstance(group.kv_cache_spec, AttentionSpec) for group in groups), "a cache that is not attention"),
    )
    return next((reason for holds, reason in obstacles if holds), "")


def fits(scheduler: Scheduler, request: Request, tokens: int) -> bool:
    """Return whether the coming step may compute a probe of this many tokens behind the request's newest token."""
    known = request.num_tokens
    if (
        request.num_computed_tokens != known - 1
        or request.is_prefill_chunk
        or request.status.name != "RUNNING"
        or request.structured_output_request is not None
        or getattr(request, "mm_features", None)
        or known + tokens >= scheduler.max_model_len
    ):
        return False
    # A KV connector may store a block as soon as all its places are computed, so the marker must not take the last one.
    return scheduler.connector is None or (known + tokens) // scheduler.block_size == known // scheduler.block_size


def append(request: Request, tokens: Sequence[int]) -> None:
    """Let vLLM schedule these tokens behind the request's newest token."""
    request.spec_token_ids = list(tokens)


def take_back(scheduler: Scheduler, output: SchedulerOutput) -> dict[str, list[int]]:
    """Take the tokens that `append` added out of vLLM's books, tell the worker of them, and return them by request id.
    output: the SchedulerOutput of the step. An engine with draft tokens has no such tokens."""
    if scheduler.num_spec_tokens or not output.scheduled_spec_decode_tokens:
        return {}
    rows: dict[str, list[int]] = output.scheduled_spec_decode_tokens
    output.scheduled_spec_decode_tokens = {}
    setattr(output, PROBE_ROWS, rows)
    for request_id, tokens in rows.items():
        scheduler.requests[request_id].num_computed_tokens -= len(tokens)
    return rows


def forget(scheduler: Scheduler) -> None:
    """Forget the tokens that `append` has added to requests and that no step has computed."""
    for request in () if scheduler.num_spec_tokens else scheduler.running:
        request.spec_token_ids = []
