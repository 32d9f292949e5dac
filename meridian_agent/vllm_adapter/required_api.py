"""Lists every class, method and attribute of vLLM that the agent uses, in tables, and finds those that a vLLM lacks.
What the agent uses of the objects that the engine core hands to it stands in `vllm_types`, which mypy reads, too.

There are two ways to inspect a vLLM: the imported objects, when the agent starts (`Imported`), and the sources without
importing them (`tests/vllm_sources.py`). Importing this module does not import vLLM. The check runs once in each
process, before any hook.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from meridian_agent import vllm_types

if TYPE_CHECKING:
    from collections.abc import Mapping

Table = dict[str, tuple[str, ...]]


def members_of(shape: type) -> tuple[str, ...]:
    """Return the members that a class of `vllm_types` declares, as a table has them."""
    methods = {
        name: inspect.signature(method).parameters.values()
        for name, method in vars(shape).items()
        if inspect.isfunction(method) and not name.startswith("__")
    }
    properties = [name for name, value in vars(shape).items() if isinstance(value, property)]
    calls = [f"{name}({', '.join(_argument(p) for p in [*parameters][1:])})" for name, parameters in methods.items()]
    return (*shape.__annotations__, *properties, *calls)


def _argument(parameter: inspect.Parameter) -> str:
    return "_" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else f"{parameter.name}=_"


# Maps each owner (`module:Class` or a module) to the members that it must have. A plain name is a field, or a method
# whose arguments do not matter. A call is written as the agent makes it, with `_` for each argument. `**_` means that
# the agent's override reads only the named arguments and passes on all others. `a | b` means that one of the two is
# enough.
ENGINE: Table = {
    "vllm.config.scheduler:SchedulerConfig": ("get_scheduler_cls()", *members_of(vllm_types.SchedulerConfig)),
    "vllm.config.speculative:SpeculativeConfig": ("max_num_new_slots_for_drafting",),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        # The agent's mixin overrides these methods.
        "schedule(**_)",
        "update_from_output(scheduler_output=_, model_runner_output=_, **_)",
        "get_grammar_bitmask(scheduler_output=_, **_)",
        "add_request(request=_, **_)",
        "finish_requests(request_ids=_, finished_status=_, **_)",
        "shutdown(**_)",
        "reset_prefix_cache(**_)",
        "_preempt_request(request=_, **_)",
        "_free_request_blocks(request=_, **_)",
        "_handle_invalid_blocks(**_)",
        *members_of(vllm_types.Scheduler),
    ),
    "vllm.v1.core.sched.request_queue:FCFSRequestQueue": members_of(vllm_types.RequestQueue),
    "vllm.v1.core.sched.request_queue:PriorityRequestQueue": members_of(vllm_types.RequestQueue),
    "vllm.v1.core.sched.output:GrammarOutput": ("__init__(_, _)", *members_of(vllm_types.GrammarOutput)),
    "vllm.v1.core.sched.output:NewRequestData": members_of(vllm_types.NewRequestData),
    "vllm.v1.core.sched.output:SchedulerOutput": members_of(vllm_types.SchedulerOutput),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "get_computed_blocks(request=_, **_)",
        # Up to vLLM 0.26 the statistics are recorded within get_computed_blocks.
        "record_prefix_cache_stats(request=_, **_) | log_stats",
        *members_of(vllm_types.KvCacheManager),
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": members_of(vllm_types.BlocksOfGroups),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
        "cache_blocks(request=_, **_)",
        *members_of(vllm_types.Coordinator),
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": members_of(vllm_types.GroupManager),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": (),
    "vllm.v1.core.block_pool:BlockPool": members_of(vllm_types.BlockPool),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": members_of(vllm_types.Block),
    "vllm.v1.kv_cache_interface:KVCacheConfig": members_of(vllm_types.KvCacheConfig),
    "vllm.v1.engine:EngineCoreOutputs": members_of(vllm_types.EngineCoreOutputs),
    "vllm.v1.engine:EngineCoreOutput": members_of(vllm_types.EngineCoreOutput),
    "vllm.v1.outputs:ModelRunnerOutput": members_of(vllm_types.ModelRunnerOutput),
    "vllm.v1.request:RequestStatus": ("FINISHED_ABORTED", "PREEMPTED"),
    "vllm.v1.request:Request": (
        "__init__(request_id=_, prompt_token_ids=_, sampling_params=_, pooling_params=_, client_index=_,"
        " arrival_time=_, lora_request=_, cache_salt=_, priority=_)",
        *members_of(vllm_types.Request),
    ),
    "vllm.sampling_params:SamplingParams": (
        "max_tokens",
        "temperature",
        "detokenize",
        *members_of(vllm_types.SamplingParams),
    ),
    "vllm.config.model:ModelConfig": ("get_vocab_size()", "served_model_name"),
    "vllm.config.structured_outputs:StructuredOutputsConfig": ("reasoning_parser",),
    "vllm.tokenizers": ("cached_tokenizer_from_config(_)",),
    "vllm.config.reasoning:ReasoningConfig": ("reasoning_parser", "reasoning_start_str", "reasoning_end_str"),
    "vllm.reasoning:ReasoningParser": (
        "is_reasoning_end(_)",
        "reasoning_start_str",
        "reasoning_end_str",
        "vocab",
    ),
    "vllm.reasoning:ReasoningParserManager": ("get_reasoning_parser(_)",),
    "vllm.v1.worker.worker_base:WorkerWrapperBase": ("init_device(**_)", "worker"),
    "vllm.v1.worker.worker_base:WorkerBase": (
        "load_model(**_)",
        "device",
        "model_runner",
        "parallel_config",
        "rank",
        "vllm_config",
    ),
}

# The API that the agent needs to hide probes from a KV connector. This API is checked only if the engine has a
# connector; if the API is missing, probes are refused.
CONNECTOR: Table = {
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group()", "has_kv_transfer_group()"),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "build_connector_meta(scheduler_output=_)",
        "get_finished(finished_req_ids=_, **_)",
        "get_num_new_matched_tokens(request=_, **_)",
        "on_new_request(request=_, **_)",
        "request_finished(request=_, **_)",
        "update_state_after_alloc(request=_, **_)",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": ("request_finished_all_groups(request=_, **_)",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy": ("src_block_id", "dst_block_id"),
    "vllm.v1.core.sched.output:NewRequestData": ("block_ids",),
    "vllm.v1.core.sched.output:CachedRequestData": ("req_ids", "new_block_ids"),
    "vllm.v1.worker.gpu_worker:Worker": ("initialize_from_config(_)",),
}

# The API that the agent needs to stop requests at the end of their thinking and keep their KV blocks for another
# engine; checked only if the engine has a connector. Without this API no request is handed over.
HAND_OVER: Table = {
    "vllm.config.kv_transfer:KVTransferConfig": (
        "get_from_extra_config(_, _)",
        "is_kv_consumer",
        "is_kv_producer",
        "kv_load_failure_policy",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "request_finished(request=_, **_)",
        "update_state_after_alloc(_, _, _)",
    ),
    "vllm.v1.engine:EngineCoreOutput": ("prefill_stats", "stop_reason"),
    "vllm.v1.metrics.stats:PrefillStats": ("num_local_cached_tokens",),
}

# The API that the agent needs to change each limit of the scheduler while the engine runs. Without it the policy's
# field of this name is refused.
LIMITS: dict[str, Table] = {
    # Up to vLLM 0.30 one attribute is both the limit of running requests and the number of the workers' slots, and vLLM
    # fails if more requests run than it says.
    "max_num_active_seqs": {"vllm.v1.core.sched.scheduler:Scheduler": ("max_num_active_reqs",)},
    "max_num_scheduled_tokens": {"vllm.v1.core.sched.scheduler:Scheduler": ("need_mamba_block_aligned_split",)},
    "long_prefill_token_threshold": {},
}

# The API that the agent needs to preempt requests between two steps; without it nothing is preempted for waiting
# requests.
PREEMPTION: Table = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "_preempt_request(_, _, drop_stale_output=_)",
        "num_waiting_for_streaming_input",
        "prev_step_scheduled_req_ids",
        "requires_kv_delivery",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("get_computed_blocks(_)", "watermark_blocks"),
    # With it vLLM delivers the tokens of steps that are under way after a preemption.
    "vllm.v1.request:Request": ("num_preemptions", "num_stale_output_tokens", "resumable"),
}

# The classes of requests from which the agent copies a client's effort, in processes that serve an API. Without one of
# them, or without one of its members, the effort that clients name in its API reaches no policy.
API_SERVER: Table = {
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": (
        "to_sampling_params(**_)",
        "reasoning_effort",
    ),
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": ("to_sampling_params(**_)", "reasoning"),
}

# The API through which the process that renders chats tells the engine core how it rendered them; without it the KV
# blocks of all finished requests stay in vLLM's own order of reuse.
RENDERER: Table = {
    "vllm.renderers.hf:HfRenderer": ("render_chat(_, _, **_)", "render_chat_async(_, _, **_)"),
}
INPUTS: Table = {"vllm.v1.engine.input_processor:InputProcessor": ("process_inputs(_, _, **_)",)}

# The class of vLLM's HTTP servers, which gets the headers of requests, and the classes of requests with the field
# `user`. Without one of them requests lack the tenant and the SLO class that a gateway names there.
HTTP: Table = {"fastapi.applications:FastAPI": ("__call__(_, _, _)",)}
WITH_USER: Table = {
    f"vllm.entrypoints.openai.{module}.protocol:{name}": ("to_sampling_params(**_)", *more, "user")
    for module, name, *more in (
        ("chat_completion", "ChatCompletionRequest", "to_beam_search_params(**_)"),
        ("completion", "CompletionRequest", "to_beam_search_params(**_)"),
        ("responses", "ResponsesRequest"),
    )
}

# The field with vLLM's own budget of thinking tokens; without it requests have no cap but those that Meridian knows.
BUDGET: Table = {"vllm.sampling_params:SamplingParams": ("thinking_token_budget",)}

# The API that brings the numbers of an engine's phases into vLLM's own /metrics; without it they are missing there.
METRICS: Table = {
    "vllm.v1.metrics.stats:SchedulerStats": ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs"),
    "vllm.v1.metrics.loggers:PrometheusStatLogger": (
        "__init__(vllm_config=_, engine_indexes=_)",
        "record(_, engine_idx=_, **_)",
        "_counter_cls",
        "_gauge_cls",
        "_histogram_cls",
        "engine_indexes",
        "vllm_config",
    ),
}

# The API of vLLM's front end that knows why it aborts a request; without it an answer that ends at a stop string looks
# like a disconnect.
FRONT_END: Table = {
    "vllm.v1.engine.output_processor:OutputProcessor": ("process_outputs(_)", "abort_requests(_, internal=_)"),
    "vllm.v1.engine.output_processor:OutputProcessorOutput": ("reqs_to_abort",),
}

# The API needed in a front end to let stop strings sleep while the model thinks.
STOP_STRINGS: Table = {
    "vllm.v1.engine:EngineCoreOutput": ("trace_headers",),
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer": ("output_text", "stop", "update(_, _)"),
    "vllm.v1.engine.output_processor:OutputProcessor": ("process_outputs(_)", "request_states"),
    "vllm.v1.engine.output_processor:RequestState": ("detokenizer",),
}

# vLLM's load balancer over data-parallel engines; without it no mark has to find its engine.
BALANCER: Table = {"vllm.v1.engine.core_client:DPLBAsyncMPClient": ("abort_requests_async(_)", "reqs_in_flight")}

# The engine core, which shuts its scheduler down only once its workers have exited; without this API an engine whose
# workers exit slowly counts as lost when it shuts down.
CORE_SHUTDOWN: Table = {"vllm.v1.engine.core:EngineCore": ("shutdown()", "scheduler")}

# The prefixes of the variables that vLLM hands to the actors that it starts on Ray; without it these lack the agent's.
RAY: Table = {"vllm.ray.ray_env": ("DEFAULT_ENV_VAR_PREFIXES",)}

_OUTPUT = "vllm.v1.outputs:AsyncModelRunnerOutput"
# The API that the agent uses in workers, one table for each of vLLM's model runners. A worker checks the table of the
# runner that it has.
V1_RUNNER: Table = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "execute_model(_, **_)",
        "sample_tokens(**_)",
        "execute_model_state",
        "input_batch",
    ),
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("logits", "scheduler_output"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("req_ids",),
    _OUTPUT: ("get_output()",),
}
# The API needed to compute an EAT probe as a row of the probed request, and in V1's worker to know the newest tokens.
# Without this API, or before the first release with which it was tried, each probe is a request of its own.
PROBE_ROWS_FROM = (0, 32)
PROBE_ROWS: Table = {
    "vllm.v1.request:Request": ("mm_features",),
    "vllm.v1.kv_cache_interface:AttentionSpec": (),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
    "vllm.config.cache:CacheConfig": ("kv_sharing_fast_prefill",),
    "vllm.config.model:ModelConfig": ("enable_prompt_embeds",),
}
V1_PROBE_ROWS: Table = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("_prepare_inputs(_, _)", "query_start_loc"),
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("sample_hidden_states",),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("num_tokens_no_spec", "req_id_to_index", "token_ids_cpu"),
    "vllm.config.scheduler:SchedulerConfig": ("async_scheduling",),
}
V2_PROBE_ROWS: Table = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("prepare_inputs(_, **_)", "sample(_, **_)"),
    "vllm.v1.worker.gpu.input_batch:InputBatch": ("input_ids", "logits_indices", "query_start_loc_np", "seq_lens"),
}
# The API needed to let a request go on that vLLM has stopped while it thinks. Without this API, or before the first
# release with which it was tried, such a request ends without an answer.
PREMATURE_STOPS_FROM = (0, 31)
PREMATURE_STOPS: Table = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "get_num_unfinished_requests()",
        "_free_request(_)",
        "_handle_stopped_request(_)",
        "_preempt_request(_, _, drop_stale_output=_)",
        "prev_step_scheduled_req_ids",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "events",
        "new_logprobs",
        "prefill_stats",
        "spec_decode_metrics",
        "stop_reason",
    ),
    "vllm.v1.outputs:LogprobsLists": ("slice_request(_, _)",),
    "vllm.v1.request:Request": (
        "_all_token_ids",
        "_output_token_ids",
        "drop_stale_output",
        "events",
        "num_in_flight_tokens",
        "prefill_stats",
    ),
    "vllm.v1.request:RequestStatus": ("RUNNING", "PREEMPTED", "FINISHED_STOPPED"),
}
V2_RUNNER: Table = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "execute_model(_, **_)",
        "sample_tokens(**_)",
        "execute_model_state",
    ),
    "vllm.v1.worker.gpu.model_runner:ExecuteModelState": ("input_batch",),
    "vllm.v1.worker.gpu.input_batch:InputBatch": ("cu_num_logits_np",),
    _OUTPUT: ("get_output()",),
}


class Look(Protocol):
    """A way to inspect one vLLM. An owner that does not exist has neither fields nor methods."""

    def has_owner(self, owner: str) -> bool: ...

    def has(self, owner: str, name: str) -> bool:
        """Whether the owner has this function, field, property, or attribute that its constructor sets."""

    def signature(self, owner: str, name: str) -> inspect.Signature | None:
        """Return the parameters of a function, without self or cls; None if no function has that name."""


def missing(look: Look, table: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the entries of a table that a vLLM lacks, each as `Owner.name`, with the error if a function's arguments
    do not fit."""
    lacking = []
    for owner, wanted in table.items():
        short = owner.rpartition(":")[2]
        if not look.has_owner(owner):
            lacking.append(short)
            continue
        for want in wanted:
            problems = [_lacking(look, owner, either) for either in want.split(" | ")]
            if all(problems):
                lacking.append(f"{short}.{problems[0]}")
    return list(dict.fromkeys(lacking))


