"""What imports vLLM, with `markers` for its reasoning parsers: installation, and what the rest of the agent asks of
vLLM's tokenizers and request types.

`install` runs in every vLLM process (front end, engine core, workers); each hook acts only where it is reached. Nothing
here touches a GPU at import.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm

from meridian_agent import connectors, needs
from meridian_agent.phases import boundary_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meridian_agent.guard import Guard
    from meridian_agent.phases import Markers

logger = logging.getLogger("vllm.meridian")

# The first minor release whose OffloadingConnector learns from a step's block copies, too, that a block is used anew.
COPIES_TOLD = (0, 29)
# Minor releases whose hooks were read and whose tests were run or whose sources were compared.
SUPPORTED = ((0, 26), (0, 33))
_INSTALLED = "_meridian_installed"
# A tool call to render chat templates with.
TOOL: dict[str, Any] = {"name": "meridiantool", "arguments": {"meridianargument": 1}}


class Unsupported(RuntimeError):  # noqa: N818
    """This vLLM cannot host the agent; the text says why."""


def vllm_version() -> str:
    return str(vllm.__version__)


def _minor() -> tuple[int, int]:
    parts = vllm_version().split("+")[0].split(".")
    return int(parts[0]), int(parts[1])


def unfit() -> str:
    """Why this vLLM cannot host the agent: its version, or every hook that it lacks; empty when it can."""
    low, high = SUPPORTED
    if not low <= _minor() <= high:
        return f"vLLM {vllm_version()} is outside the supported {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    lacks = needs.missing(needs.Imported(), needs.ENGINE)
    return f"vLLM {vllm_version()} lacks: {', '.join(lacks)}" if lacks else ""


def unfit_worker(v2_runner: bool) -> str:
    """The same of what only a worker uses, with one of vLLM's two model runners."""
    lacks = needs.missing(needs.Imported(), needs.V2_RUNNER if v2_runner else needs.V1_RUNNER)
    return f"vLLM {vllm_version()} lacks: {', '.join(lacks)}" if lacks else ""


def install() -> None:
    """Wrap the two places through which vLLM builds schedulers and workers.

    In a vLLM that cannot host the agent nothing is wrapped but one call, from which its engine core tells the control
    plane why; Unsupported is raised then.
    """
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if getattr(SchedulerConfig, _INSTALLED, False):
        return
    setattr(SchedulerConfig, _INSTALLED, True)
    if reason := unfit():
        _after_choosing(SchedulerConfig, functools.partial(_say_absent, reason))
        raise Unsupported(reason)
    _after_choosing(SchedulerConfig, _governed)
    _wrap_worker(WorkerWrapperBase)
    logger.info("meridian: agent installed in vLLM %s", vllm_version())


def _after_choosing(config_class: Any, then: Callable[[type], type]) -> None:
    """Have `then` say what becomes of every scheduler class that vLLM chooses; only its engine core chooses one."""
    original = config_class.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> type:
        chosen: type = original(self)
        try:
            return then(chosen)
        except Exception:
            logger.exception("meridian: %s is left as it is", chosen)
            return chosen

    config_class.get_scheduler_cls = get_scheduler_cls


def _governed(chosen: type) -> type:
    """A subclass of the same class with our mixin in front."""
    from meridian_agent.scheduler import governed

    return governed(chosen)


def _say_absent(reason: str, chosen: type) -> type:
    from meridian_agent.absence import say_absent

    say_absent(reason)
    return chosen


def _wrap_worker(wrapper_class: Any) -> None:
    """Attach the observer to each worker once its model is loaded; hide probes from its KV connector, once it has one.

    vLLM loads plugins inside `init_worker`; `init_device` is the first call of its own that comes after.
    """
    original = wrapper_class.init_device

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            from meridian_agent.observe import attach

            _after(self.worker, "load_model", functools.partial(attach, self.worker, unfit_worker))
        except Exception:
            logger.exception("meridian: this worker will not report entropy")
        try:
            _after(self.worker, "initialize_from_config", _hide_from_worker_connector)
        except Exception:
            logger.exception("meridian: this worker will tell its KV connector of probes that have ended")
        return result

    wrapper_class.init_device = init_device


def _hide_from_worker_connector() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from meridian_agent.probes import PREFIX

    if has_kv_transfer_group():
        connectors.hide_finished(get_kv_transfer_group(), PREFIX)


