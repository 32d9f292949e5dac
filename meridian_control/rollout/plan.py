"""A rollout's plan: its steps, their engines, its guardrails; the schema of the file, its limits and defaults.

Knows nothing of a rollout under way. Pure values and functions, usable on any thread.
"""

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from meridian_control.policy.model import Glob
from meridian_control.policy.schema import INT32_MAX, Section

# Times are measured up to here.
MAX_MS = 10_000.0
MAX_STEPS = 32


class Step(Section):
    """Engines that get the candidate in this step and keep it, and how long they are watched before the next one."""

    engine_labels: Mapping[str, Glob] = Field({}, description="Globs by label name; empty matches every engine.")
    percent: float = Field(100.0, ge=0, le=100, description="Share of these, by a stable hash of their ids.")
    bake_s: float = Field(600.0, gt=0, le=30 * 86_400, description="Seconds from the step's beginning to the next one.")

    @model_validator(mode="after")
    def _says_whom(self) -> Self:
        if not self.model_fields_set & {"engine_labels", "percent"}:
            raise PydanticCustomError("nobody", "must have engine_labels or percent")
        return self

    def matches(self, rollout_id: int, engine_id: str, labels: Mapping[str, str]) -> bool:
        """Whether an engine belongs to the step."""
        if position(rollout_id, engine_id) >= self.percent:
            return False
        return all(name in labels and fnmatchcase(labels[name], glob) for name, glob in self.engine_labels.items())


class Guardrails(Section):
    """Limits of what is measured on the candidate's engines; None is no limit."""

    output_itl_p99_ms: Annotated[float, Field(gt=0, le=MAX_MS)] | None = Field(
        None, description="P99 of answer token to answer token."
    )
    output_itl_p99_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The same, over that of the other engines."
    )
    ttot_p99_ms: Annotated[float, Field(gt=0, le=MAX_MS)] | None = Field(
        None, description="P99 of thinking's end to the answer."
    )
    ttot_p99_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The same, over that of the other engines."
    )
    reentry_rate: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Thinking taken up again, per finished answer."
    )
    reentry_rate_increase: Annotated[float, Field(ge=0)] | None = Field(
        None, description="The same, less that of the other engines."
    )
    empty_answer_rate: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Share of answers of at most one token."
    )
    empty_answer_rate_increase: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="The same, less the others'."
    )
    nacks: int = Field(0, ge=0, le=INT32_MAX, description="Engines that refuse the candidate.")
    degraded_engines: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None, description="Engines of the group without a stream past the lease, or switched off."
    )
    min_observations: int = Field(
        100, ge=0, le=INT32_MAX, description="Observations before a latency or rate is judged, and a step may end."
    )


def _some(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise PydanticCustomError("steps", "must have 1 to {limit} entries", {"limit": MAX_STEPS})
    return steps


class Plan(Section):
    """Steps, then all engines."""

    step: Annotated[tuple[Step, ...], AfterValidator(_some)] = Field(
        (), strict=False, validate_default=True, description="In this order."
    )
    guardrails: Guardrails = Guardrails()
    on_violation: Literal["rollback", "halt"] = Field("rollback", description="What follows when a limit is exceeded.")


def position(rollout_id: int, engine_id: str) -> float:
    """Where an engine stands among all, in [0, 100): evenly spread, the same for good, another in each rollout."""
    digest = hashlib.sha256(f"{rollout_id}/{engine_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") * 100 / 2**32
