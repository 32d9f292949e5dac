"""The sections of a policy about whole engines: facts about the model that an engine serves, and limits of vLLM's
scheduler.

The module knows nothing of engines, storage or gRPC. The module's values are immutable, so any thread may use them.
"""

from typing import Annotated

from pydantic import Field

from meridian_control.policy.section import INT32_MAX, Section, advice

# Largest number of tokens in a marker; real markers are much shorter.
MAX_MARKER_TOKENS = 64
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, le=INT32_MAX)], ...], Field(max_length=MAX_MARKER_TOKENS)]


class ModelPolicy(Section):
    """Tells an engine facts about one model that the engine cannot find out by itself."""

    think_start_token_ids: TokenIds = Field(
        (),
        strict=False,
        description="Token ids that begin thinking; empty means those of the reasoning parser.",
        json_schema_extra=advice("Set it only if `meridianctl engines` says that the markers are unknown."),
    )
    think_end_token_ids: TokenIds = Field(
        (),
        strict=False,
        description="Token ids that end thinking; empty means those of the reasoning parser.",
        json_schema_extra=advice("Set it only if `meridianctl engines` says that the markers are unknown."),
    )
    reasoning_parser: str = Field(
        "",
        max_length=256,
        description="Name of the vLLM reasoning parser; empty means the engine's own parser.",
        json_schema_extra=advice("Set it if vLLM was started without the model's parser."),
    )
    supports_think_disable: bool = Field(
        True,
        description="Whether a closed think block at the end of the prompt means that the request does not think.",
        json_schema_extra=advice("Set it to false for models that think in spite of a closed think block."),
    )
    closing_text: str = Field(
        "",
        max_length=2000,
        description="Text that a forced end writes before the end marker; the text counts as thinking.",
        json_schema_extra=advice("Set it if answers go on thinking; see `meridianctl policy families`."),
    )
    eat_answer_prefix: str = Field(
        "",
        max_length=2000,
        description="Text that an EAT probe appends after the end marker, before the answer.",
        json_schema_extra=advice("Use the words that precede the first meaningful token of your model's answers."),
    )


class EnginePolicy(Section):
    """Changes limits of vLLM's scheduler while engines run. The fields are named after vLLM's options. The engine
    bounds each value by what it was started with ([limits](policy.md#engine-limits))."""

    max_num_active_seqs: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Most requests that an engine runs at once, up to its max_num_seqs; 0 means the engine's start-up "
        "value. If more requests run already, they go on, and no other joins until they are fewer.",
        json_schema_extra=advice("Lower it to shorten steps if many requests run at once; the others wait."),
    )
    max_num_scheduled_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Most tokens that an engine schedules in a step, up to its start-up value and not below one token, "
        "with its drafts, for each of its max_num_seqs; 0 means the engine's start-up value.",
        json_schema_extra=advice("Lower it if prompts make steps too long, also while no answer streams."),
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Most tokens of one prompt in a step while other requests run or wait, from one KV block to the "
        "model's context, where it limits nothing; 0 means the engine's start-up value.",
        json_schema_extra=advice("Set it if long prompts keep short ones waiting, for example to 2048."),
    )