def _after(owner: Any, name: str, then: Callable[[], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            then()
        except Exception:
            logger.exception("meridian: after %s", name)
        return result

    setattr(owner, name, call)


# ------------------------------------------------------------------------------------------------- asked by the engine


def tokenizer_of(vllm_config: Any) -> Any:
    """The engine's tokenizer, or None when it runs without one."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def boundaries(vllm_config: Any) -> bytes:
    """Sentence and paragraph flags of every token id, read from the tokenizer once; empty without one."""
    tokenizer = tokenizer_of(vllm_config)
    if tokenizer is None:
        return b""
    ids = [[i] for i in range(min(len(tokenizer), vllm_config.model_config.get_vocab_size()))]
    return bytes(boundary_flag(text) for text in tokenizer.batch_decode(ids))


@dataclass(frozen=True, slots=True)
class Template:
    """What the chat template does with earlier turns, found by rendering some.

    strips_think: thinking is gone from a turn that a user's turn follows.
    tool_call: token that begins a tool call, where thinking stays in the chat until the tool was answered; else None.
    """

    strips_think: bool = False
    tool_call: int | None = None


def template_of(tokenizer: Any, markers: Markers) -> Template:
    """Render the model's own chat template with thinking in an earlier turn and, where it can, with a tool call.

    A template that keeps thinking in tool loops and does not say where a tool call begins counts as one that keeps all.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return Template()
    known = (markers.starts, markers.ends) if markers.known else ((), ())
    start, end = (tokenizer.decode(list(m[0])) if m else "" for m in known)
    user = {"role": "user", "content": "meridianquestion"}
    said = {"role": "assistant", "content": f"{start}meridianthought{end}meridiananswer"}
    called = {**said, "tool_calls": [{"type": "function", "id": "call00000", "function": dict(TOOL)}]}
    answered = {"role": "tool", "content": "meridianresult", "tool_call_id": "call00000", "name": TOOL["name"]}

    def render(*turns: dict[str, Any]) -> str:
        try:
            return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True))
        except Exception as error:
            logger.info("meridian: the chat template does not render %s: %s", [t["role"] for t in turns], error)
            return ""

    text = render(user, said, user)
    if "meridiananswer" not in text or "meridianthought" in text:
        return Template()
    loop = render(user, called, answered)
    if "meridianthought" not in loop or str(TOOL["name"]) not in loop:
        return Template(strips_think=True)
    before_call = loop[: loop.index(str(TOOL["name"]))].rpartition("meridiananswer")[2]
    general = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    added = set(tokenizer.get_added_vocab().values()).difference(general)
    token = next((t for t in tokenizer.encode(before_call, add_special_tokens=False) if t in added), None)
    return Template(token is not None, token)


def is_async(scheduler: Any) -> bool:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return isinstance(scheduler, AsyncScheduler)


def grammar_output(request_ids: list[str], bitmask: Any, base: Any) -> Any:
    """A GrammarOutput of these rows; `base` keeps its say on the drafts of the requests it covers, ours accept none."""
    from vllm.v1.core.sched.output import GrammarOutput

    output = GrammarOutput(request_ids, bitmask)
    drafts = getattr(base, "num_acceptable_drafts", None)
    if drafts is not None:
        output.num_acceptable_drafts = drafts + [0] * (len(request_ids) - len(drafts))
    return output


def probe_request(parent: Any, request_id: str, tokens: list[int]) -> Any:
    """A one-token request over `tokens` that shares the parent's cached blocks."""
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
        # Under the priority policy it is first in the queue and no victim: it is gone after one step.
        priority=-(1 << 31),
    )
    # The parent's hashes cover the shared prefix: only what follows is hashed anew.
    probe.block_hashes = list(parent.block_hashes)
    probe._block_hasher = parent._block_hasher
    probe.update_block_hashes()
    return probe


def hide_from_cache_stats(manager: Any, prefix: str) -> None:
    """Keep requests out of vLLM's prefix-cache metrics, by what their ids begin with."""
    record = getattr(manager, "record_prefix_cache_stats", None)
    if record is None:
        _look_up_unrecorded(manager, prefix)
        return

    def record_unless_hidden(request: Any, *args: Any, **kwargs: Any) -> None:
        if not request.request_id.startswith(prefix):
            record(request, *args, **kwargs)

    manager.record_prefix_cache_stats = record_unless_hidden


def _look_up_unrecorded(manager: Any, prefix: str) -> None:
    """The same up to 0.26, where looking up is what records."""
    lookup = manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        records = manager.log_stats
        manager.log_stats = records and not request.request_id.startswith(prefix)
        try:
            return lookup(request, *args, **kwargs)
        finally:
            manager.log_stats = records

    manager.get_computed_blocks = get_computed_blocks


