"""The policy's entries about thinking budgets: how many thinking tokens some requests may use over the whole fleet.

The module knows no engine, and no usage. Its values are immutable, so any thread may use them.
"""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from meridian_control.policy.section import INT32_MAX, Section, advice

# Largest number of tokens that a budget may have for a day, or in a burst.
MAX_BUDGET_TOKENS = 10**15
MAX_BUDGETS = 256


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise PydanticCustomError("budget_name", "must be 1 to 64 letters, digits, dots, underscores or hyphens")
    return value


Tokens = Annotated[int, Field(ge=0, le=MAX_BUDGET_TOKENS)]


class BudgetPolicy(Section):
    """Limits the thinking tokens of all requests that match every glob, over all engines and replicas. No request is
    rejected: the less of the budget is left, the earlier thinking ends ([stages](../budgets/budgets.md))."""

    name: Annotated[str, AfterValidator(_name)] = Field(
        "",
        validate_default=True,
        description="Name of the budget, unique in the policy; usage is kept under it, also when other fields change.",
        json_schema_extra=advice(
            "Choose another name to begin with a full budget.", range="1 to 64 letters, digits, `.`, `_`, `-`"
        ),
    )
    model: str = Field(
        "",
        max_length=256,
        description="Glob over the model or LoRA adapter name; empty matches all.",
        json_schema_extra=advice("Set it if models have budgets of their own."),
    )
    tenant: str = Field(
        "",
        max_length=256,
        description="Glob over the request's meridian_tenant; empty matches all.",
        json_schema_extra=advice("Set it to the tenant who pays for the thinking."),
    )
    slo_class: str = Field(
        "",
        max_length=256,
        description="Glob over the request's meridian_slo_class; empty matches all.",
        json_schema_extra=advice("Set it to keep batch work from using up the thinking of interactive requests."),
    )
    effort: str = Field(
        "",
        max_length=256,
        description="Glob over the request's effort; empty matches all.",
        json_schema_extra=advice("Set it to limit what requests of high effort may use."),
    )
    tokens_per_minute: Tokens = Field(
        0,
        description="Thinking tokens that the budget regains in a minute, evenly; 0 sets no limit per minute.",
        json_schema_extra=advice("Set it to the thinking that the fleet can afford while it is busy."),
    )
    burst_tokens: Tokens = Field(
        0,
        description="Thinking tokens that the limit per minute may save up and spend at once; 0 means those of one "
        "minute.",
        json_schema_extra=advice("Raise it if load comes in bursts that are longer than a minute."),
    )
    tokens_per_day: Tokens = Field(
        0,
        description="Thinking tokens that the budget regains in 24 hours, evenly, and saves up at most; 0 sets no "
        "limit per day.",
        json_schema_extra=advice("Set it to what the tenant pays for in a day."),
    )
    soft_think_tokens: int = Field(
        4096,
        ge=1,
        le=INT32_MAX,
        description="Stage soft_close: thinking tokens from which on soft close ends thinking, as "
        "scheduler.soft_think_tokens does.",
        json_schema_extra=advice("Set it near the median of the thinking tokens of these requests."),
    )
    max_think_tokens: int = Field(
        2048,
        ge=1,
        le=INT32_MAX,
        description="Stage lower_cap: hard cap on thinking, in tokens; soft close begins at half of it.",
        json_schema_extra=advice("Set it to the shortest thinking that is still of use."),
    )
    shadow: bool = Field(
        True,
        description="Count usage and show the stage, but shorten no thinking.",
        json_schema_extra=advice(
            "Set it to false once `meridianctl budgets` and `meridianctl shadow` show what you expect."
        ),
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if not (self.tokens_per_minute or self.tokens_per_day):
            raise PydanticCustomError("no_limit", "must have tokens_per_minute or tokens_per_day")
        if self.burst_tokens and not self.tokens_per_minute:
            raise PydanticCustomError("burst_alone", "must have tokens_per_minute, because it has burst_tokens")
        return self