def _lacking(look: Look, owner: str, want: str) -> str:
    """Return the name of the wanted member if the owner lacks it, with the error if the arguments do not fit; empty if
    the owner has the member."""
    name, called, _ = want.partition("(")
    signature = look.signature(owner, name) if called else None
    if signature is not None:
        problem = _misfit(signature, want)
        return f"{name} ({problem})" if problem else ""
    return name if called or not look.has(owner, name) else ""


def _misfit(signature: inspect.Signature, call: str) -> str:
    """Return the reason why the call in the table does not fit a function's signature; empty if it fits."""
    written = ast.parse(call, mode="eval").body
    assert isinstance(written, ast.Call)
    names = {k.arg: None for k in written.keywords if k.arg is not None}
    bind = signature.bind if len(names) == len(written.keywords) else signature.bind_partial
    try:
        bind(*[None] * len(written.args), **names)
    except TypeError as error:
        return str(error)
    return ""


class Imported:
    """Inspects the vLLM of this process by importing the modules that the table names."""

    def _find(self, owner: str) -> Any:
        module, _, name = owner.partition(":")
        try:
            imported = importlib.import_module(module)
        except ImportError:
            return None
        return getattr(imported, name, None) if name else imported

    def has_owner(self, owner: str) -> bool:
        return self._find(owner) is not None

    def has(self, owner: str, name: str) -> bool:
        owned = self._find(owner)
        if hasattr(owned, name):
            return True
        lineage = inspect.getmro(owned) if inspect.isclass(owned) else ()
        return any(name in vars(c).get("__annotations__", ()) or _sets(c, name) for c in lineage)

    def signature(self, owner: str, name: str) -> inspect.Signature | None:
        function = getattr(self._find(owner), name, None)
        if not callable(function):
            return None
        signature = inspect.signature(function)
        if ":" in owner and inspect.isfunction(function):
            _, *rest = signature.parameters.values()
            return signature.replace(parameters=rest)
        return signature


# The table names many attributes of one class, and to find a constructor's source takes milliseconds.
_source = cache(inspect.getsource)


def _sets(owner: type, name: str) -> bool:
    """Whether the class's own constructor sets this attribute."""
    constructor = vars(owner).get("__init__")
    return inspect.isfunction(constructor) and bool(
        re.search(rf"self\.{name}\b(:[^=\n]+)?( =|\n)", _source(constructor))
    )
