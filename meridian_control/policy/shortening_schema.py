"""The policy's entries that shorten the thinking of some requests in stages: thinking budgets and pressure.

The module knows no engine, no usage and no measured value. Its values are immutable, so any thread may use them.
"""

import re
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from meridian_control.policy.section import (
    Count,
    EffortGlob,
    ModelGlob,
    Positive,
    Section,
    SloClassGlob,
    TenantGlob,
    field,
)

# Largest number of tokens that a budget may have for a day, or in a burst.
MAX_BUDGET_TOKENS = 10**15
MAX_BUDGETS, MAX_PRESSURES = 256, 16
# The targets of a pressure entry: the fields with a limit, each of which 0 leaves unset.
TARGETS = (
    "output_itl_p99_ms",
    "ttot_p99_ms",
    "ttft_p99_ms",
    "ttfvt_p99_ms",
    "queueing_p99_ms",
    "preempted_answer_ratio",
)


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise PydanticCustomError("budget_name", "must be 1 to 64 letters, digits, dots, underscores or hyphens")
    return value


Tokens = Annotated[int, Field(ge=0, le=MAX_BUDGET_TOKENS)]
# The fields of a stage.
SoftThinkTokens = Annotated[
    Positive,
    field(
        description="Stage soft_close: thinking tokens from which on soft close ends thinking, as "
        "scheduler.soft_think_tokens does.",
        advice="Set it near the median of the thinking tokens of these requests.",
    ),
]
MaxThinkTokens = Annotated[
    Positive,
    field(
        description="Stage lower_cap: hard cap on thinking, in tokens; soft close begins at half of it or earlier, but "
        "not below min_think_tokens.",
        advice="Set it to the shortest thinking that is still of use.",
    ),
]
MinThinkTokens = Annotated[
    Count,
    field(
        description="Floor of the entry: thinking tokens before which no stage ends thinking, and the cap of stage "
        "floor. It may not exceed max_think_tokens. 0 means max_think_tokens, and for soft close soft_think_tokens if "
        "that is less.",
        advice="Leave it at 0 unless the control group has shown that shorter thinking still gives right answers.",
        new=True,
    ),
]


def floors_of(entry: "StagedEntry") -> tuple[int, int]:
    """Return the smallest cap that an entry sets, and the smallest number of thinking tokens from which on soft close
    acts because of it."""
    limit = entry.max_think_tokens
    return entry.min_think_tokens or limit, entry.min_think_tokens or min(entry.soft_think_tokens, limit)


def _check_floor(entry: "StagedEntry") -> None:
    if entry.min_think_tokens > entry.max_think_tokens:
        raise PydanticCustomError(
            "floor_above_cap",
            "must have min_think_tokens of at most max_think_tokens ({limit})",
            {"limit": entry.max_think_tokens},
        )


