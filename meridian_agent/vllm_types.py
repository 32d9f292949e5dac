"""Names what the agent uses of vLLM's own objects, as types: mypy compares each use with them, and
`vllm_adapter.required_api` takes from them what a vLLM must have.

A class has only members that every supported vLLM has; the agent asks for all others with `getattr`. A method is
declared as the agent calls it: a parameter before `/` is passed by its place, every other one by its name. What no
class here has, such as vLLM's configuration, stays `Any`. Importing this module does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray


class Status(Protocol):
    """Where a request is in its life, a member of vLLM's RequestStatus."""

    @property
    def name(self) -> str: ...


class SamplingParams(Protocol):
    extra_args: dict[str, Any] | None
    seed: int | None
    all_stop_token_ids: set[int]
    allowed_token_ids: list[int] | None
    bad_words_token_ids: list[list[int]] | None
    logit_bias: dict[int, float] | None
    min_tokens: int
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    presence_penalty: float
    frequency_penalty: float


class Request(Protocol):
    request_id: str
    status: Status
    # None for a request that generates no text, such as an embedding; the agent tracks no such request.
    sampling_params: SamplingParams
    structured_output_request: Any
    prompt_token_ids: list[int] | None
    all_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    spec_token_ids: list[int]
    max_tokens: int
    num_tokens: int
    num_tokens_with_spec: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    is_prefill_chunk: bool
    next_decode_eligible_step: int
    # A fraction is added to the client's own priority while a plan is in force.
    priority: float
    arrival_time: float
    client_index: int
    cache_salt: str | None
    lora_request: Any
    trace_headers: Mapping[str, str] | None
    kv_transfer_params: dict[str, Any] | None
    stop_reason: int | str | None
    block_hashes: list[Any]
    _block_hasher: Any

    def update_block_hashes(self) -> None: ...

    def get_finished_reason(self) -> object: ...

    def is_finished(self) -> bool: ...


class RequestQueue(Protocol):
    """A waiting queue: a deque, or under the `priority` policy a heap."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...

    def __contains__(self, request: object, /) -> bool: ...

    def __getitem__(self, place: int, /) -> Request: ...

    def add_request(self, request: Request, /) -> None: ...

    def remove_request(self, request: Request, /) -> None: ...

    def remove_requests(self, requests: Iterable[Request], /) -> None: ...

    def prepend_request(self, request: Request, /) -> None: ...


class Block(Protocol):
    block_hash: Any
    is_null: bool
    ref_cnt: int


class BlockPool(Protocol):
    blocks: Sequence[Block]
    enable_kv_cache_events: bool

    def touch(self, blocks: Sequence[Block], /) -> object: ...

    def free_blocks(self, blocks: Sequence[Block], /) -> object: ...

    def get_num_free_blocks(self) -> int: ...


class BlocksOfGroups(Protocol):
    """The blocks of one request in each KV cache group."""

    blocks: Sequence[Sequence[Block]]


class GroupManager(Protocol):
    """The manager of one KV cache group."""

    block_size: int


class Coordinator(Protocol):
    """The managers of all KV cache groups."""

    single_type_managers: Sequence[GroupManager]


class KvCacheManager(Protocol):
    block_pool: BlockPool
    coordinator: Coordinator
    enable_caching: bool

    @property
    def usage(self) -> float: ...

    def get_block_ids(self, request_id: str, /) -> Sequence[list[int]]: ...

    def get_blocks(self, request_id: str, /) -> BlocksOfGroups: ...

    def create_kv_cache_blocks(self, blocks: tuple[list[Block], ...], /) -> BlocksOfGroups: ...

    def evict_blocks(self, block_ids: set[int], /) -> None: ...


class KvCacheConfig(Protocol):
    kv_cache_groups: Sequence[Any]


class SchedulerConfig(Protocol):
    enable_chunked_prefill: bool
    disable_chunked_mm_input: bool
    long_prefill_token_threshold: int
    max_num_batched_tokens: int


class Scheduler(Protocol):
    """vLLM's scheduler, whose hooks the agent's mixin overrides."""

    running: list[Request]
    waiting: RequestQueue
    requests: dict[str, Request]
    finished_req_ids: set[str]
    current_step: int
    block_size: int
    max_model_len: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    policy: Any
    use_v2_model_runner: bool
    cache_config: Any
    lora_config: Any
    scheduler_config: SchedulerConfig
    vllm_config: Any
    kv_cache_config: KvCacheConfig
    kv_cache_manager: KvCacheManager
    connector: Any
    connector_prefix_cache_stats: Any

    def add_request(self, request: Request, /) -> object: ...

    def finish_requests(self, request_ids: Any, finished_status: Any, /) -> Any: ...

    def get_request_counts(self) -> tuple[int, int]: ...


class PreemptingKvCacheManager(KvCacheManager, Protocol):
    watermark_blocks: int

    def get_computed_blocks(self, request: Request, /) -> tuple[Any, ...]: ...


class PreemptingScheduler(Scheduler, Protocol):
    """A scheduler of a vLLM in which requests can be preempted between two steps (`preemption_api`)."""

    kv_cache_manager: PreemptingKvCacheManager
    num_waiting_for_streaming_input: int
    prev_step_scheduled_req_ids: set[str]
    requires_kv_delivery: bool

    def _preempt_request(self, request: Request, timestamp: float, /, *, drop_stale_output: bool) -> object: ...


class NewRequestData(Protocol):
    req_id: str


class SchedulerOutput(Protocol):
    """A step that vLLM has scheduled."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    pending_structured_output_tokens: bool
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: Any
    finished_req_ids: set[str]
    kv_cache_block_copies: Any


class ModelRunnerOutput(Protocol):
    """What the workers have computed in a step."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: Sequence[Sequence[int]]


class GrammarOutput(Protocol):
    """The token masks of a step."""

    structured_output_request_ids: list[str]
    grammar_bitmask: NDArray[np.int32]


class EngineCoreOutput(Protocol):
    """What a client gets of one request in a step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: object


class EngineCoreOutputs(Protocol):
    """What one front end gets in a step."""

    outputs: list[EngineCoreOutput]
    finished_requests: Collection[str] | None
    scheduler_stats: Any
