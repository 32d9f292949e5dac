"""Defines the plan of a rollout: its steps, their engines and its guardrails, with bounds and defaults of each field.

The module does not know the state of a running rollout. All values are immutable and all functions are pure.
"""

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from meridian_control.policy.model import Policy
from meridian_control.policy.section import INT32_MAX, Glob, Section
from meridian_control.policy.shortening_kinds import kinds_of, not_measured

# Largest latency in milliseconds that the histograms measure.
MAX_MS = 10_000.0
MAX_STEPS = 32


class Step(Section):
    """The engines that get the candidate in this step, and the time for which they are watched before the next step."""

    engine_labels: Mapping[str, Glob] = Field({}, description="Globs by label name; empty matches every engine.")
    percent: float = Field(
        100.0,
        ge=0,
        le=100,
        description="Share of matching engines, by a stable hash of their ids; 0 to watch the others only.",
    )
    bake_s: float = Field(600.0, gt=0, le=30 * 86_400, description="Seconds from the step's start to the next step.")

    @model_validator(mode="after")
    def _says_whom(self) -> Self:
        if not self.model_fields_set & {"engine_labels", "percent"}:
            raise PydanticCustomError("nobody", "must have engine_labels or percent")
        return self

    def __str__(self) -> str:
        """Return whom the step selects, in words."""
        labels = ", ".join(f"{name}={glob}" for name, glob in sorted(self.engine_labels.items()))
        share = "all engines" if self.percent == 100 else f"{self.percent:g} % of the engines, by a hash of their ids"
        return share + (f", with {labels}" if labels else "")

    def matches(self, rollout_id: int, engine_id: str, labels: Mapping[str, str]) -> bool:
        """Whether an engine belongs to the step."""
        if position(rollout_id, engine_id) >= self.percent:
            return False
        return all(name in labels and fnmatchcase(labels[name], glob) for name, glob in self.engine_labels.items())


class Guardrails(Section):
    """Limits of the measurements on engines that have the candidate; None is no limit."""

    output_itl_p99_ms: Annotated[float, Field(gt=0, le=MAX_MS)] | None = Field(
        None, description="P99 of the time between answer tokens."
    )
    output_itl_p99_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="P99 of the time between answer tokens, divided by the P99 on the other engines."
    )
    ttot_p99_ms: Annotated[float, Field(gt=0, le=MAX_MS)] | None = Field(
        None, description="P99 of the time from the end of thinking to the answer."
    )
    ttot_p99_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="P99 of the time from the end of thinking to the answer, divided by the P99 on other engines."
    )
    reentry_rate: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Number of times that thinking resumed after its end, per finished answer."
    )
    reentry_rate_increase: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Re-entry rate minus the rate on the other engines."
    )
    empty_answer_rate: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Share of answers that have at most one token."
    )
    empty_answer_rate_increase: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Empty-answer rate minus the rate on the other engines."
    )
    nacks: int = Field(0, ge=0, le=INT32_MAX, description="Engines that refuse the candidate.")
    degraded_engines: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None,
        description="Engines of the group whose stream broke off longer than the lease ago, or whose agent is off; an "
        "engine that has shut down does not count.",
    )
    harm_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Share of the control group's judged requests whose answer the candidate's shortening would have "
        "changed; if unset, the candidate's entropy.max_loss, if the candidate shortens thinking.",
    )
    min_observations: int = Field(
        100,
        ge=0,
        le=INT32_MAX,
        description="Observations needed before a latency or rate is judged or a step ends.",
    )


def _some(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise PydanticCustomError("steps", "must have 1 to {limit} entries", {"limit": MAX_STEPS})
    return steps


class Plan(Section):
    """The plan of a rollout: after the last step all engines get the candidate."""

    step: Annotated[tuple[Step, ...], AfterValidator(_some)] = Field(
        (), strict=False, validate_default=True, description="The steps, in their order."
    )
    guardrails: Guardrails = Guardrails()
    on_violation: Literal["rollback", "halt"] = Field("rollback", description="Reaction to an exceeded limit.")

    def harm_limit(self, candidate: Policy) -> float | None:
        """Return the limit of the guardrail on harm, None for none: that of the plan, or else the candidate's own if
        the candidate shortens thinking and its harm can be measured."""
        if self.guardrails.harm_rate is not None:
            return self.guardrails.harm_rate
        return candidate.entropy.max_loss if kinds_of(candidate) and not not_measured(candidate) else None


def position(rollout_id: int, engine_id: str) -> float:
    """Return an engine's position in [0, 100), which is constant within a rollout and differs between rollouts."""
    digest = hashlib.sha256(f"{rollout_id}/{engine_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") * 100 / 2**32
