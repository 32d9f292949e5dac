"""Reads and writes vLLM's scheduler for the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian_agent.vllm_adapter.request_api import awaits_seeded_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meridian_agent.vllm_types import GrammarOutput, Request, Scheduler

# Names of the scheduler's waiting queues in the supported versions of vLLM.
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


def ungovernable(scheduler: Scheduler) -> str:
    """Return why the agent must stay out of this engine; empty if it need not."""
    # A step of a diffusion model computes a canvas of tokens several times. So a row of a step belongs to no token that
    # the agent could force, and the placeholders for unknown drafts are the canvas itself.
    if getattr(scheduler.vllm_config.model_config, "is_diffusion", False):
        return "the model is a diffusion model"
    # Each of the processes that compute one model has a scheduler, and all must decide the same without a word. vLLM
    # counts the data-parallel engines among the ranks then.
    parallel = scheduler.vllm_config.parallel_config
    is_launched = parallel.distributed_executor_backend == "external_launcher"
    if is_launched and parallel.world_size > parallel.data_parallel_size:
        return "each rank of the model has a scheduler of its own (external_launcher)"
    return ""


def captures_outputs(scheduler: Scheduler) -> bool:
    """Whether the workers capture something of every token, such as the experts that routed it. They fail if a request
    begins in the middle of a KV block, as a probe does."""
    config = getattr(scheduler.vllm_config, "aux_output_config", None)
    return bool(getattr(config, "enabled", False))


def is_async(scheduler: Scheduler) -> bool:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return isinstance(scheduler, AsyncScheduler)


def is_paused(scheduler: Scheduler) -> bool:
    """Return whether vLLM is paused, so that it makes no step with requests. Any thread may call this."""
    return _pause_state(scheduler) != "UNPAUSED"


def is_draining(scheduler: Scheduler) -> bool:
    """Return whether vLLM is to be paused once all running requests have ended (`/pause?mode=wait`), so that it takes
    in no request that waits, not even a preempted one, before it is resumed."""
    return _pause_state(scheduler) == "PAUSED_NEW"


def makes_no_step(scheduler: Scheduler) -> bool:
    """Return whether vLLM is paused at once, so that it makes no step even for the requests that it has begun."""
    return _pause_state(scheduler) == "PAUSED_ALL"


def _pause_state(scheduler: Scheduler) -> str:
    """Return the name of vLLM's PauseState; older versions of vLLM cannot be paused."""
    return str(getattr(getattr(scheduler, "pause_state", None), "name", "UNPAUSED"))


def mask_facts(scheduler: Scheduler) -> tuple[int, bool]:
    """Return the length of a row of token masks in words of 32 tokens, and whether vLLM's grammars constrain thinking,
    too, and not the answer only."""
    config = scheduler.vllm_config
    covers_thinking = getattr(getattr(config, "structured_outputs_config", None), "enable_in_reasoning", False)
    return (config.model_config.get_vocab_size() + 31) // 32, bool(covers_thinking)


def grammar_output(request_ids: list[str], bitmask: Any, base: GrammarOutput | None) -> Any:
    """Return a GrammarOutput with these mask rows. The requests that `base` covers keep their number of acceptable
    draft tokens; the requests that the agent adds accept none."""
    from vllm.v1.core.sched.output import GrammarOutput

    output = GrammarOutput(request_ids, bitmask)
    drafts = getattr(base, "num_acceptable_drafts", None)
    if drafts is not None:
        output.num_acceptable_drafts = drafts + [0] * (len(request_ids) - len(drafts))
    return output


def can_redraw(scheduler: Scheduler) -> bool:
    """Whether the workers can rewind a request's own random number generator, as they do after each piece of a prompt
    but the last. Torch's generators on CPUs cannot be rewound."""
    return str(scheduler.vllm_config.device_config.device_type) != "cpu"


def uncuttable(scheduler: Scheduler) -> str:
    """Return why the agent may cut no prompt on this engine; empty if it may cut some. Some models need all tokens of
    an image in one step, and vLLM keeps these together only if no limit is smaller than the image."""
    config = scheduler.scheduler_config
    if not config.enable_chunked_prefill:
        return "vLLM cuts no prompt into pieces (enable_chunked_prefill)"
    if config.disable_chunked_mm_input:
        return "vLLM may not cut multimodal inputs (disable_chunked_mm_input)"
    return ""


def least_piece(scheduler: Scheduler) -> int:
    """Return the tokens that a step must have for a prompt at least, so that vLLM computes a piece of the prompt.

    vLLM cuts the prompts of hybrid models at the ends of KV blocks only, and keeps as many tokens for the last piece as
    a drafter reads ahead.
    """
    at_blocks = getattr(scheduler, "need_mamba_block_aligned_split", False)
    block = scheduler.cache_config.block_size if at_blocks else 1
    return int(max(block, getattr(scheduler, "num_prefill_lookahead", 1)))


def may_cut_prompts(scheduler: Scheduler) -> bool:
    """Whether the agent may cut prompts into other pieces than vLLM does. On a CPU this is forbidden while a request
    with a seed is in its prompt."""
    if uncuttable(scheduler):
        return False
    return can_redraw(scheduler) or not _any_seeded_prompt(scheduler.requests.values())