class BudgetPolicy(Section):
    """Limits the thinking tokens of all requests that match every glob, over all engines and replicas. No request is
    rejected: the less of the budget is left, the earlier thinking ends
    ([stages](../capabilities/budgets/README.md))."""

    name: Annotated[str, AfterValidator(_name)] = field(
        "",
        validate_default=True,
        description="Name of the budget, unique in the policy; usage is kept under it, also when other fields change.",
        advice="Choose another name to begin with a full budget.",
        range="1 to 64 letters, digits, `.`, `_`, `-`",
    )
    model: ModelGlob = field("", advice="Set it if models have budgets of their own.")
    tenant: TenantGlob = field("", advice="Set it to the tenant who pays for the thinking.")
    slo_class: SloClassGlob = field(
        "", advice="Set it to keep batch work from using up the thinking of interactive requests."
    )
    effort: EffortGlob = field("", advice="Set it to limit what requests of high effort may use.")
    tokens_per_minute: Tokens = field(
        0,
        description="Thinking tokens that the budget regains in a minute, evenly; 0 sets no limit per minute.",
        advice="Set it to the thinking that the fleet can afford while it is busy.",
    )
    burst_tokens: Tokens = field(
        0,
        description="Thinking tokens that the limit per minute may save up and spend at once; 0 means those of one "
        "minute.",
        advice="Raise it if load comes in bursts that are longer than a minute. Keep it well above what the limit "
        "regains in ten seconds.",
    )
    tokens_per_day: Tokens = field(
        0,
        description="Thinking tokens that the budget regains in 24 hours, evenly, and saves up at most; 0 sets no "
        "limit per day.",
        advice="Set it to what the tenant pays for in a day.",
    )
    soft_think_tokens: SoftThinkTokens = 4096
    max_think_tokens: MaxThinkTokens = 2048
    min_think_tokens: MinThinkTokens = 0
    shadow: bool = field(
        True,
        description="Count usage and show the stage, but shorten no thinking.",
        advice="Set it to false once `meridianctl budgets` and `meridianctl shadow` show what you expect.",
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if not (self.tokens_per_minute or self.tokens_per_day):
            raise PydanticCustomError("no_limit", "must have tokens_per_minute or tokens_per_day")
        if self.burst_tokens and not self.tokens_per_minute:
            raise PydanticCustomError("burst_alone", "must have tokens_per_minute, because it has burst_tokens")
        _check_floor(self)
        return self


Milliseconds = Annotated[float, Field(ge=0, le=86_400_000)]


class PressurePolicy(Section):
    """Shortens the thinking of all requests on an engine that match every glob while they miss a target there, and
    restores it once there is room ([levels](../capabilities/pressure/README.md))."""

    name: Annotated[str, AfterValidator(_name)] = field(
        "",
        validate_default=True,
        description="Name of the entry, unique among the pressure entries; an engine keeps its level under it.",
        advice="Name the group of requests.",
        range="1 to 64 letters, digits, `.`, `_`, `-`",
    )
    model: ModelGlob = field("", advice="Set it if models have targets of their own.")
    tenant: TenantGlob = field("", advice="Set it if tenants have targets of their own.")
    slo_class: SloClassGlob = field("", advice="Set it to the class whose users wait for answers.")
    effort: EffortGlob = field("", advice="Set it to spare requests of high effort.")
    output_itl_p99_ms: Milliseconds = field(
        0.0,
        description="Target for the P99 of output ITL in milliseconds; 0 sets none.",
        advice="Set it to what readers notice, for example 100.",
    )
    ttot_p99_ms: Milliseconds = field(
        0.0,
        description="Target for the P99 of TTOT in milliseconds; 0 sets none.",
        advice="Set it if answers must follow the end of thinking at once, for example 250.",
    )
    ttft_p99_ms: Milliseconds = field(
        0.0,
        description="Target for the P99 of TTFT in milliseconds, which contains queueing time; 0 sets none.",
        advice="Set it if requests wait in the queue while the engine thinks.",
    )
    ttfvt_p99_ms: Milliseconds = field(
        0.0,
        description="Target for the P99 of TTFVT in milliseconds, which contains queue and thinking; 0 sets none.",
        advice="Set it to how long users wait for an answer.",
    )
    queueing_p99_ms: Milliseconds = field(
        0.0,
        description="Target for the P99 of queueing time in milliseconds; 0 sets none.",
        advice="Set it if requests wait for others to end, however long their prompts are.",
        new=True,
    )
    preempted_answer_ratio: float = field(
        0.0,
        ge=0,
        le=1,
        description="Target for the share of answers that the engine preempts; 0 sets none.",
        advice="Set it if the KV cache runs short, for example 0.01.",
    )
    window_s: int = field(
        10,
        ge=1,
        le=600,
        description="Seconds over which an engine's values are measured before they are compared with the targets.",
        advice="Raise it until an engine gives at least 100 answers in a window.",
    )
    soft_think_tokens: SoftThinkTokens = 4096
    max_think_tokens: MaxThinkTokens = 2048
    min_think_tokens: MinThinkTokens = 0
    entropy_in_force: bool = field(
        False,
        description="While the entry shortens a request, the section entropy is in force for the request, although the "
        "section is in shadow.",
        advice="Set it to true to end converged thinking only while an engine is busy.",
        new=True,
    )
    shadow: bool = field(
        True,
        description="Measure and show the level, but shorten no thinking.",
        advice="Set it to false once `meridianctl pressure` and `meridianctl shadow` show what you expect.",
    )

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if not any(getattr(self, target) for target in TARGETS):
            raise PydanticCustomError("no_target", f"must have a target: {', '.join(TARGETS)}")
        _check_floor(self)
        return self


# An entry that shortens thinking in stages.
StagedEntry: TypeAlias = BudgetPolicy | PressurePolicy
