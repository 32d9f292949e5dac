"""The sections of a policy about whole engines: facts about the model that an engine serves, and limits of vLLM's
scheduler.

The module knows nothing of engines, storage or gRPC. The module's values are immutable, so any thread may use them.
"""

from typing import Annotated

from pydantic import Field

from meridian_control.policy.section import (
    Count,
    Section,
    field,
)

# Largest number of tokens in a marker; real markers are much shorter.
MAX_MARKER_TOKENS = 64
TokenIds = Annotated[tuple[Count, ...], Field(max_length=MAX_MARKER_TOKENS)]


class ModelPolicy(Section):
    """Tells an engine facts about one model that the engine cannot find out by itself."""

    think_start_token_ids: TokenIds = field(
        (),
        strict=False,
        description="Token ids that begin thinking; empty means those of the reasoning parser.",
        advice="Set it only if `meridianctl engines` says that the markers are unknown.",
    )
    think_end_token_ids: TokenIds = field(
        (),
        strict=False,
        description="Token ids that end thinking; empty means those of the reasoning parser.",
        advice="Set it only if `meridianctl engines` says that the markers are unknown.",
    )
    reasoning_parser: str = field(
        "",
        max_length=256,
        description="Name of the vLLM reasoning parser; empty means the engine's own parser.",
        advice="Set it if vLLM was started without the model's parser.",
    )
    supports_think_disable: bool = field(
        True,
        description="Whether a closed think block at the end of the prompt means that the request does not think.",
        advice="Set it to false for models that think in spite of a closed think block.",
    )
    closing_text: str = field(
        "",
        max_length=2000,
        description="Text that a forced end writes before the end marker; the text counts as thinking.",
        advice="Set it if answers go on thinking; see `meridianctl policy families`.",
    )
    eat_answer_prefix: str = field(
        "",
        max_length=2000,
        description="Text that an EAT probe appends after the end marker, before the answer.",
        advice="Use the words that precede the first meaningful token of your model's answers.",
    )


class EnginePolicy(Section):
    """Changes limits of vLLM's scheduler while engines run. The fields are named after vLLM's options. The engine
    bounds each value by what it was started with ([limits](policy.md#engine-limits))."""

    max_num_active_seqs: Count = field(
        0,
        description="Most requests that an engine runs at once; 0 means the engine's start-up value.",
        advice="Lower it to shorten steps if many requests run at once; the others wait.",
    )
    max_num_scheduled_tokens: Count = field(
        0,
        description="Most tokens that an engine schedules in a step; 0 means the engine's start-up value.",
        advice="Lower it if prompts make steps too long, also while no answer streams.",
    )
    long_prefill_token_threshold: Count = field(
        0,
        description="Most tokens of one prompt in a step while other requests run or wait; 0 means the engine's "
        "start-up value.",
        advice="Set it if long prompts keep short ones waiting, for example to 2048.",
    )