def would_cut_seeded(scheduler: Scheduler, tokens: int, *, all_decode: bool) -> bool:
    """Whether vLLM may cut the prompt of a request with a seed because something else takes `tokens` of the coming
    step, on a CPU, where the engine then fails. all_decode: no running request is in its prompt."""
    if can_redraw(scheduler):
        return False
    running = scheduler.running
    if not all_decode and _any_seeded_prompt([request for request in running if request.is_prefill_chunk]):
        return True
    if len(running) >= scheduler.max_num_running_reqs or not anything_waits(scheduler):
        return False
    waiting = [request for name in QUEUES for request in getattr(scheduler, name, ())]
    if not _any_seeded_prompt(waiting):
        return False
    others, pieces = wanted_tokens(scheduler)
    arriving = sum(request.num_tokens - request.num_computed_tokens for request in waiting)
    return bool(others + sum(pieces) + arriving + tokens > scheduler.max_num_scheduled_tokens)


def _any_seeded_prompt(requests: Iterable[Request]) -> bool:
    return any(request.sampling_params is not None and awaits_seeded_token(request) for request in requests)


def adapters_fit(scheduler: Scheduler) -> bool:
    """Whether the LoRA adapters of all requests fit into one step.

    vLLM counts the adapters of the requests in the step before it admits others. If the step leaves out the running
    requests of an adapter, vLLM may admit one adapter too many, and fails in the next step that has them all.
    """
    if (config := scheduler.lora_config) is None:
        return True
    adapters = {r.lora_request.lora_int_id for r in scheduler.requests.values() if r.lora_request is not None}
    return len(adapters) <= int(config.max_loras)


def admission_limit_name(scheduler: Scheduler) -> str:
    """Return the name of the scheduler attribute that limits how many requests run at once. Up to vLLM 0.30 this limit
    is max_num_running_reqs, which is also the number of slots in the model runner."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def waiting_with_blocks(scheduler: Scheduler) -> int:
    """Return the number of waiting requests that hold KV blocks, such as requests whose KV comes from another engine.
    vLLM admits these before all others if it has a queue for them."""
    return len(getattr(scheduler, "kv_holding_waiting", ()))


def anything_waits(scheduler: Scheduler) -> bool:
    """Whether a request waits to be admitted."""
    return bool(scheduler.get_request_counts()[1])


def wanted_tokens(scheduler: Scheduler) -> tuple[int, list[int]]:
    """Return how many tokens of the next step the running requests take without any limit of the agent: first all
    requests together that are past their prompt, then a list with one number for each prompt that is computed in
    pieces. If there is no such prompt and the step has tokens to spare, the first number is an upper bound."""
    running = scheduler.running
    pieces = [_tokens_left(request) for request in running if request.is_prefill_chunk]
    most = len(running) * (1 + scheduler.num_spec_tokens)
    if not pieces and 2 * most <= scheduler.max_num_scheduled_tokens:
        return most, []
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    return sum(map(_tokens_left, _decodes(scheduler))), [min(piece, threshold or piece) for piece in pieces]


def decode_tokens(scheduler: Scheduler) -> int:
    """Return how many tokens of the next step the running requests take that are past their prompt, without those that
    the step leaves out. If no prompt is computed in pieces, this is an upper bound for the coming steps, too, which may
    have more draft tokens."""
    if any(request.is_prefill_chunk for request in scheduler.running):
        return sum(map(_tokens_left, _decodes(scheduler)))
    return len([*_decodes(scheduler)]) * (1 + scheduler.num_spec_tokens)


def _decodes(scheduler: Scheduler) -> Iterator[Request]:
    """Yield the running requests that are past their prompt and may join the next step."""
    step = scheduler.current_step + 1
    return (r for r in scheduler.running if not r.is_prefill_chunk and step >= r.next_decode_eligible_step)


def input_tokens(scheduler: Scheduler, sequences: int) -> int:
    """Return how many tokens fit in the workers' buffers in a step with this many sequences. Some drafters reserve
    places in the buffers for each sequence."""
    drafting = scheduler.vllm_config.speculative_config
    places = drafting.max_num_new_slots_for_drafting if drafting is not None else 0
    return int(scheduler.scheduler_config.max_num_batched_tokens - places * sequences)


def _tokens_left(request: Request) -> int:
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def piece_limits(scheduler: Scheduler, tokens: int) -> list[tuple[Any, str, int]]:
    """Return the vLLM settings that limit each piece of a prompt to this many tokens, as (object, attribute, value).
    From vLLM 0.31 on an option raises such a limit to a fair share of the step, so the settings switch the option
    off."""
    limits: list[tuple[Any, str, int]] = [(scheduler.scheduler_config, "long_prefill_token_threshold", tokens)]
    if getattr(scheduler, "adaptive_long_prefill_threshold", False):
        limits.append((scheduler, "adaptive_long_prefill_threshold", False))
    return limits


def fcfs(scheduler: Scheduler) -> bool:
    """Whether the scheduler preempts from the end of its running list and queues first come, first served."""
    return str(getattr(scheduler.policy, "value", scheduler.policy)) == "fcfs"
