"""The sections of a policy: their fields with descriptions, defaults and limits.

The module knows nothing of engines, storage or gRPC. The module's values are immutable, so any thread may use them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from meridian_control.policy.drift_schema import EatReference, SignalReference, signal_reference
from meridian_control.policy.section import (
    MAX_LEASE_MS,
    MIN_LEASE_MS,
    Amount,
    Count,
    Glob,
    Positive,
    Section,
    SectionLease,
    field,
)

# Largest number of tokens in a marker; real markers are much shorter.
MAX_MARKER_TOKENS = 64
# Most globs of SLO classes; the agent compares a client's wish with each of them.
MAX_CLASSES = 64
TokenIds = Annotated[tuple[Count, ...], Field(max_length=MAX_MARKER_TOKENS)]


class SchedulerPolicy(Section):
    """Decides which sequences join a step, and how much thinking a request may do."""

    enabled: bool = field(
        True,
        description="Order requests and share steps by phase; false keeps the engine's own order.",
        advice="Set it to false to compare with the engine's own scheduling.",
    )
    shadow: bool = field(
        False,
        description="Make and count decisions, but do not apply them.",
        advice="Set it to true to see in `meridianctl shadow` which requests caps and soft close would end.",
    )
    strategy: Literal["output_first", "deadline", "reasoning_first", "stock"] = field(
        "output_first",
        description="The most urgent requests: answering ones (output_first), those nearest to missing their budget "
        "(deadline), or thinking ones (reasoning_first); stock keeps vLLM's order.",
        advice="Keep output_first for chat. Choose deadline where both budgets are set, reasoning_first for batch "
        "work.",
    )
    think_tpot_budget_ms: Amount = field(
        0.0,
        description="Milliseconds for which a thinking sequence may go without a token while it is left out of steps; "
        "0 means four times the output budget.",
        advice="Lower it if users watch the thinking; below a step's time no sequence is left out.",
    )
    output_tpot_budget_ms: Amount = field(
        0.0,
        description="Target for the step time in milliseconds while answers stream; thinking sequences are left out "
        "only if steps exceed it. 0 means 1.75 times the duration of a step of all running sequences, so that only "
        "prompts are held back.",
        advice="Set it to the gap between answer tokens that you promise; a short gap costs throughput.",
    )
    think_batch_multiplier: float = field(
        2.5,
        gt=0,
        description="Thinking sequences per answering sequence that may join a step while answers stream and steps "
        "exceed the output budget.",
        advice="Lower it to make steps shorter while answers stream.",
    )
    min_prefill_tokens: Count = field(
        0,
        description="Prompt tokens that may join a step while answers stream even if the output budget leaves less "
        "room; 0 means twice the prompt tokens of recent steps.",
        advice="Raise it if prompts wait too long while answers stream.",
    )
    long_think_tokens: Positive = field(
        8192,
        description="Strategy reasoning_first: a request with at least this many thinking tokens is least urgent.",
        advice="Set it near the 90th percentile of your requests' thinking tokens.",
    )
    max_think_tokens: Positive = field(
        32768,
        description="Hard cap on a request's thinking, in tokens, which the agent itself enforces.",
        advice="Set it above the longest thinking that still leads to right answers.",
    )
    soft_think_tokens: Count = field(
        0,
        description="Soft close: from this many thinking tokens on, thinking ends at the first sentence end where the "
        "end marker's rank is at most soft_close_rank; 0 switches the rule off.",
        advice="Set it below the cap, so that most long thinking ends with a sentence.",
    )
    soft_close_rank: Positive = field(
        20,
        description="Soft close: highest rank of the end marker at which thinking ends.",
        advice="Raise it to end thinking sooner past soft_think_tokens.",
    )
    empty_answer_extension_tokens: Count = field(
        0,
        description="Thinking tokens added once to the cap of a request whose answer would be empty if thinking ended; "
        "no rule but that on loops ends its thinking while its answer would be empty. 0 switches both off.",
        advice="Set it to a few hundred if capped requests return empty answers.",
    )
    answer_reserve_tokens: Count = field(
        256,
        description="Answer reserve: thinking ends early enough that at least this many tokens of the request's "
        "max_tokens and of the model's context are left for the answer, but at most a quarter of them; a model that "
        "stops while it thinks ends its thinking and answers; 0 reserves none, and lets the model stop.",
        advice="Set it to the length of a long answer if requests reach max_tokens while they still think.",
        new=True,
    )
    answer_reserve_for: Literal["chat", "all"] = field(
        "chat",
        description="The requests that have an answer reserve: those that vLLM renders from a chat (chat), or "
        "completions, too (all).",
        advice="Choose all if your clients render chats themselves and send completions.",
        new=True,
    )
    answer_only_stops: Literal["none", "chat", "all"] = field(
        "chat",
        description="The requests whose stop strings and stop tokens end answers only: none, those that vLLM renders "
        "from a chat (chat), or completions, too (all). A request may say otherwise for itself.",
        advice="Choose none if clients stop thinking with stop strings that are no end marker.",
        new=True,
    )
    calibrated_cap_tokens: Count = field(
        0,
        description="Smallest cap, in thinking tokens, whose loss calibration found to be small enough; 0 if it is not "
        "known. `policy apply` and `rollout start` warn of caps, and of floors of budgets and pressure, below it.",
        advice="Leave it as `meridianctl calibrate` writes it.",
        new=True,
    )
    lease_ms: SectionLease = 0
    # This field comes after max_think_tokens because its validator reads max_think_tokens.
    min_think_tokens: Count = field(
        512,
        description="Thinking tokens before which no entropy rule, budget or pressure ends thinking. If only a cap "
        "below it is set, the floor is lowered to the cap.",
        advice="Take the floor from `meridianctl calibrate`.",
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
    """One condition of the rank rule (RCPD, arXiv 2508.17627); the condition is met if every bound is met."""

    max_ranks: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=8)] = field(
        (5,),
        strict=False,
        description="Highest allowed rank of the end marker at each of the newest sentence ends, newest first.",
        advice="Published, for vocabularies of 150,000 tokens: [5]; [10, 50, 100, 1000]; [20, 20, 20]; six times 50.",
    )


class EntropyPolicy(Section):
    """Decides when to end thinking that no longer helps. The section is in shadow until calibration for the model."""

    enabled: bool = field(
        True,
        description="Evaluate the EAT, rank, RPDI and give-up rules; false switches all of them off.",
        advice="Set it to false if you want no entropy rule, to save the cost of measuring.",
    )
    shadow: bool = field(
        True,
        description="Make and count decisions, but do not end thinking.",
        advice="Set it to false once `meridianctl calibrate` recommends a rule.",
    )
    ema_alpha: float = field(
        0.2,
        gt=0,
        le=1,
        description="Weight of the newest EAT sample in the moving mean and variance, a fraction.",
        advice="Published values are 0.075 to 0.2; a smaller weight needs more samples.",
    )
    eat_warmup_samples: int = field(
        20,
        ge=1,
        le=1000,
        description="EAT rule: samples before the rule may fire.",
        advice="Keep it near 4 / ema_alpha, because the variance starts at 0.",
    )
    eat_ema_variance_threshold: Amount = field(
        1e-4,
        description="EAT rule: the EMA variance, in nats squared, below which EAT counts as settled; the level "
        "threshold must be met too.",
        advice="Take it from `meridianctl calibrate`; a published value fits only its own model.",
    )
    eat_level_threshold_nats: Amount = field(
        0.1,
        description="EAT rule: the EMA level, in nats, below which the answer counts as decided; the variance "
        "threshold must be met too.",
        advice="Take it from `meridianctl calibrate`; a published value fits only its own model.",
    )
    eat_probe_interval_tokens: Positive = field(
        64,
        description="Thinking tokens between two EAT probes of a request.",
        advice="Lower it to end thinking sooner; each probe costs the engine one or two tokens.",
    )
    eat_probe_placement: Literal["anywhere", "sentence", "paragraph"] = field(
        "sentence",
        description="Place of a probe that is due: at once (anywhere), or when the next sentence or paragraph ends.",
        advice="Choose paragraph for models that write paragraphs; anywhere measures EAT in the middle of a thought.",
    )
    eat_probe_max_rank: Count = field(
        0,
        description="Gate: a probe is requested only after a sentence end where the end marker's rank is at most this "
        "value, and is then placed at once; 0 switches the gate off.",
        advice="Set it to save probes if the end marker's rank is large until thinking can end.",
    )
    eat_hold_ms: int = field(
        50,
        ge=0,
        le=10_000,
        description="Milliseconds for which a probed request waits at most for the decision from its probe, or four "
        "steps if those take longer, so that thinking ends where EAT was measured. In shadow no request waits.",
        advice="Raise it above the round trip of reports; set it to 0 if ending a few tokens late does no harm.",
    )
    rank_conditions: tuple[RankCondition, ...] = field(
        (),
        strict=False,
        max_length=16,
        description="Rank rule: thinking ends at a sentence end where any of these conditions is met.",
        advice="Take the conditions from `meridianctl calibrate`.",
    )
    rpdi_threshold: Amount = field(
        2.0,
        description="RPDI rule: ratio of local to global mean token entropy above which thinking ends; 0 switches the "
        "rule off.",
        advice="The published threshold is 2.0, with a window of 512 tokens.",
    )
    rpdi_window_tokens: int = field(
        512,
        ge=1,
        le=65536,
        description="RPDI rule: number of newest thinking tokens that the local mean covers.",
        advice="With a shorter window the rule fires sooner, and more often by chance.",
    )
    holdout_share: float = field(
        0.02,
        ge=0,
        le=0.5,
        description="Share of requests, a fraction, in the control group, which nothing in the policy shortens. 0 "
        "switches it off, and no harm is measured.",
        advice="Raise it to measure savings and harm sooner; set it to 0 if every request must be shortened.",
        new=True,
    )
    max_loss: float = field(
        0.01,
        gt=0,
        le=1,
        description="Largest share of requests, a fraction, whose answer one kind of shortening may change. If the "
        "control group shows more harm, the control plane withdraws this kind, unless it is a cap of the policy. 1 "
        "switches this off.",
        advice="Set it to the `--max-loss` of `meridianctl calibrate`; raise it if a budget may cost answers.",
        new=True,
    )
    give_up_tokens: Count = field(
        0,
        description="Give-up rule: thinking ends at the first EAT probe, from this many thinking tokens on, after "
        "which the EMA level is still at least give_up_eat_nats; 0 switches the rule off.",
        advice="Take it from `meridianctl calibrate --labels`, which states what it may cost.",
        new=True,
    )
    give_up_eat_nats: float = field(
        1.0,
        gt=0,
        description="Give-up rule: the EMA level, in nats, from which the answer counts as still undecided.",
        advice="Take it from `meridianctl calibrate --labels`, together with give_up_tokens.",
        new=True,
    )
    give_up_shadow: bool = field(
        True,
        description="Only count the give-up rule's decisions, even while the section's other rules are in force.",
        advice="Set it to false once `meridianctl calibrate` proves the rule's loss to be small.",
        new=True,
    )
    confirm_sentence_ends: int = field(
        1,
        ge=1,
        le=4,
        description="Number of sentence ends in a row at which the rank or RPDI rule must be met before it ends "
        "thinking; for the EAT rule, number of probes in a row.",
        advice="Choose 2 if a rule ends thinking because of a single odd sentence end.",
        new=True,
    )
    self_calibration: bool = field(
        False,
        description="Let the control plane find an EAT rule for each model and SLO class by itself, put it in force "
        "if its loss is proved to be at most max_loss, and withdraw it if that changes.",
        advice="Set it to true, also in an override for some classes, if nobody is to calibrate by hand.",
        new=True,
    )
    eat_reference: EatReference = ()
    rank_reference: SignalReference = signal_reference("the end marker's rank")
    rpdi_reference: SignalReference = signal_reference("RPDI")
    lease_ms: SectionLease = 0


class KvMemoryPolicy(Section):
    """Decides which requests hold KV blocks when the KV cache runs short."""

    enabled: bool = field(
        True,
        description="Act on KV pressure; false leaves eviction and admission to the engine.",
        advice="Set it to false to compare with the engine's own eviction.",
    )
    shadow: bool = field(
        False,
        description="Make and count decisions, but do not apply them.",
        advice="Set it to true to see decisions without their effect.",
    )
    think_phase_memory_fraction: float = field(
        0.40,
        gt=0,
        le=1,
        description="Share of the KV cache, a fraction, that thinking may hold while preempted answers wait; above "
        "that share no new request is admitted.",
        advice="Lower it if preempted answers wait long; 1.0 never holds a request back.",
    )
    keep_thinking_s: Count = field(
        0,
        description="Seconds for which the KV blocks of thinking that a later turn may repeat wait for that turn, "
        "before they are reused first. 0 keeps them for as long as vLLM does.",
        advice="Set it to the time after which a conversation has ended, such as 600, if kept thinking crowds other "
        "prompts out of the prefix cache.",
        new=True,
    )
    lease_ms: SectionLease = 0


class TelemetryPolicy(Section):
    """Decides how often engines report, and how many requests the decision log keeps."""

    report_interval_steps: int = field(
        0,
        ge=0,
        le=1000,
        description="Engine steps merged into one report; fewer if a step has more to report than text tokens. 0 means "
        "24 steps; up to 256 within half a second while no measured request thinks; 8, or up to 24 within 40 ms, if "
        "something in force may end thinking or change a cap; 1 if the strategy is deadline, if a rule reads ranks at "
        "sentence ends, if probes without a hold may be less than 8 tokens apart, or if an extension is on.",
        advice="Leave it at 0; raise it if the control plane has too little processor time.",
    )
    decision_log_sample_ratio: float = field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests, a fraction, whose life the decision log keeps; a hash of the id chooses them.",
        advice="Lower it if the log takes too much memory; `meridianctl explain` then knows fewer requests.",
    )
    shadow_sample_ratio: float = field(
        0.05,
        ge=0,
        le=1,
        description="Share of requests, a fraction, that are measured and probed while no rule in force reads signals; "
        "while nothing shortens thinking and `entropy.self_calibration` is off, in clusters of up to 64 requests in a "
        "row. A recording contains the signals of these requests only.",
        advice="Set it to 1 for a recording, or if you want each request's signals in `meridianctl explain`; each "
        "measured request costs processor time and probes.",
        new=True,
    )


class FallbackPolicy(Section):
    """Decides what an engine does without an answer from the control plane."""

    lease_ms: int = field(
        30_000,
        ge=MIN_LEASE_MS,
        le=MAX_LEASE_MS,
        description="Milliseconds for which decisions stay in force without an answer from the control plane; caps "
        "stay in force for good, unless scheduler.lease_ms is set.",
        advice="Keep it above the time that a restart of the control plane takes.",
    )


class LoopPolicy(Section):
    """Ends thinking that repeats the same tokens, round after round. In shadow by default, like every rule that ends
    thinking by itself."""

    enabled: bool = field(
        True,
        description="Have agents look for cycles of up to 512 tokens in the thinking; false looks for none.",
        advice="Set it to false to compare with thinking that may loop.",
    )
    shadow: bool = field(
        True,
        description="Make and count decisions, but do not end thinking.",
        advice="Set it to false once `meridianctl shadow` shows that only real loops would end.",
    )
    min_rounds: int = field(
        3,
        ge=2,
        le=1000,
        description="Rounds of a cycle, the first one included, from which on thinking ends; min_tokens must be "
        "reached too.",
        advice="Raise it if legitimate text repeats long parts, such as equal rows of a table.",
    )
    min_tokens: int = field(
        192,
        ge=32,
        le=2048,
        description="Thinking tokens that repeat, the first round included, from which on thinking ends; min_rounds "
        "must be reached too.",
        advice="Raise it if legitimate text repeats short parts, such as rows of zeros.",
    )


class PreemptionPolicy(Section):
    """Lets waiting requests preempt thinking ones that take all places or KV blocks of an engine. No request may before
    the policy says so, and the section is in shadow by default ([how it
    works](../capabilities/preemption/README.md))."""

    shadow: bool = field(
        True,
        description="Make and count decisions, but preempt nothing.",
        advice="Set it to false once `meridianctl decisions --kind preempt` shows the preemptions that you want.",
    )
    may_preempt: bool = field(
        False,
        description="Whether a waiting request may preempt thinking ones, if it finds no place among the running "
        "requests or no KV blocks.",
        advice="Set it to true in an override for the tenant or the SLO class of people who wait.",
    )
    max_prompt_tokens: Count = field(
        0,
        description="Most prompt tokens outside of the prefix cache with which a waiting request may preempt others, "
        "so that short prompts may, and next turns of conversations whose beginning is cached; 0 means no limit.",
        advice="Set it to a few hundred if long prompts of the same tenant can wait.",
    )
    preemptible_from_tokens: Count = field(
        256,
        description="Thinking tokens from which on a request may be preempted for others.",
        advice="Set it to 1000000 in an override for tenants whose thinking must not be interrupted.",
    )
    max_preemptions: Positive = field(
        3,
        description="Number of preemptions of a request, those by vLLM itself included, after which it is not "
        "preempted for others any more.",
        advice="Lower it if thinking takes too long; raise it if waiting requests find nobody to preempt.",
    )
    recomputed_tokens_per_s: Positive = field(
        1000,
        description="Tokens per second that preempted requests of an engine may compute again. While they have "
        "computed more, no request is preempted for others.",
        advice="Set it to the share that you would give away of the prompt tokens per second that an engine computes.",
    )
    max_wait_ms: Positive = field(
        10_000,
        description="Milliseconds after which a preempted request comes before all waiting ones, and no other is "
        "preempted until it runs again.",
        advice="Lower it if preempted requests wait too long while many others preempt.",
    )


class GatewayPolicy(Section):
    """Says what a client may choose on engines whose gateway names the tenant and the SLO class of requests
    ([how](../capabilities/gateway/README.md)). On all other engines clients name both."""

    client_slo_classes: Annotated[tuple[Glob, ...], Field(max_length=MAX_CLASSES)] = field(
        (),
        strict=False,
        description="Globs of the SLO classes that a client may choose for its request, by `meridian_slo_class`, in "
        "place of the gateway's.",
        advice='List the classes that cost the client something, such as `["batch"]`; `["*"]` lets it choose any.',
    )


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
