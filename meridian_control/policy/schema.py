"""The sections of a policy: their fields, what each does, defaults and limits.

Knows nothing of engines, requests, storage or gRPC. Pure values, usable on any thread.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

INT32_MAX = 2**31 - 1
MIN_LEASE_MS, MAX_LEASE_MS = 100, 86_400_000


def _advice(text: str, **more: str) -> dict[str, JsonValue]:
    """When to change a field, for the reference; more: `range`, where the limits do not tell it."""
    return {"advice": text, **more}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _lease(value: int) -> int:
    if 0 < value < MIN_LEASE_MS or not 0 <= value <= MAX_LEASE_MS:
        raise PydanticCustomError(
            "lease", "must be 0 or in [{low}, {high}]", {"low": MIN_LEASE_MS, "high": MAX_LEASE_MS}
        )
    return value


SectionLease = Annotated[
    int,
    AfterValidator(_lease),
    Field(
        description="Milliseconds this section's decisions stay in force without a stream, its caps included, so that "
        "an experiment ends with the control plane; 0 for fallback.lease_ms alone.",
        json_schema_extra=_advice(
            "Set it for an experiment that must end with the control plane.", range="0, or 100 to 86,400,000"
        ),
    ),
]


class SchedulerPolicy(Section):
    """Decides which sequences join a step, and how much thinking a request may do."""

    enabled: bool = Field(
        True,
        description="Order and share steps by phase; false leaves the engine's own order.",
        json_schema_extra=_advice("Set it to false to compare with the engine's own scheduling."),
    )
    shadow: bool = Field(
        False,
        description="Decide and count, but do not apply.",
        json_schema_extra=_advice("Set it to true to see in `meridianctl shadow` what caps and soft close would end."),
    )
    strategy: Literal["output_first", "deadline", "reasoning_first", "stock"] = Field(
        "output_first",
        description="Who is most urgent: answers, whoever is nearest to missing its budget, or thinking with answers "
        "paced at their budget; stock leaves vLLM's own order.",
        json_schema_extra=_advice(
            "Keep output_first for chat. Choose deadline where both budgets are set, reasoning_first for batch work."
        ),
    )
    think_tpot_budget_ms: float = Field(
        0.0,
        ge=0,
        description="Milliseconds a thinking sequence may go without a token while it is left out of steps; 0 is four "
        "times the output budget.",
        json_schema_extra=_advice("Lower it where users watch the thinking; below a step's time nobody is left out."),
    )
    output_tpot_budget_ms: float = Field(
        0.0,
        ge=0,
        description="Step-time target in milliseconds while answers stream; only when it is exceeded are thinking "
        "sequences left out. 0 follows the engine: 1.75 times what a step of all running sequences takes, so that "
        "prompts alone are held back.",
        json_schema_extra=_advice("Set it to the gap between answer tokens that you promise; it costs throughput."),
    )
    think_batch_multiplier: float = Field(
        2.5,
        gt=0,
        description="Thinking sequences per answering one that may join a step while answers stream and the output "
        "budget is exceeded.",
        json_schema_extra=_advice("Lower it to make steps shorter while answers stream."),
    )
    min_prefill_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Prompt tokens that may join a step while answers stream, whatever the output budget leaves; 0 is "
        "twice what steps had of late.",
        json_schema_extra=_advice("Raise it where prompts wait too long beside answers."),
    )
    long_think_tokens: int = Field(
        8192,
        ge=1,
        le=INT32_MAX,
        description="reasoning_first: thinking tokens from which on a request is the least urgent.",
        json_schema_extra=_advice("Set it near the longest tenth of your thinking."),
    )
    max_think_tokens: int = Field(
        32768,
        ge=1,
        le=INT32_MAX,
        description="Hard cap on a request's thinking, in tokens, kept by the agent itself.",
        json_schema_extra=_advice("Set it above the longest thinking that still leads to right answers."),
    )
    soft_think_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Soft close: thinking tokens from which on thinking ends at the first sentence end where the end "
        "marker ranks at most soft_close_rank; 0 switches the rule off.",
        json_schema_extra=_advice("Set it below the cap, so that most long thinking ends with a sentence."),
    )
    soft_close_rank: int = Field(
        20,
        ge=1,
        le=INT32_MAX,
        description="Soft close: highest rank of the end marker.",
        json_schema_extra=_advice("Raise it to end sooner past soft_think_tokens."),
    )
    empty_answer_extension_tokens: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Thinking tokens added, once, to the cap of a request whose answer would be empty if it were "
        "ended; no rule ends it meanwhile; 0 switches this off.",
        json_schema_extra=_advice("Set it to some hundred where capped requests come back with empty answers."),
    )
    lease_ms: SectionLease = 0
    # After max_think_tokens, which its check reads.
    min_think_tokens: int = Field(
        512,
        ge=0,
        le=INT32_MAX,
        description="Thinking tokens before which no entropy rule ends thinking; not above the hard cap, which also "
        "lowers it where only the cap is given.",
        json_schema_extra=_advice("Take it from `meridianctl calibrate`."),
    )

    @model_validator(mode="before")
    @classmethod
    def _floor_within_cap(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "min_think_tokens" not in values:
            cap, floor = values.get("max_think_tokens"), cls.model_fields["min_think_tokens"].default
            if type(cap) is int and 1 <= cap < floor:
                return {**values, "min_think_tokens": cap}
        return values

    @field_validator("min_think_tokens")
    @classmethod
    def _at_most_max(cls, value: int, info: ValidationInfo) -> int:
        limit = info.data.get("max_think_tokens", value)
        if value > limit:
            raise PydanticCustomError("min_above_max", "must be at most max_think_tokens ({limit})", {"limit": limit})
        return value


class RankCondition(Section):
    """One condition of the rank rule (RCPD, arXiv 2508.17627); it holds when every bound does."""

    max_ranks: Annotated[tuple[Annotated[int, Field(ge=1, le=INT32_MAX)], ...], Field(min_length=1, max_length=8)] = (
        Field(
            (5,),
            strict=False,
            description="Highest rank of the end marker at the newest sentence end, the one before it, and so on.",
            json_schema_extra=_advice(
                "Published: [5]; [10, 50, 100, 1000]; [20, 20, 20]; six times 50, on vocabularies of 150,000."
            ),
        )
    )


class EntropyPolicy(Section):
    """Decides when thinking ends that no longer helps. Shadowed by default, until calibrated for the model."""

    enabled: bool = Field(
        True,
        description="Evaluate the EAT and RPDI rules; false measures no entropy.",
        json_schema_extra=_advice("Set it to false where no entropy rule is wanted, to save the measuring."),
    )
    shadow: bool = Field(
        True,
        description="Decide and count, but do not end thinking.",
        json_schema_extra=_advice("Set it to false once `meridianctl calibrate` recommends a rule."),
    )
    ema_alpha: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Weight of the newest EAT sample, a fraction.",
        json_schema_extra=_advice("Published values are 0.075 to 0.2; a smaller one needs more samples."),
    )
    eat_warmup_samples: int = Field(
        20,
        ge=1,
        le=1000,
        description="EAT rule: samples before it may fire; the variance starts at 0 without bias correction, so about "
        "4/ema_alpha make it mean something.",
        json_schema_extra=_advice("Keep it near 4 / ema_alpha."),
    )
    eat_ema_variance_threshold: float = Field(
        1e-4,
        ge=0,
        description="EAT rule: the EMA variance, in nats squared, below which EAT counts as settled; the level "
        "threshold must be met too.",
        json_schema_extra=_advice("Take it from `meridianctl calibrate`; no published value fits another model."),
    )
    eat_level_threshold_nats: float = Field(
        0.1,
        ge=0,
        description="EAT rule: the EMA level, in nats, below which the answer counts as decided; the variance "
        "threshold must be met too.",
        json_schema_extra=_advice("Take it from `meridianctl calibrate`; no published value fits another model."),
    )
    eat_probe_interval_tokens: int = Field(
        64,
        ge=1,
        le=INT32_MAX,
        description="Thinking tokens between two EAT probes of a request.",
        json_schema_extra=_advice("Lower it to end sooner; each probe costs the engine about two tokens."),
    )
    eat_probe_placement: Literal["anywhere", "sentence", "paragraph"] = Field(
        "sentence",
        description="Where a probe that is due is placed: at once, or when a sentence or paragraph ends.",
        json_schema_extra=_advice(
            "Choose paragraph for models that write paragraphs; anywhere reads EAT in the middle of a thought."
        ),
    )
    eat_probe_max_rank: int = Field(
        0,
        ge=0,
        le=INT32_MAX,
        description="Gate: a probe is asked for only after a sentence end where the end marker ranks at most this, and "
        "then placed at once; 0 switches the gate off.",
        json_schema_extra=_advice("Set it to save probes where the end marker ranks high before thinking can end."),
    )
    eat_hold_ms: int = Field(
        50,
        ge=0,
        le=10_000,
        description="A probed request waits this long at most, in milliseconds, for what is decided from its probe, so "
        "that thinking ends where it was measured; 0 lets it think on meanwhile. Not in shadow.",
        json_schema_extra=_advice(
            "Raise it above the round trip of reports; set 0 where ending a few tokens late does no harm."
        ),
    )
    rank_conditions: tuple[RankCondition, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Rank rule: thinking ends at a sentence end where any of these holds.",
        json_schema_extra=_advice("Take them from `meridianctl calibrate`."),
    )
    rpdi_threshold: float = Field(
        2.0,
        ge=0,
        description="RPDI rule: ratio of local to global mean token entropy above which thinking ends; 0 switches the "
        "rule off.",
        json_schema_extra=_advice("Published: 2.0 with a window of 512."),
    )
    rpdi_window_tokens: int = Field(
        512,
        ge=1,
        le=65536,
        description="RPDI rule: newest thinking tokens that make up the local mean.",
        json_schema_extra=_advice("A shorter window fires sooner, and more often by chance."),
    )
    lease_ms: SectionLease = 0


class KvMemoryPolicy(Section):
    """Decides who holds the KV cache when it runs short."""

    enabled: bool = Field(
        True,
        description="Act on KV pressure; false leaves eviction and admission to the engine.",
        json_schema_extra=_advice("Set it to false to compare with the engine's own eviction."),
    )
    shadow: bool = Field(
        False,
        description="Decide and count, but do not apply.",
        json_schema_extra=_advice("Set it to true to see decisions without their effect."),
    )
    think_phase_memory_fraction: float = Field(
        0.40,
        gt=0,
        le=1,
        description="Share of the KV cache, a fraction, that thinking may hold while preempted answers wait; above it "
        "nothing new is admitted.",
        json_schema_extra=_advice("Lower it where preempted answers wait long; 1.0 never holds anything back."),
    )
    lease_ms: SectionLease = 0


class TelemetryPolicy(Section):
    """Decides how often engines report, and how much of it is kept."""

    report_interval_steps: int = Field(
        0,
        ge=0,
        le=1000,
        description="Engine steps merged into one report; fewer where one of them has more to tell than text. 0 for 8, "
        "and for 1 under strategy deadline, where a rule reads ranks at sentence ends, and where probes that no "
        "request waits for may be less than 8 tokens apart.",
        json_schema_extra=_advice("Leave it at 0; raise it where the control plane has too little processor time."),
    )
    decision_log_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests, a fraction, whose life the decision log keeps; chosen by a hash of their ids.",
        json_schema_extra=_advice("Lower it where the log takes too much memory; explain then knows fewer requests."),
    )


class FallbackPolicy(Section):
    """Decides what an engine does without a stream."""

    lease_ms: int = Field(
        30_000,
        ge=MIN_LEASE_MS,
        le=MAX_LEASE_MS,
        description="Milliseconds decisions stay in force without a stream; caps stay.",
        json_schema_extra=_advice("Keep it above the time that a restart of the control plane takes."),
    )


# No marker is nearly as long.
MAX_MARKER_TOKENS = 64
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, le=INT32_MAX)], ...], Field(max_length=MAX_MARKER_TOKENS)]


class ModelPolicy(Section):
    """Tells an engine what it cannot find out about one model by itself."""

    think_start_token_ids: TokenIds = Field(
        (),
        strict=False,
        description="Token ids that open thinking; empty takes the reasoning parser's.",
        json_schema_extra=_advice("Set it only where `meridianctl engines` says that the markers are unknown."),
    )
    think_end_token_ids: TokenIds = Field(
        (),
        strict=False,
        description="Token ids that end thinking; empty takes the reasoning parser's.",
        json_schema_extra=_advice("Set it only where `meridianctl engines` says that the markers are unknown."),
    )
    reasoning_parser: str = Field(
        "",
        max_length=256,
        description="Name of the vLLM reasoning parser; empty takes the engine's own.",
        json_schema_extra=_advice("Set it where vLLM was started without the model's parser."),
    )
    supports_think_disable: bool = Field(
        True,
        description="A closed think block at the end of the prompt means the request does not think.",
        json_schema_extra=_advice("Set it to false for models that think in spite of a closed think block."),
    )
    closing_text: str = Field(
        "",
        max_length=2000,
        description="Text that a forced end writes before the marker; it counts as thinking.",
        json_schema_extra=_advice("Use the sentence that the model's authors train or recommend for a cut."),
    )
    eat_answer_prefix: str = Field(
        "",
        max_length=2000,
        description="Text that an EAT probe appends after the marker, to stand before the answer.",
        json_schema_extra=_advice("Use the words that come before the answer's first token that counts."),
    )
