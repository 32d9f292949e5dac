"""Lets a request go on that vLLM has stopped at the model's end of sequence, as if that token had not been generated.

A worker that has sampled a token works on with it, so a token cannot be replaced once it is known. The request is
preempted instead: vLLM tells the workers all tokens of a resumed request, and the prefix cache keeps the KV of all
blocks that are full. Runs on the engine-core thread, between vLLM's own methods.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter import request_api, scheduler_api
from meridian_agent.vllm_adapter.version import unfit_premature_stops

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from meridian_agent.vllm_types import EngineCoreOutputs, Request, Scheduler


def refusal(scheduler: Scheduler) -> str:
    """Return why no request can go on past its end of sequence on this engine; empty if requests can."""
    if scheduler_api.captures_outputs(scheduler):
        return "the workers capture auxiliary outputs (enable_return_routed_experts)"
    return unfit_premature_stops()


def stopped_at(request: Request, tokens: Container[int]) -> bool:
    """Whether vLLM has just stopped a request at one of these tokens, which end the model's turns."""
    params = request.sampling_params
    return (
        request_api.stopped_after(request, tokens)
        and not getattr(request, "resumable", False)
        and not getattr(params, "ignore_eos", False)
    )


def in_flight(request: Request) -> bool:
    """Whether a step has been scheduled with a request and its output is still to come. vLLM drops this output, because
    the request has stopped."""
    return bool(getattr(request, "num_in_flight_tokens", 0))


def take_out(groups: Iterable[EngineCoreOutputs], requests: Mapping[str, Request], *, v2: bool) -> None:
    """Take the stop of these requests, with its token, out of the outputs that vLLM is about to send to the clients.
    v2: the workers run Model Runner V2."""
    for group in groups:
        if any(out.request_id in requests for out in group.outputs):
            group.outputs = [out for out in group.outputs if _is_left(out, requests.get(out.request_id), v2)]


def _is_left(out: Any, request: Any, v2: bool) -> bool:
    """Take the stop out of an output, and return whether anything is left of it. request: None if it did not stop."""
    if request is None:
        return True
    # vLLM's own list of the step's tokens, which the agent reads next, is the same one.
    out.new_token_ids.pop()
    out.finish_reason = out.stop_reason = out.spec_decode_metrics = None
    left = len(out.new_token_ids)
    # A request that resumes without a token is a new one for V2, which returns the prompt's log-probabilities again.
    if left or (out.new_prompt_logprobs_tensors is not None and not v2):
        for name in ("new_logprobs", "new_sampling_mask"):
            if (of_tokens := getattr(out, name, None)) is not None:
                setattr(out, name, of_tokens.slice_request(0, left) if left else None)
        return True
    # The request's next output says how the request began.
    request.prefill_stats, request.events = out.prefill_stats, [*(out.events or ()), *request.events]
    return False


def resume(scheduler: Any, request: Any) -> None:
    """Take a stopped request's newest token back and queue the request anew, at the front. The tokens of a step that is
    still in flight with it follow its stop, so they are dropped.

    After a fault within it, another call completes what the first one has begun: a request that has stopped has its
    token, one that is shown as running has lost it, and one that is preempted is queued.
    """
    running = type(request.status).RUNNING
    if request.is_finished():
        request.status, *_ = running, request._output_token_ids.pop(), request._all_token_ids.pop()
    hashed = getattr(scheduler, "hash_block_size", scheduler.block_size)
    del request.block_hashes[request.num_tokens // hashed :]
    request.stop_reason = None
    if request.status is running and request.num_computed_tokens:
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    elif request.status is running:
        # vLLM had preempted the request before its stop was known, and has counted that.
        request.drop_stale_output = True
        request.status, _ = type(request.status).PREEMPTED, scheduler.waiting.prepend_request(request)
    # The request may resume in the coming step, which vLLM itself never lets happen after a preemption. If it was in
    # the newest step, vLLM would not send its tokens then, which Model Runner V1 needs under asynchronous scheduling.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def show_as_running(request: Any) -> None:
    """Give a stopped request the status of a running one, so that vLLM can preempt or finish it."""
    request.status = type(request.status).RUNNING


def let_go(scheduler: Any, taken_out: Mapping[str, bool]) -> None:
    """Let requests that were to go on be as stock vLLM has them, after a fault of the agent.

    taken_out: whether the stop is taken out of the outputs, by request id; if not, the client knows that the request
    has ended.
    """
    for request_id, is_taken_out in taken_out.items():
        if (request := scheduler.requests.get(request_id)) is None:
            continue
        if is_taken_out or not request.is_finished():
            resume(scheduler, request)
        else:
            scheduler._free_request(request)