def hide_from_connector(scheduler: Any, prefix: str, guard: Guard) -> str:
    """Keep requests from vLLM's KV connector, by what their ids begin with; why they cannot be, or empty.

    guard: trips where a step's cannot be left out after all.
    """
    if scheduler.connector is None:
        return ""
    if lacks := needs.missing(needs.Imported(), needs.CONNECTOR):
        return f"vLLM {vllm_version()} lacks: {', '.join(lacks)}"
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    if reason := connectors.obstacle(scheduler.connector, (KVConnectorBase_V1, SupportsHMA)):
        return reason
    if _minor() < COPIES_TOLD and connectors.has(scheduler.connector, "OffloadingConnector"):
        return f"the OffloadingConnector of vLLM {vllm_version()} must know of every request that is given blocks"
    try:
        connectors.hide(scheduler, prefix, KVCacheBlockCopy, guard)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def share_blocks(scheduler: Any, shared_with: Callable[[str], tuple[str, int] | None], guard: Guard) -> bool:
    """Let some requests begin on the KV of another, a last block that is not full included; whether this engine can.

    shared_with: by request id, the other request and how many of its tokens. vLLM takes such a block as a partial
    prefix hit: it is copied on write, so neither request sees what the other writes. guard: runs this, in the midst of
    `schedule`.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    one_kind = len(groups) == 1 and type(groups[0]) is FullAttentionManager
    if not (manager.enable_caching and one_kind):
        return False
    block_size, lookup = groups[0].block_size, manager.get_computed_blocks

    def shared_blocks(request_id: str, found: Any) -> Any:
        if (shared := shared_with(request_id)) is None:
            return found
        other, tokens = shared
        (blocks,) = manager.get_blocks(other).blocks or ((),)
        needed = -(-tokens // block_size)
        if len(blocks) < needed:
            return found
        return (manager.create_kv_cache_blocks((list(blocks[:needed]),)), tokens, *found[2:])

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = lookup(request, *args, **kwargs)
        return guard.run(shared_blocks, request.request_id, found) or found

    manager.get_computed_blocks = get_computed_blocks
    return True


def aborted_status() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def can_redraw(scheduler: Any) -> bool:
    """Whether the workers can take back what they drew from a request's own random numbers, as they do after each piece
    of a prompt but the last; torch's generators on CPUs cannot."""
    return str(scheduler.vllm_config.device_config.device_type) != "cpu"


def may_cut_prompts(scheduler: Any) -> bool:
    """Whether the workers can do with prompts in other pieces than vLLM makes by itself."""
    if can_redraw(scheduler):
        return True
    requests = (request for request in scheduler.requests.values() if request.sampling_params is not None)
    return not any(map(awaits_seeded_token, requests))


def awaits_seeded_token(request: Any) -> bool:
    """Whether a request with a seed of its own has more than its newest token to compute before it goes on."""
    return request.sampling_params.seed is not None and request.num_computed_tokens + 1 < request.num_tokens


def never_allows(request: Any, tokens: Sequence[int]) -> bool:
    """Whether a request's own parameters rule one of these tokens out."""
    params = request.sampling_params
    allowed, bias, bad = params.allowed_token_ids, params.logit_bias or {}, params.bad_words_token_ids or ()
    return (
        (allowed is not None and not set(allowed).issuperset(tokens))
        or any(bias.get(token) == -math.inf for token in tokens)
        or any(word[-1] in tokens for word in bad)
    )


def not_yet_allows(request: Any, tokens: Sequence[int], unknown: int) -> bool:
    """Whether one of these tokens would finish a request that has not made its min_tokens yet. unknown: tokens that it
    may have made besides those that vLLM has accounted."""
    params = request.sampling_params
    made = request.num_output_tokens + unknown
    return made < params.min_tokens and not params.all_stop_token_ids.isdisjoint(tokens)


def waits_preempted(request: Any) -> bool:
    """Whether a request waits to be resumed."""
    return str(request.status.name) == "PREEMPTED"


def waits(request: Any) -> bool:
    """Whether a request belongs into the waiting queue proper."""
    return str(request.status.name) in ("WAITING", "PREEMPTED")


def admission_limit_name(scheduler: Any) -> str:
    """The attribute that limits how many requests run at once; up to 0.30 the runner's slots are that limit."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def wanted_tokens(scheduler: Any) -> tuple[int, list[int]]:
    """Tokens of the coming step that the running requests take by themselves: each prompt in pieces, as the second, and
    all others together. Where there is no such prompt and tokens abound, others are the most that they may take."""
    running = scheduler.running
    pieces = [_tokens_left(request) for request in running if request.is_prefill_chunk]
    most = len(running) * (1 + scheduler.num_spec_tokens)
    if not pieces and 2 * most <= scheduler.max_num_scheduled_tokens:
        return most, []
    threshold, step = scheduler.scheduler_config.long_prefill_token_threshold, scheduler.current_step + 1
    others = (r for r in running if not r.is_prefill_chunk and step >= r.next_decode_eligible_step)
    return sum(map(_tokens_left, others)), [min(piece, threshold or piece) for piece in pieces]


def input_tokens(scheduler: Any, sequences: int) -> int:
    """Tokens that the workers' buffers take in a step of so many sequences: some drafters want places of their own."""
    drafting = scheduler.vllm_config.speculative_config
    places = drafting.max_num_new_slots_for_drafting if drafting is not None else 0
    return int(scheduler.scheduler_config.max_num_batched_tokens - places * sequences)


def _tokens_left(request: Any) -> int:
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def piece_limits(scheduler: Any, tokens: int) -> list[tuple[Any, str, int]]:
    """What limits each piece of a prompt to so many tokens: (object, attribute, value). From 0.31 on vLLM may be told
    to raise such a limit to a fair share of the step."""
    limits: list[tuple[Any, str, int]] = [(scheduler.scheduler_config, "long_prefill_token_threshold", tokens)]
    if getattr(scheduler, "adaptive_long_prefill_threshold", False):
        limits.append((scheduler, "adaptive_long_prefill_threshold", False))
    return limits


def fcfs(scheduler: Any) -> bool:
    """Whether the scheduler preempts from the end of its running list and queues first come, first served."""
    return str(getattr(scheduler.policy, "value", scheduler.policy)) == "fcfs"
