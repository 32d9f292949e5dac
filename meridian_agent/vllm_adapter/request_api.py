"""Reads vLLM's requests and creates the requests that run EAT probes."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from meridian_agent.vllm_types import Request


def probe_request(parent: Request, request_id: str, tokens: list[int], shared: int) -> Any:
    """Return a request that generates one token after the prompt `tokens` and shares the parent's cached blocks.

    shared: number of the first tokens that are the parent's, too.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    probe = Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        pooling_params=None,
        client_index=parent.client_index,
        arrival_time=parent.arrival_time,
        lora_request=parent.lora_request,
        cache_salt=parent.cache_salt,
        # Under vLLM's priority policy the probe is first in the queue and never preempted; it ends after one step.
        priority=-(1 << 31),
    )
    # The parent's block hashes cover the shared prefix, so only the tokens after it have to be hashed. The parent may
    # have tokens after the prefix, which are in no more blocks than there are such tokens.
    past = parent.num_tokens - shared
    probe.block_hashes = parent.block_hashes[: max(0, len(parent.block_hashes) - past)]
    probe._block_hasher = parent._block_hasher
    probe.update_block_hashes()
    return probe


def aborted_status() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def cause_of(status: Any) -> str:
    """Return the finish reason, abort or error, of requests that were given this status without a token of theirs."""
    return "error" if status.name == "FINISHED_ERROR" else "abort"


def awaits_seeded_token(request: Request) -> bool:
    """Whether a request with a seed still has more tokens to compute than its newest one before it generates the next.
    The workers keep the random number generator of a streaming session, also for later inputs without a seed."""
    seeded = request.sampling_params.seed is not None or getattr(request, "resumable", False)
    return seeded and request.num_computed_tokens + 1 < request.num_tokens


def never_allows(request: Request, tokens: Sequence[int]) -> bool:
    """Whether a request's sampling parameters forbid one of these tokens."""
    params = request.sampling_params
    allowed, bias, bad = params.allowed_token_ids, params.logit_bias or {}, params.bad_words_token_ids or ()
    return (
        # vLLM replays a trace whatever the masks allow.
        bool(getattr(params, "trace_decode_token_ids", None))
        or (allowed is not None and not set(allowed).issuperset(tokens))
        or any(bias.get(token) == -math.inf for token in tokens)
        or any(word[-1] in tokens for word in bad)
    )


def has_budget(request: Request) -> bool:
    """Whether vLLM itself ends the request's thinking after a number of tokens."""
    return getattr(request.sampling_params, "thinking_token_budget", None) is not None


def stops_at(request: Request, tokens: Sequence[int]) -> bool:
    """Whether vLLM ends the request at one of these tokens."""
    return not request.sampling_params.all_stop_token_ids.isdisjoint(tokens)


def grammar_takes(request: Request, tokens: Sequence[int]) -> bool:
    """Whether the grammar of a request takes all of these tokens next."""
    return len(request.structured_output_request.grammar.validate_tokens(list(tokens))) == len(tokens)


def grammar_holds(request: Request) -> bool:
    """Whether a request's grammar constrains its newest token. vLLM notes False while its reasoning parser sees the
    request reason; no note means that no parser has looked, so that the grammar holds from the first token on."""
    structured = request.structured_output_request
    return structured is not None and getattr(structured, "reasoning_ended", None) is not False


def not_yet_allows(request: Request, tokens: Sequence[int], unknown: int) -> bool:
    """Whether one of these tokens would finish a request that has not generated its min_tokens yet. unknown: number of
    tokens that the request may have generated beyond those that vLLM has counted."""
    params = request.sampling_params
    generated = request.num_output_tokens + unknown
    return generated < params.min_tokens and stops_at(request, tokens)


def waits_preempted(request: Request) -> bool:
    """Whether a request was preempted and waits to be resumed."""
    return str(request.status.name) == "PREEMPTED"


def loses_tokens(request: Request) -> bool:
    """Whether vLLM drops the tokens of the steps that are under way with a request, which has just been preempted; by
    default it delivers them."""
    return bool(getattr(request, "drop_stale_output", False) and getattr(request, "num_stale_output_tokens", 0))


def waits(request: Request) -> bool:
    """Whether a request's status is one that belongs in vLLM's waiting queue."""
    return str(request.status.name) in ("WAITING", "PREEMPTED")


def runs(request: Request) -> bool:
    return str(request.status.name) == "RUNNING"


def is_queued(request: Request) -> bool:
    """Whether a request waits for its first step, or was preempted; it may have to wait for something else before."""
    return str(request.status.name).startswith("WAITING") or waits_preempted(request)


def is_ready(request: Request) -> bool:
    """Whether a request waits for its first step, or was preempted, and waits for nothing else. vLLM finds out that a
    grammar is complete only when a place is free."""
    name = str(request.status.name)
    grammar = getattr(request.structured_output_request, "grammar", None)
    return waits(request) or (name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR" and bool(grammar))


def waits_for_input(request: Request) -> bool:
    """Whether a streaming session has answered all of its inputs so far."""
    return str(request.status.name) == "WAITING_FOR_STREAMING_REQ"


def stopped_after(request: Request, tokens: Container[int]) -> bool:
    """Whether a request has ended because it generated one of these tokens. Engines that only encode images stop their
    requests without a token."""
    return str(request.status.name) == "FINISHED_STOPPED" and any(t in tokens for t in request.output_token_ids[-1:])


@contextlib.contextmanager
def shown_as_aborted(request: Request) -> Iterator[None]:
    """Show a request that has ended as an aborted one while the block runs."""
    status, request.status = request.status, aborted_status()
    try:
        yield
    finally:
        request.status = status
